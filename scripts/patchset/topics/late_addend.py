from ..patch import edits, Patch


PATCH = Patch(
    name="late-addend",
    lines=60,
    subject="Let no product keep its arguments until its addend is there",
    why="""\
Inductor makes one addmm of a product and what it is added to. Where that is computed
later, the product waits for it, and its arguments stay with it. In a model whose head is
tied to its embedding, the gradient of the logits waits from the start of the backward
nearly to its end: 825 of 1,403 MB at the peak of an encoder with 50,368 words.

Such a product is not fused into an addmm if what it alone reads is larger than its
result. The sum is then a kernel of its own, or part of one, and the order of kernels
decides when the product is computed. What is later is told by the order of the graph.
""",
    repro="""\
import torch
from torch._inductor.utils import run_and_get_code

def tied(logits, hidden, grad):
    by_head = logits.exp().t() @ hidden
    for _ in range(2):
        grad = grad @ grad
    return by_head + grad.cos()

given = [torch.randn(rows, 16) / 16 for rows in (256, 256, 16)]
with torch.no_grad():
    _, (code,) = run_and_get_code(torch.compile(tied), *given)
print("addmm" in code)  # True: it waits for both products; False with this change
""",
    beyond="""\
Only a product and an addend of which both are computed in the graph are looked at. Whether
the sum could be fused elsewhere for less is not asked, nor what else is live meanwhile.
""",
    test="test/inductor/test_late_addend.py",
    edits=edits('''\
@@ torch/_inductor/fx_passes/post_grad.py
+def _would_wait(product: torch.fx.Node, addend: torch.fx.Node) -> bool:
+    """Whether a product holds more until its addend is there than it is itself."""
+
+    def nbytes(node: torch.fx.Node) -> Any:
+        value = node.meta["val"]
+        return value.numel() * value.dtype.itemsize
+
+    held = sum(nbytes(arg) for arg in product.all_input_nodes if len(arg.users) == 1)
+    return product < addend and statically_known_true(held > nbytes(product))
+
+
 def is_valid_addmm_fusion(match):
@@ torch/_inductor/fx_passes/post_grad.py is_valid_addmm_fusion
         return False  # Shape mismatch
+
+    products = (node for node in match.nodes if node.target is aten.mm.default)
+    if any(_would_wait(product, inp) for product in products):
+        return False
'''),
    since=(2, 13),
    needs=("kernel-order",),
    landed=(("torch/_inductor/fx_passes/post_grad.py", "_would_wait(product, inp)"),),
    risks="""\
One more kernel for each such sum. Computed at once, the product adds its own bytes to a
peak at the start of a backward (an encoder's 842 MB become 910); the order that lets
it wait is among those that are compared by their estimated peaks. Biases and residual
streams are there before their product, and do not change.
""",
)
