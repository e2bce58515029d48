"""What inductor's code for a training step allocates, known without running it.

    step = compile_for(GPUS["h100"], module, inputs)    # both fake, on the CPU
    step.replay().peak                                  # bytes

Inductor partitions, lowers, fuses, schedules and generates code; no kernel is compiled.
Its wrappers, which allocate and free, run on fake tensors with kernels that do nothing.

For a GPU, which need not be there, Dynamo and AOTAutograd trace for the CPU: autograd's
engine wants a driver where tensors say CUDA. The joint graph is then moved to ``cuda:0``.

Not seen are scratch memory of operators that are no kernels of inductor's, what an
allocator loses to fragmentation, and what inductor chooses by benchmarks.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional
from unittest import mock

import torch
from torch import fx, Tensor
from torch._dynamo import device_interface
from torch._inductor import compile_fx, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _triton
from torch.utils._pytree import tree_map

from benchmarks.live_bytes import CountedStorages, storages
from benchmarks.tracing import CUDAAttention


CUDA = torch.device("cuda:0")


def gpu(name: str, capability: tuple[int, int], **properties: int) -> SimpleNamespace:
    """A device's properties, by the names that torch.cuda has for them."""
    major, minor = capability
    same = {"warp_size": 32, "max_threads_per_block": 1024, "gcnArchName": ""}
    same["regs_per_multiprocessor"] = 65536
    return SimpleNamespace(name=name, major=major, minor=minor, **same, **properties)


# As NVIDIA's data sheets have them.
GPUS = {
    "h100": gpu(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        multi_processor_count=132,
        total_memory=80 * 2**30,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=227 * 2**10,
        L2_cache_size=50 * 2**20,
    ),
    "rtx4090": gpu(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        multi_processor_count=128,
        total_memory=24 * 2**30,
        max_threads_per_multi_processor=1536,
        shared_memory_per_block_optin=99 * 2**10,
        L2_cache_size=72 * 2**20,
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
    moved_storages: dict[int, torch.UntypedStorage] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return CUDA if value.type == "cpu" else value
        if not isinstance(value, FakeTensor) or value.device.type != "cpu":
            return value
        old = value.untyped_storage()
        if old._cdata not in moved_storages:
            whole = torch.empty(old.nbytes(), dtype=torch.uint8, device="meta")
            moved_storages[old._cdata] = whole.untyped_storage()
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        storage = moved_storages[old._cdata]
        meta.set_(storage, value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, meta, CUDA)

    with torch._C._DisableTorchDispatch():
        for node in module.graph.nodes:
            node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))
            if "val" in node.meta:
                node.meta["val"] = tree_map(moved, node.meta["val"])


@dataclass
class Graph:
    """One of the two graphs; what goes in and out has the names of fx nodes.

    ``origins`` has, for each value of the wrapper, the operators that it is of and the
    line of the model that they came from.
    """

    module: fx.GraphModule
    inputs: dict[str, Any]
    outputs: list[Optional[str]]
    call: Callable[[list[Any]], Sequence[Any]] = lambda _: ()
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)


class Live(NamedTuple):
    """A buffer that is live at the peak."""

    name: str
    nbytes: int
    operators: str
    line: str


@dataclass
class Replay:
    """Live bytes after each allocation, without parameters and inputs.

    ``backward_at`` is the first allocation of the backward.
    """

    curve: list[int]
    backward_at: int
    live: list[Live]

    @property
    def peak(self) -> int:
        return max(self.curve, default=0)

    @property
    def peaks(self) -> tuple[int, int]:
        """Of the forward and of the backward."""
        at = self.backward_at
        return max(self.curve[:at], default=0), max(self.curve[at:], default=0)


class _Recorder(CountedStorages):
    """Notes the live bytes after each allocation, and what is live after one of them."""

    def __init__(self, there: Sequence[Any], look_at: int = -1) -> None:
        self.curve: list[int] = []
        self.look_at = look_at
        self.seen: dict[int, tuple[str, int]] = {}
        super().__init__(there)
        self.there = set(self._live)
        self.curve.clear()

    def _follow(self, storage: torch.UntypedStorage) -> None:
        known = storage._cdata in self._live
        super()._follow(storage)
        if known:
            return
        self.curve.append(self.risen)
        if len(self.curve) - 1 == self.look_at:
            self._look()

    def _look(self) -> None:
        """Name what is live by the variables of the wrapper that runs."""
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "call":
            frame = frame.f_back  # type: ignore[assignment]
        names = {} if frame is None else frame.f_locals
        for name, value in names.items():
            for storage in storages([value]):
                if storage._cdata in self._live and storage._cdata not in self.there:
                    self.seen.setdefault(storage._cdata, (name, storage.nbytes()))


@dataclass
class Step:
    """A step that was compiled for a GPU, or for the CPU where ``gpu`` is None.

    ``split`` are the two graphs as they were before inductor's passes.
    """

    gpu: Optional[SimpleNamespace]
    graphs: list[Graph]
    split: list[fx.GraphModule]

    def replay(self) -> Replay:
        """Run both wrappers on fakes, once for the curve and once to look at its peak."""
        replay = self._run(-1)
        at = replay.curve.index(replay.peak) if replay.curve else -1
        # Looking at a wrapper's variables keeps them alive, and so is for another run.
        replay.live = self._run(at).live
        return replay

    def _run(self, look_at: int) -> Replay:
        forward, backward = self.graphs
        given, wanted = forward.inputs, backward.inputs
        mode = next(v.fake_mode for v in given.values() if isinstance(v, FakeTensor))
        with _pretend(self.gpu), mode:
            recorder = _Recorder(list(given.values()), look_at)
            with recorder:
                made = dict(zip(forward.outputs, forward.call(list(given.values()))))
                # What is saved is the backward's alone; the loss stays the caller's.
                known = {**given, **{n: made.pop(n) for n in wanted if n in made}}
                arguments = [known.pop(name, None) for name in wanted]
                backward_at = len(recorder.curve)
                for at, fake in enumerate(wanted.values()):
                    if arguments[at] is None:  # a tangent
                        is_tensor = isinstance(fake, Tensor)
                        arguments[at] = torch.empty_like(fake) if is_tensor else fake
                backward.call(arguments)
        # Buffers of both have the same names.
        origins = forward.origins
        if look_at >= backward_at:
            origins = {**origins, **backward.origins}
        live = [
            Live(name, nbytes, *origins.get(name, ("", "")))
            for name, nbytes in recorder.seen.values()
        ]
        live.sort(key=lambda each: -each.nbytes)
        return Replay(recorder.curve, backward_at, live)


class _Stop(BaseException):
    """Both graphs are compiled. Nothing between here and there catches it."""


def compile_for(
    gpu: Optional[SimpleNamespace],
    module: Callable[..., Tensor],
    inputs: Sequence[Any],
) -> Step:
    """Compile forward and backward of fake CPU tensors, as for a GPU if one is given.

    Budgets are those of the config. RuntimeError where this torch has no CUDA.
    """
    if gpu is not None and torch.version.cuda is None:
        raise RuntimeError(
            f"torch {torch.__version__} was built without CUDA; what is generated for a "
            "GPU needs a build with it, though no GPU"
        )
    graphs: list[Graph] = []
    split: list[fx.GraphModule] = []

    def inner_compile(module: fx.GraphModule, values: Any, **kwargs: Any) -> Any:
        nodes = module.graph.find_nodes(op="placeholder")
        inputs = {node.name: node.meta["val"] for node in nodes}
        if kwargs.get("is_backward"):  # the forward chose its strides
            inputs = dict(zip(inputs, values))
        (output,) = module.graph.find_nodes(op="output")
        outputs = [getattr(value, "name", None) for value in output.args[0]]
        graphs.append(Graph(module, inputs, outputs))
        split.append(copy.deepcopy(module))
        with _pretend(gpu):
            compile_fx.compile_fx_inner(module, list(inputs.values()), **kwargs)
        if kwargs.get("is_backward"):
            raise _Stop
        return forward

    def load(lowering: GraphLowering, wrapper: Any, *_: Any) -> Any:
        graph = graphs[-1]
        graph.origins = dict(_origins(graph.module, lowering))
        made = _runnable(wrapper.value)
        graph.call = made.call
        return made

    forward = mock.Mock(_boxed_call=True)
    make_kernel = _always(SimpleNamespace(run=_always(None)))
    backend = functools.partial(compile_fx.compile_fx, inner_compile=inner_compile)
    torch._dynamo.reset()
    with (
        mock.patch.object(GraphLowering, "_compile_to_module_lines", load),
        mock.patch.object(AsyncCompile, "triton", make_kernel),
        mock.patch.object(AsyncCompile, "cpp_pybinding", make_kernel),
        mock.patch.object(AsyncCompile, "wait", _always(None)),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        # Padding is decided by a benchmark; a cache would hide the graphs.
        config.patch(force_disable_caches=True, compile_threads=1, shape_padding=False),
        nullcontext() if gpu is None else _partitioned_for(gpu),
        suppress(_Stop),
    ):
        torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    return Step(gpu, graphs, split)


@contextmanager
def _partitioned_for(gpu: SimpleNamespace) -> Iterator[None]:
    """Joint graphs of the CPU are moved to the GPU before they are partitioned."""
    partition, joint_passes = (
        compile_fx.partition_fn,
        compile_fx._recursive_joint_graph_passes,
    )
    fold = joint_graph.constant_fold_uniform_value

    def partitioned(*args: Any, **kwargs: Any) -> Any:
        with _pretend(gpu):
            return partition(*args, **kwargs)

    def passes(module: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
        return joint_passes(module, *args, **{**kwargs, "input_device": CUDA})

    def fold_and_move(module: fx.GraphModule) -> None:
        fold(module)  # with real constants
        _move(module)

    with (
        mock.patch.object(compile_fx, "partition_fn", partitioned),
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


def _origins(
    module: fx.GraphModule, lowering: GraphLowering
) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in module.graph.nodes:
        yield node.name, (_operators([node]), _line([node]))
    buffers: dict[str, Any] = dict(lowering.name_to_buffer)
    for name, buffer in buffers.items():
        nodes = sorted(buffer.get_origins(), key=lambda node: node.name)
        yield name, (_operators(nodes), _line(nodes))


def _operators(nodes: Sequence[fx.Node]) -> str:
    names = [str(node.target).removesuffix(".default") for node in nodes]
    return " ".join(dict.fromkeys(names))


def _line(nodes: Sequence[fx.Node]) -> str:
    """The innermost line of the model, as file:line, of the last that has one."""
    own = Path(__file__).with_name("tracing.py")
    for node in reversed(nodes):
        trace = (node.meta.get("stack_trace") or "").splitlines()
        places = [line.strip() for line in trace if line.strip().startswith("File ")]
        for place in reversed(places):
            file, line = place.split(", ")[:2]
            if Path(file[6:-1]) != own:
                return f"{Path(file[6:-1]).name}:{line.split()[1]}"
    return ""
