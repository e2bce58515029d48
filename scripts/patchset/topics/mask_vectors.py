from ..patch import edits, Patch


PATCH = Patch(
    name="mask-vectors",
    lines=60,
    subject="Load and store bools in vectors of bytes in inductor's CPU kernels",
    why="""\
A compiled ReLU between frozen convolutions saves one byte per element instead of its
input, and becomes slower: the store of a vector's mask takes many times as long as
the rest of the kernel, as at::vec handles bools one by one. Loading them is nearly as
slow. The same holds for every mask that a kernel writes or reads, dropout's included.

Where a mask is one vector, its lanes are now converted to bytes and back, for which
at::vec has instructions. The layout in memory stays: a byte per bool, 0 or 1.
""",
    repro="""\
import timeit, torch

torch.set_num_threads(1)
x = torch.randn(64, 128, 28, 28)
kernels = torch.compile(lambda x: (x.relu(), x > 0)), torch.compile(lambda x: x.relu())
for kernel in kernels:
    kernel(x)
    print(min(timeit.repeat(lambda: kernel(x), number=1, repeat=9)))
# With the mask it takes many times as long as without, and with this change 1.5 times
""",
    beyond="""\
Masks of wider types, which take several vectors (double, int64), and tails that are no
whole vector keep the loop over lanes where at::vec has no conversion for them. GPUs are
not concerned.
""",
    test="test/inductor/test_mask_vectors.py",
    edits=edits("""\
@@ torch/_inductor/codegen/cpp.py _get_vec_load_line
         loadbuf = f"{var} + {cexpr_index(index)}" if index != 0 else var
+        if dtype == torch.bool and self._get_num_vectors(torch.float) == 1:
+            # There are vector instructions for bytes, not for bools.
+            count = cexpr_index(self.num_elems)
+            loaded = f"at::vec::Vectorized<uint8_t>::loadu({loadbuf}, {count})"
+            zeros = "at::vec::Vectorized<float>(0)"
+            return (
+                f"{self._get_mask_type()}(at::vec::convert<float>({loaded}) != {zeros})"
+            )
@@ torch/_inductor/codegen/cpp.py _get_store_line
+            if (
+                isinstance(value, CppCSEVariable)
+                and value.dtype == dtype == torch.bool
+                and self._get_num_vectors(torch.int32) == 1
+            ):
+                # As in _get_vec_load_line.
+                numbers = f"{value}.template to<int32_t,1>()"
+                value = f"at::vec::convert<uint8_t,1,int32_t,1>({numbers})"
             if dtype == torch.float and self.tail_size is None:
                 code.writeline(f"{value}.store({var_expr});")
"""),
    landed=(
        ("torch/_inductor/codegen/cpp.py", "at::vec::convert<uint8_t,1,int32_t,1>("),
    ),
    risks="""\
On instruction sets for which at::vec has no such conversion it falls back to a loop
over the lanes, as quantized kernels do.
""",
)
