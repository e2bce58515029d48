from __future__ import annotations

from ..patch import Edit, Patch


_CPP = "torch/_inductor/codegen/cpp.py"
_LOAD = '        loadbuf = f"{var} + {cexpr_index(index)}" if index != 0 else var\n'
_STORE = (
    "            if dtype == torch.float and self.tail_size is None:\n"
    '                code.writeline(f"{value}.store({var_expr});")\n'
)

PATCH = Patch(
    name="mask-vectors",
    subject="Load and store bools in vectors of bytes in inductor's CPU kernels",
    why="""\
A compiled ReLU between frozen convolutions saves one byte per element instead of its
input, and becomes slower: the store of a vector's mask takes twenty times as long as
the rest of the kernel. A vector of bools has one lane per byte, four times those of
the mask, and no instructions of its own: at::vec handles them one by one, in loops
that the kernels are compiled not to vectorize. Loading bools is nearly as slow. The
same holds for every mask that a kernel writes or reads, dropout's included.

Where a mask is one vector, its lanes are now converted to bytes and back, for which
at::vec has instructions. The layout in memory stays: a byte per bool, 0 or 1.
""",
    test="test/inductor/test_mask_vectors.py",
    edits=(
        Edit(
            _CPP,
            anchor=_LOAD,
            replacement=_LOAD
            + """\
        if dtype == torch.bool and self._get_num_vectors(torch.float) == 1:
            # There are vector instructions for bytes, not for bools.
            count = cexpr_index(self.num_elems)
            loaded = f"at::vec::Vectorized<uint8_t>::loadu({loadbuf}, {count})"
            zeros = "at::vec::Vectorized<float>(0)"
            return (
                f"{self._get_mask_type()}(at::vec::convert<float>({loaded}) != {zeros})"
            )
""",
            inside="_get_vec_load_line",
        ),
        Edit(
            _CPP,
            anchor=_STORE,
            replacement="""\
            if (
                isinstance(value, CppCSEVariable)
                and value.dtype == dtype == torch.bool
                and self._get_num_vectors(torch.int32) == 1
            ):
                # As in _get_vec_load_line.
                numbers = f"{value}.template to<int32_t,1>()"
                value = f"at::vec::convert<uint8_t,1,int32_t,1>({numbers})"
"""
            + _STORE,
            inside="_get_store_line",
        ),
    ),
    since=(2, 11),
    landed=((_CPP, "at::vec::convert<uint8_t,1,int32_t,1>("),),
    risks="""\
Quantized kernels use the same conversions; on instruction sets for which at::vec has
none of its own they fall back to a loop over the lanes. The tests compare
with eager mode for several dtypes, sizes that leave a tail, and strided tensors.
""",
    kind="performance",
)
