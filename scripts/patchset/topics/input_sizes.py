from ..patch import edits, Patch


PATCH = Patch(
    name="input-sizes",
    lines=60,
    subject="Count a graph's inputs by their storage in inductor's peak estimate",
    why="""\
Inductor compares orders of kernels by an estimate of the peak, in which inputs that the
graph may free count by the range that a kernel reads of them; which kernel, is chance.
Where an input is read in halves it counts as one half, and where a kernel reads it several
times, or several inputs are views of one storage, as more than all of it. By that, a CLIP
model gets an order that holds 6 MB of 808 more.

An input now counts as it is stored. Those that are parts of one storage have equal shares
of it.
""",
    trailers=("See also: #192578",),
    repro="""\
import torch
from torch._inductor import memory

def find(*args):
    found = inner(*args)
    return print({k: each.mpi_buffer.size_free for k, each in found.items()}) or found

def halves(x, wide, narrow):
    one, other = (x @ wide).chunk(2, -1)
    return (torch.sin(one) @ narrow + torch.cos(other) @ narrow).sum()

inner, memory.get_freeable_input_buf = memory.get_freeable_input_buf, find
given = [torch.ones(s, requires_grad=True) for s in [(4096, 64), (64, 128), (64, 64)]]
torch.compile(halves)(*given).backward()
# mm, which has 2097152 bytes, is said to have 1048576 without this change
""",
    beyond="""\
Views of one storage that are freed at different times still count as if each took its
share along.
""",
    test="test/inductor/test_input_sizes.py",
    edits=edits('''\
@@ torch/_inductor/memory.py until 2.12
-    from collections.abc import Callable
+    from collections.abc import Callable, Container
@@ torch/_inductor/memory.py since 2.13
-    from collections.abc import Callable, Iterable
+    from collections.abc import Callable, Container, Iterable
@@ torch/_inductor/memory.py
+def _stored_sizes(names: Container[str]) -> dict[str, int]:
+    """
+    How many bytes each of these inputs of the graph takes. Those that are parts of one
+    storage have equal shares of it, since they are usually freed together.
+    """
+    values = zip(V.graph.graph_input_names, V.graph.example_inputs or ())
+    storages = {
+        name: value.untyped_storage()
+        for name, value in values
+        if name in names
+        and isinstance(value, torch.Tensor)
+        and value.layout is torch.strided
+    }
+    shares = collections.Counter(storage._cdata for storage in storages.values())
+    sizes = {}
+    for name, storage in storages.items():
+        size = storage.nbytes()
+        if isinstance(size, torch.SymInt):
+            size = V.graph.sizevars.optimization_hint(size.node.expr, fallback=0)
+        sizes[name] = size // shares[storage._cdata]
+    return sizes
+
+
 def get_freeable_input_buf(
@@ torch/_inductor/memory.py get_freeable_input_buf
+    # A kernel that reads an input may read less of it than is stored, or some twice.
+    dep_name_to_size.update(_stored_sizes(dep_name_to_size))
     # create FreeableInputBuffer objects and add them to the returned dictionary
'''),
    landed=(("torch/_inductor/memory.py", "_stored_sizes("),),
    risks="""\
Kernels may run in another order; they and their arguments stay the same.
""",
)
