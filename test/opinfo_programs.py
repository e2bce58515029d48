"""Small programs that train through one operator of torch's OpInfo databases.

Every input of the operator is computed by a product or a cast, and what it returns is
read by something nonlinear whose scale is trained: the operator can be recomputed, as can
what it reads and what reads it. Each way to call it is a `Case`; the cases of an operator
make one program, so that budgets have something to choose from.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations, custom_op_db, hop_db
from torch.testing._internal.opinfo import definitions
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


SEED = 0
FP8 = torch.float8_e4m3fn
# An operator's first one is tried in several ways.
FIRST = (
    *(torch.float32, torch.complex64, torch.int64, torch.bool, torch.float64),
    *(torch.float16, torch.bfloat16, torch.uint8),
)
OTHERS = (torch.bfloat16, torch.complex64, torch.int64, torch.bool)
# Among how many samples one is chosen.
AMONG = 24
# The cases of the first dtype.
PLAIN, VIEWS, IN_PLACE = "plain", "views", "in place"
# The widest input that is a product with a matrix.
WIDEST = 64
# What whole numbers choose from.
LEVELS = 4


def number(*words):
    """A number for a name, the same in every process."""
    return zlib.crc32(" ".join(map(str, words)).encode())


# ---------------------------------------------------------------- operators


def database():
    """Every operator by its name, and how to call it."""
    found = {}
    parts = common_methods_invocations.op_db, hop_db.hop_db, custom_op_db.custom_op_db
    for info in itertools.chain(*parts):
        name = info.formatted_name
        # Some are there twice.
        while name in found:
            name += "'"
        found[name] = info
    return found


@contextmanager
def unseeded():
    """The databases' random operators draw from the generator as it is.

    They are wrapped in what seeds it, which no graph holds.
    """

    def direct(function, *args, **kwargs):
        return function(*args, **kwargs)

    parts = vars(definitions).values()
    with ExitStack() as stack:
        for module in (common_methods_invocations, hop_db, *parts):
            if hasattr(module, "wrapper_set_seed"):
                patch = mock.patch.object(module, "wrapper_set_seed", direct)
                stack.enter_context(patch)
        yield


# -------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One way to call an operator.

    ``call`` takes what stands in for each of the tensors ``given``.
    """

    name: str
    call: Callable[[Sequence[Tensor]], Any]
    given: list[Tensor]
    weights: list[Tensor]
    dtypes: list[torch.dtype]
    # Whether what it returns has elements that are no number.
    is_odd: bool = False

    def __call__(self, given, weights):
        *products, scale, levels = weights
        values = [
            prepared(value, weight, dtype, self.name)
            for value, weight, dtype in zip(given, products, self.dtypes)
        ]
        found = []
        for leaf in tree_leaves(self.call(values)):
            if isinstance(leaf, (bool, int, float)):
                leaf = torch.tensor(leaf)
            if isinstance(leaf, Tensor):
                value = viewed(leaf) if self.name == VIEWS else leaf
                found.append(trained(value, scale, levels, self.is_odd))
        return found


def made(name, function, sample):
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    given = [stored(leaves[at]) for at in tensors]
    dtypes = [leaves[at].dtype for at in tensors]
    constants = [None if at in tensors else leaf for at, leaf in enumerate(leaves)]

    def call(values):
        again = [*constants]
        for at, value in zip(tensors, values):
            again[at] = value
        first, args, kwargs = tree_unflatten(again, spec)
        return sample.output_process_fn_grad(function(first, *args, **kwargs))

    weights = [weight_of(each) for each in given]
    weights += [torch.ones((), requires_grad=True)]
    weights += [torch.linspace(0.5, 1.0, LEVELS).requires_grad_()]
    return Case(name, call, given, weights, dtypes)


def stored(value):
    """What an input is computed from: floats that have a product."""
    dtype = value.dtype
    if is_fp8(dtype):
        value = value.to(torch.float32)
    elif not dtype.is_floating_point and not dtype.is_complex:
        value = value.to(torch.float64)
    return value.detach().clone().requires_grad_(value.requires_grad)


def is_fp8(dtype):
    return dtype.is_floating_point and dtype.itemsize == 1


def weight_of(value):
    """What leaves an input as it is, in a product that looks trained."""
    width = value.shape[-1] if value.dim() > 0 else 0
    is_plain = value.layout == torch.strided and value.is_contiguous()
    if is_plain and 0 < width <= WIDEST and value.isfinite().all():
        weight = torch.eye(width, dtype=value.dtype)
    else:
        weight = torch.ones((), dtype=value.dtype)
    return weight.requires_grad_(value.requires_grad)


def prepared(value, weight, dtype, case):
    """An input of the operator, computed."""
    product = value @ weight if weight.dim() else value * weight
    if dtype != product.dtype:
        return (product if is_fp8(dtype) else product.round()).to(dtype)
    if dtype == torch.bfloat16:
        # What is kept of it may have half the size.
        return product.to(FP8).to(dtype)
    if case == VIEWS and product.dim() > 0 and product.layout == torch.strided:
        product = product.unsqueeze(0).transpose(0, -1).transpose(0, -1).squeeze(0)
        part = product.narrow(-1, 0, min(1, product.shape[-1]))
        part.mul_(weight.detach().reshape(-1)[0])
    return product


def viewed(value):
    """The elements of a value by a chain of views, some of them overwritten."""
    value = value.clone().unsqueeze(-1).flatten()
    if value.dtype.is_floating_point and value.dtype.itemsize > 1:
        value[::2].mul_(2)
    return value.unsqueeze(0)


def trained(value, scale, levels, is_odd):
    """A number that depends on a value and on something trained."""
    if value.layout != torch.strided:
        value = value.to_dense()
    dtype = value.dtype
    if dtype == torch.bool:
        return torch.where(value, levels[0], levels[1]).sum()
    if not dtype.is_floating_point and not dtype.is_complex:
        return levels[value.to(torch.int64) % LEVELS].sum()
    if dtype.is_complex:
        value = torch.view_as_real(value.to(torch.complex64).resolve_conj())
    elif dtype.itemsize < 4:
        value = value.to(torch.float32)
    product = value * scale
    return (product.nan_to_num(0, 1, -1) if is_odd else product).sin().sum()


def cases(name, info):
    """By its name, what makes each way to call an operator; some may not work."""
    known = [dtype for dtype in FIRST if dtype in info.dtypes]
    # One that only GPUs have knows no dtype here, and has no samples.
    first = (known or sorted(info.dtypes, key=str) or [torch.float32])[0]
    kinds = {PLAIN: first, VIEWS: first}
    if name == "register_hook_simple":
        # In eager mode, too, a hook of a view that was overwritten ends the process.
        del kinds[VIEWS]
    if info.inplace_variant is not None:
        kinds[IN_PLACE] = first
    for dtype in OTHERS:
        if dtype in info.dtypes and dtype != first:
            kinds[str(dtype).removeprefix("torch.")] = dtype
    for kind, dtype in kinds.items():
        yield kind, functools.partial(case_of, info, name, dtype, kind)
    for layout, is_supported in (
        (torch.sparse_coo, info.supports_sparse),
        (torch.sparse_csr, info.supports_sparse_csr),
    ):
        if is_supported:
            kind = str(layout).removeprefix("torch.").replace("_", " ")
            yield kind, functools.partial(sparse_case, info, kind, layout)


def case_of(info, name, dtype, case):
    torch.manual_seed(SEED)
    trains = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    every = info.sample_inputs("cpu", dtype, requires_grad=trains)
    every = [*itertools.islice(every, AMONG)]
    function = info.op
    if case == IN_PLACE:
        function = info.inplace_variant
        every = [sample for sample in every if not sample.broadcasts_input]
    every = [sample for sample in every if has_elements(sample)] or every
    if not every:
        raise ValueError("no sample")
    # Two cases that differ by their name may have the same sample.
    return made(case, function, every[number(name, case) % len(every)])


def has_elements(sample):
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return all(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def sparse_case(info, case, layout):
    samples = info.sample_inputs_sparse(layout, "cpu", torch.float32)
    return made(case, info.op, next(iter(samples)))


# ----------------------------------------------------------------- programs


class Program:
    """Cases in one function, and a step that trains it."""

    def __init__(self, parts):
        self.parts = parts
        self.inputs = [(case.given, case.weights) for case in parts]
        leaves = tree_leaves(self.inputs)
        self.leaves = [leaf for leaf in leaves if leaf.requires_grad]

    def __call__(self, inputs):
        numbers = []
        for case, (given, weights) in zip(self.parts, inputs):
            numbers += case(given, weights)
        every = torch.stack(numbers)
        return every.sum(), every.detach()

    def step(self, function=None):
        """The loss, what each case adds to it, and the gradients."""
        torch.manual_seed(SEED)
        loss, numbers = (function or self)(self.inputs)
        gradients = torch.autograd.grad(loss, self.leaves, allow_unused=True)
        nothing = torch.empty(0)
        found = [nothing if each is None else each for each in gradients]
        return [each.detach() for each in (loss, numbers, *found)]
