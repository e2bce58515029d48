"""What inductor's code for a training step allocates, known without running it.

    gpu = GPUS["h100"]
    with compiled_for(gpu) as backend:
        training = Training(net, whole=compiled(backend), fake=True).warmed()
        replay(training, gpu)["peak"]    # bytes

Inductor partitions, lowers, fuses, schedules and generates code; no kernel is compiled.
Its wrappers, which allocate and free, run on fake tensors with kernels that do nothing,
and what is not compiled runs on fake tensors, too.

For a GPU, which need not be there, all but the wrappers takes place on the CPU: autograd's
engine wants a driver where tensors say CUDA. Joint graphs are moved to ``cuda:0`` before
they are partitioned, and arguments of the wrappers for the time of a call.

Not seen are scratch memory of operators that are no kernels of inductor's, what an
allocator loses to fragmentation, and what inductor chooses by benchmarks.
"""

import functools
import gc
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, Optional
from unittest import mock

import torch
from torch import fx, Tensor
from torch._dynamo import device_interface
from torch._inductor import compile_fx, config, decomposition, output_code
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _triton
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.meters import CountedStorages, gradients
from benchmarks.pages import Row
from benchmarks.tracing import CUDAAttention
from benchmarks.ways import Training


CUDA = torch.device("cuda:0")


def gpu(name: str, capability: tuple[int, int], **properties: float) -> SimpleNamespace:
    """A device's properties, by the names that torch.cuda has for them."""
    major, minor = capability
    same = {"warp_size": 32, "max_threads_per_block": 1024, "gcnArchName": ""}
    same["regs_per_multiprocessor"] = 65536
    return SimpleNamespace(name=name, major=major, minor=minor, **same, **properties)


# As NVIDIA's data sheets have them; flops are those of dense bf16.
GPUS = {
    "h100": gpu(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        multi_processor_count=132,
        total_memory=80 * 2**30,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=227 * 2**10,
        L2_cache_size=50 * 2**20,
        flops_per_s=989e12,
        bytes_per_s=3.35e12,
    ),
    "rtx4090": gpu(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        multi_processor_count=128,
        total_memory=24 * 2**30,
        max_threads_per_multi_processor=1536,
        shared_memory_per_block_optin=99 * 2**10,
        L2_cache_size=72 * 2**20,
        flops_per_s=165e12,
        bytes_per_s=1.008e12,
    ),
}


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@contextmanager
def _pretend(gpu: Optional[SimpleNamespace]) -> Iterator[None]:
    """Whatever inductor asks of a device is answered by ``gpu``, if there is one."""
    if gpu is None:
        yield
        return
    capability, memory = (gpu.major, gpu.minor), (gpu.total_memory, gpu.total_memory)
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_properties": gpu,
        "get_device_capability": capability,
        "get_device_name": gpu.name,
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "is_current_stream_capturing": False,
        "mem_get_info": memory,
        "synchronize": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "device": nullcontext(),
        "_DeviceGuard": nullcontext(),
        "_lazy_init": None,
    }
    interface = device_interface.CudaInterface
    with ExitStack() as stack:
        enter = stack.enter_context
        for name, value in answers.items():
            enter(mock.patch.object(torch.cuda, name, _always(value)))
            if name in vars(interface):
                answer = staticmethod(_always(value))
                enter(mock.patch.object(interface, name, answer))
        enter(
            mock.patch.object(
                interface, "get_compute_capability", _always(10 * gpu.major + gpu.minor)
            )
        )
        workers = device_interface
        enter(mock.patch.dict(workers.caching_worker_device_properties, cuda=[gpu]))
        enter(mock.patch.dict(workers.caching_worker_current_devices, cuda=0))
        enter(mock.patch.object(_triton, "triton_hash_with_backend", _always("none")))
        # Otherwise a real tensor would be made for the first fake one.
        enter(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        create: Any = DeviceProperties.create
        for cached in (_triton.has_triton, create.__func__):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield


def _move(module: fx.GraphModule) -> None:
    """Move a graph to the GPU, in place; what shares a storage goes on sharing it."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return CUDA if value.type == "cpu" else value
        is_on_cpu = isinstance(value, FakeTensor) and value.device.type == "cpu"
        return _on(CUDA, value) if is_on_cpu else value

    for node in module.graph.nodes:
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])


class _Roofline(CountedStorages):
    """Seconds, too: of each kernel those of its flops or of its bytes, the larger.

    What several arguments of a kernel share counts once, as does what it overwrites.
    """

    def __init__(
        self, gpu: Optional[SimpleNamespace], there: Sequence[Any] = ()
    ) -> None:
        super().__init__(there)
        self.gpu, self.seconds = gpu, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = self.flops
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not _is_free(func):
            self.add(tree_leaves((args, kwargs, result)), self.flops - before)
        return result

    def add(self, values: Sequence[Any], flops: int = 0) -> None:
        """A kernel of these arguments and results."""
        if self.gpu is None:
            return
        nbytes = {
            (x.untyped_storage()._cdata, x.storage_offset(), x.numel()): x.nbytes
            for x in values
            if isinstance(x, Tensor)
        }
        moved = sum(nbytes.values()) / self.gpu.bytes_per_s
        self.seconds += max(flops / self.gpu.flops_per_s, moved)


# No kernel runs where these allocate, name, or ask for a tensor's device.
_FREE = ("empty", "new_empty", "lift", "_unsafe_view", "set_", "resize_", "device")


def _is_free(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return getattr(func, "is_view", False) or name.startswith(_FREE)


class _Kernel:
    """In place of one that inductor generated."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, _Roofline):
                mode.add(args)


def replay(
    training: Training, gpu: Optional[SimpleNamespace], trains: bool = True
) -> Row:
    """What a step on fakes holds, and what it takes; it was compiled before.

    If it does not train, it is the loss alone.

    ``given`` are the bytes that are there before: parameters, inputs, and what the
    optimizer keeps; ``peak`` those beyond. ``seconds`` are those of the GPU's roofline,
    without the optimizer's, and not there for the CPU.
    """
    module = training.module
    there = [*module.parameters(), *module.buffers(), *training.inputs]
    gc.collect()
    with training.mode, training.within, _Roofline(gpu, there) as meter:
        loss = training.loss()
        if trains:
            loss.backward()
        del loss
        seconds = {} if gpu is None else {"seconds": meter.seconds}
        if training.optimizer is not None:
            training.optimizer.step()
        held = {"peak": meter.peak, "given": meter.given}
        gradients(training.parameters)
    return {**held, "flops": meter.flops, **seconds}


@contextmanager
def compiled_for(gpu: Optional[SimpleNamespace]) -> Iterator[Callable[..., Any]]:
    """A backend for ``torch.compile`` whose graphs are inductor's for a GPU, or the CPU.

    It takes fake CPU tensors, and splits graphs by the config's budgets. RuntimeError for
    a GPU where this torch has no CUDA.
    """
    if gpu is not None and torch.version.cuda is None:
        raise RuntimeError(
            f"torch {torch.__version__} was built without CUDA; what is generated for a "
            "GPU needs a build with it, though no GPU"
        )
    device = torch.device("cpu") if gpu is None else CUDA
    wrappers: list[Any] = []

    def inner_compile(module: fx.GraphModule, values: Any, **kwargs: Any) -> Any:
        inputs = [
            node.meta["val"] for node in module.graph.find_nodes(op="placeholder")
        ]
        if kwargs.get("is_backward"):  # the forward chose its strides
            inputs = list(values)
        compile_fx.compile_fx_inner(module, inputs, **kwargs)
        wrapper = wrappers.pop()

        def run(args: list[Any]) -> list[Any]:
            moved = [_on(device, value) for value in args]
            args.clear()
            return [_on(torch.device("cpu"), value) for value in wrapper.call(moved)]

        run._boxed_call = True  # type: ignore[attr-defined]
        run.memory = wrapper.memory  # type: ignore[attr-defined]
        return run

    def load(lowering: GraphLowering, wrapper: Any, *_: Any) -> Any:
        made = _runnable(wrapper.value)
        # The untouched wheel has no reader.
        read = getattr(output_code, "wrapper_memory", lambda *_: None)
        made.memory = read(lowering, wrapper.value)
        wrappers.append(made)
        return made

    settings: dict[str, Any] = {"compile_threads": 1, "shape_padding": False}
    if gpu is None:
        # Plain loops take and write the same buffers, and no one compiles them.
        settings.update({"cpp.simdlen": 1, "cpp.vec_isa_ok": True})
    make_kernel = _always(_Kernel())
    torch._dynamo.reset()
    with (
        mock.patch.object(GraphLowering, "_compile_to_module_lines", load),
        mock.patch.object(AsyncCompile, "triton", make_kernel),
        mock.patch.object(AsyncCompile, "cpp_pybinding", make_kernel),
        mock.patch.object(AsyncCompile, "wait", _always(None)),
        # Padding is decided by a benchmark; a cache would hide the graphs.
        config.patch(force_disable_caches=True, **settings),
        _pretend(gpu),
        nullcontext() if gpu is None else _partitioned_on_gpu(),
    ):
        yield functools.partial(compile_fx.compile_fx, inner_compile=inner_compile)


def _on(device: torch.device, value: Any) -> Any:
    """A fake tensor that shares its storage with another, and says this device."""
    if not isinstance(value, FakeTensor) or value.device == device:
        return value
    with torch._C._DisableTorchDispatch():
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        storage = value.untyped_storage()
        meta.set_(storage, value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, meta, device)


@contextmanager
def _partitioned_on_gpu() -> Iterator[None]:
    """Joint graphs of the CPU are moved to the GPU before they are partitioned."""
    joint_passes = compile_fx._recursive_joint_graph_passes
    fold = joint_graph.constant_fold_uniform_value

    def passes(
        module: fx.GraphModule,
        skip_invoke_subgraph: bool = False,
        input_device: Any = None,
    ) -> fx.GraphModule:
        return joint_passes(module, skip_invoke_subgraph, CUDA)

    def fold_and_move(module: fx.GraphModule) -> None:
        values = (node.meta.get("val") for node in module.graph.nodes)
        # Chunks of a graph are made of what was moved.
        if not any(getattr(value, "device", None) == CUDA for value in values):
            fold(module)  # with real constants
            _move(module)

    gradient = torch.ops.aten.embedding_dense_backward.default
    decompose = decomposition.decompositions[gradient]

    def decompose_for_gpu(*args: Any) -> Any:
        with mock.patch.object(FakeTensor, "is_cuda", True, create=True):
            return decompose(*args)

    with (
        mock.patch.dict(decomposition.decompositions, {gradient: decompose_for_gpu}),
        mock.patch.object(compile_fx, "_recursive_joint_graph_passes", passes),
        mock.patch.object(joint_graph, "constant_fold_uniform_value", fold_and_move),
        CUDAAttention(),
    ):
        yield


def _runnable(code: str) -> Any:
    """The wrapper's module, with kernels and what would touch a device put aside."""
    made: Any = types.ModuleType("wrapper")
    made.__file__ = "wrapper"
    stream = "from torch._C import _cuda_getCurrentRawStream as get_raw_stream"
    exec(compile(code.replace(stream, ""), "wrapper", "exec"), vars(made))  # noqa: S102
    for name in [n for n in vars(made) if n.startswith(("assert_", "cpp_fused"))]:
        setattr(made, name, _always(None))
    made.get_raw_stream, made.copy_if_misaligned = _always(0), lambda x: x
    # These make tensors behind the dispatcher's back.
    for device in ("cpu", "cuda"):
        make = functools.partial(_empty_strided, device)
        setattr(made, f"empty_strided_{device}", make)
    made.reinterpret_tensor = lambda x, size, stride, offset=0: x.as_strided(
        size, stride, x.storage_offset() + offset
    )
    return made


def _empty_strided(device: str, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
