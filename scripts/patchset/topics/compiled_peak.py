from ..patch import edits, GRAPH_COMPILE, Patch, planner_path


PATCH = Patch(
    name="compiled-peak",
    subject="Keep compiled graphs within the peak that was asked for",
    why="""\
Plans for peak memory are chosen by an estimate of what inductor's kernels hold. Fusion
across layers can make it wrong by a factor of two, and nobody is told.

CompiledFxGraph.memory has what a graph holds on config.live_bytes_of, the device that
is asked about, read from its wrapper: every allocation and every del. Where forward
and backward of a plan hold more than was asked for, the estimates are corrected by it
and the joint graph is compiled by another plan, before anything has run. After three
plans the lowest is kept, with a warning.

A backward is then compiled with its forward, before anyone knows whether the graph will
be retained. One that writes over saved values (donated buffers) gets copies of them where
it is, in place of an error.

A wrapper is known before its kernels are compiled. They wait (DeferredKernels) until the
plan is kept, so a plan that is replaced costs the lowering of a graph and no kernel.
""",
    test="test/inductor/test_compiled_peak.py",
    sources=(
        planner_path("compile/__init__"),
        planner_path("compile/compiled_peak"),
        planner_path("compile/recompile"),
        planner_path("compile/search"),
        planner_path("compile/told"),
        "torch/_inductor/deferred_kernels.py",
        "torch/_inductor/wrapper_memory.py",
    ),
    needs=("peak-budget", "buffer-reuse", "input-sizes", "overwritten-arguments"),
    edits=edits("""\
@@ torch/_inductor/config.py
+# The device whose live bytes compiled graphs tell (CompiledFxGraph.memory), None: none.
+live_bytes_of: str | None = None
+
 memory_planning = os.environ.get("TORCHINDUCTOR_MEMORY_PLANNING", "0") == "1"
@@ torch/_inductor/output_code.py
 from . import config
+from .deferred_kernels import loads_kernels
 from .runtime.autotune_cache import AutotuneCacheBundler
+from .wrapper_memory import wrapper_memory
@@ torch/_inductor/output_code.py __init__
+        self.memory = wrapper_memory(graph, getattr(self, "source_code", ""))
         self.runnable_graph_str = runnable_graph_str
@@ torch/_inductor/output_code.py
+    @loads_kernels
     def after_deserialization(self, constants: CompiledFxGraphConstants) -> str:
@@ torch/_inductor/graph.py
+from .deferred_kernels import loads_kernels
 from .exc import (
@@ torch/_inductor/graph.py
+    @loads_kernels
     def _compile_to_module_lines(
@@ torch/_inductor/async_compile.py
+from torch._inductor.deferred_kernels import deferrable
 from torch._inductor.runtime.compile_tasks import (
@@ torch/_inductor/async_compile.py
+@deferrable
 class AsyncCompile:
@@ torch/_inductor/codegen/triton.py _emit_kernel_to_wrapper
-        if async_compile.use_process_pool():
+        if async_compile.use_process_pool() and not deferring():
@@ torch/_inductor/codegen/triton.py
+from ..deferred_kernels import deferring
 from ..ops_handler import DefaultHandler
@@ torch/_functorch/_aot_autograd/runtime_wrappers.py _backward_impl
-                    torch._check(
-                        False,
-                        lambda: (
-                            "This backward function was compiled with non-empty donated "
-                            "buffers which requires create_graph=False and retain_graph=False. "
-                            "Please keep backward(create_graph=False, retain_graph=False) "
-                            "across all backward() function calls, or set "
-                            "torch._functorch.config.donated_buffer=False to disable "
-                            "donated buffer."
-                        ),
-                    )
+                    # It was compiled before anyone could know that the graph is retained.
+                    for idx in fw_metadata.bw_donated_idxs or ():
+                        all_args[idx] = clone_preserve_strides(all_args[idx])
@@ torch/_functorch/_aot_autograd/runtime_wrappers.py
-from torch._prims_common import CUDARngStateHelper
+from torch._prims_common import clone_preserve_strides, CUDARngStateHelper
@@ torch/_functorch/_aot_autograd/graph_compile.py
+from ..memory_planner.compile.compiled_peak import within_peak
 from .aot_autograd_result import GenericAOTAutogradResult, serialize_graph_module
@@ torch/_functorch/_aot_autograd/graph_compile.py
+@within_peak
 def aot_stage2_autograd(
"""),
    # Before, inductor's estimate leaves out what the forward returned.
    since=(2, 13),
    landed=((GRAPH_COMPILE, "@within_peak\n"),),
    minimal=Patch(
        name="compiled-peak",
        lines=120,
        subject="Tell what a compiled graph allocates, and what is live at its peak",
        why="""\
Whoever looks for the peak of a compiled model has the allocator's snapshots of a run, on
a device with enough memory to run it. Inductor's own estimate is made before its code is:
it knows nothing of buffers that are reused later or written over, and is not reported.
But the code says it all: it allocates each buffer, and drops it after its last use.

CompiledFxGraph.memory has the bytes that are live after each allocation, how many
allocations come before each input is dropped, which outputs are the graph's own, and which
buffers, of which operators, are live when most bytes are. It is read from the lines of the
wrapper once these are planned, and is in the structured trace (graph_memory) for
each graph, those from the cache included. What cannot be followed is not told.
""",
        repro="""\
import torch
from torch._inductor import output_code

def told(graph, *args):
    post_compile(graph, *args)
    print(graph.memory and (max(graph.memory.live), graph.memory.at_peak))

post_compile = output_code.CompiledFxGraph.post_compile
output_code.CompiledFxGraph.post_compile = told
x, w = torch.ones(1024, 64), torch.ones(64, 256)
torch.compile(lambda x, w: (x @ w).relu() @ w.t())(x, w)
# AttributeError without this change, and with it
# (1310720, (('buf0', 1048576, 'mm'), ('buf2', 262144, 'mm_1, permute, relu')))
""",
        beyond="""\
Graphs with branches or loops, with memory_planning, and those that are partitioned for
CUDA graphs have None. Scratch memory of operators and of Triton kernels is not counted,
nor what an allocator loses to fragmentation.
""",
        test="test/inductor/test_graph_memory.py",
        edits=edits('''\
@@ torch/_inductor/memory.py
-from typing import TYPE_CHECKING, TypedDict
+from typing import Any, NamedTuple, TYPE_CHECKING, TypedDict
@@ torch/_inductor/memory.py
-from .ir import MultiOutputLayout, NoneLayout
+from .ir import MultiOutput, MultiOutputLayout, MutationLayoutSHOULDREMOVE, NoneLayout
@@ torch/_inductor/memory.py
     from .dependencies import Dep
+    from .graph import GraphLowering
@@ torch/_inductor/memory.py
+class GraphMemory(NamedTuple):
+    """
+    What a compiled graph allocates and drops; on a GPU, if it runs on one. What kernels
+    and operators allocate for themselves is not counted.
+    live: bytes after each allocation, of all that the graph has allocated.
+    dropped: for each input, how many allocations come before it is dropped.
+    results: for each output, the number of its allocation and its bytes; None for
+        what the graph did not allocate.
+    at_peak: what is live when most bytes are: names, bytes and operators.
+    """
+
+    live: tuple[int, ...]
+    dropped: tuple[int, ...]
+    results: tuple[tuple[int, int] | None, ...]
+    at_peak: tuple[tuple[str, int, str], ...]
+
+
+class _WrapperReader:
+    """Storages are numbers of allocations, from 1 on, or of inputs, from -1 down."""
+
+    def __init__(self, graph: GraphLowering) -> None:
+        self.graph = graph
+        self.devices = [d for d in graph.device_types if d != "cpu"] or ["cpu"]
+        self.live: list[int] = []
+        self.allocated: dict[int, tuple[str, int, str]] = {}
+        self.at_peak: tuple[tuple[str, int, str], ...] = ()
+        self.dropped: dict[int, int] = {}
+        self.references: collections.Counter[int] = collections.Counter()
+        self.storages: dict[str, list[int]] = {name: [] for name in graph.constants}
+        for index, name in enumerate(graph.graph_inputs, 1):
+            self.assign(name, [-index])
+
+    def follow(self, line: Any) -> None:
+        from .codegen import wrapper
+        if isinstance(line, (wrapper.AllocateLine, wrapper.ExternKernelAllocLine)):
+            self.assign(line.node.get_name(), self.made(line.node))
+        elif isinstance(line, wrapper.MultiOutputLine):
+            self.assign(line.result_name, self.storages[line.result_name])
+        elif isinstance(line, (wrapper.ReinterpretLine, wrapper.ReuseLine)):
+            name = line.node.get_name()
+            self.assign(line.reused_as.get_name(), self.storages[name])
+            if getattr(line, "delete_old", False):
+                self.drop(name)
+        elif isinstance(line, (wrapper.FreeLine, wrapper.FreeIfNotReusedLine)):
+            if not getattr(line, "is_reused", False):
+                self.drop(line.node.get_name())
+        elif isinstance(line, wrapper.EnterSubgraphLine):
+            raise NotImplementedError("which branch is taken, or how often")
+
+    def assign(self, name: str, storages: list[int]) -> None:
+        self.storages[name] = storages
+        self.references.update(storages)
+
+    def drop(self, name: str) -> None:
+        storages = self.storages.pop(name)
+        self.references.subtract(storages)
+        for number in storages:
+            if not self.references[number]:
+                self.dropped[number] = len(self.live)
+                self.allocated.pop(number, None)
+
+    def made(self, buffer: Any) -> list[int]:
+        """The storages of what is allocated, or returned by an operator."""
+        name, layout = buffer.get_name(), buffer.get_output_spec()
+        if aliases := buffer.get_inputs_that_alias_output():
+            return self.storages[aliases[0]]
+        if isinstance(layout, MultiOutputLayout):
+            parts = (b for b in self.graph.buffers if isinstance(b, MultiOutput))
+            names = [b.get_name() for b in parts if b.input_name(0) == name]
+            for part in names:
+                self.storages[part] = self.made(self.graph.name_to_buffer[part])
+            return [number for part in names for number in self.storages[part]]
+        is_none = isinstance(layout, (NoneLayout, MutationLayoutSHOULDREMOVE))
+        if is_none or buffer.get_device_or_error().type not in self.devices:
+            return []
+        size = self.graph.get_allocation_storage_size(buffer)
+        length = self.graph.sizevars.optimization_hint(size, fallback=0)
+        nbytes = int(length) * get_dtype_size(buffer.get_dtype())
+        operators = sorted(node.name for node in getattr(buffer, "origins", ()))
+        self.allocated[len(self.live) + 1] = (name, nbytes, ", ".join(operators))
+        total = sum(nbytes for _, nbytes, _ in self.allocated.values())
+        if total > max(self.live, default=-1):
+            self.at_peak = tuple(self.allocated.values())
+        self.live.append(total)
+        return [len(self.live)]
+
+
+def graph_memory(graph: GraphLowering) -> GraphMemory | None:
+    """Read it from the graph's wrapper; where that fails no compile does."""
+    try:
+        reader = _WrapperReader(graph)
+        for line in graph.wrapper_code.lines:
+            reader.follow(line)
+        results: list[tuple[int, int] | None] = []
+        for output in graph.graph_outputs:
+            name = output.maybe_get_name()
+            number = max(reader.storages[name] if name else (), default=0)
+            made = reader.allocated.get(number)
+            results.append((number, made[1]) if made else None)
+    except Exception:
+        torch_log.debug("what a graph allocates is not known", exc_info=True)
+        return None
+    end, inputs = len(reader.live), range(1, len(graph.graph_inputs) + 1)
+    dropped = tuple(reader.dropped.get(-index, end) for index in inputs)
+    return GraphMemory(tuple(reader.live), dropped, tuple(results), reader.at_peak)
+
+
 def topological_sort_lpmf(
@@ torch/_inductor/output_code.py
 from . import config
+from .memory import graph_memory
 from .runtime.autotune_cache import AutotuneCacheBundler
@@ torch/_inductor/output_code.py __init__
+        self.memory = graph_memory(graph)
         self.runnable_graph_str = runnable_graph_str
@@ torch/_inductor/output_code.py
 import dataclasses
+import json
 import logging
@@ torch/_inductor/output_code.py until 2.13
+from torch._logging import trace_structured
 from torch._opaque_base import OpaqueBase
@@ torch/_inductor/output_code.py since 2.14
     set_tracing_context_output_strides,
 )
+from torch._logging import trace_structured
 from torch.fx._graph_pickler import _node_metadata_key_filter_safe, _ops_filter_safe
@@ torch/_inductor/output_code.py post_compile
+        if self.memory:
+            trace_structured(
+                "artifact",
+                metadata_fn=lambda: {"name": "graph_memory", "encoding": "json"},
+                payload_fn=lambda: json.dumps(self.memory._asdict()),
+            )
         set_tracing_context_output_strides(example_inputs, self)
'''),
        landed=(("torch/_inductor/output_code.py", "self.memory = graph_memory("),),
        risks="""\
It runs for every graph, and adds up what is live at each line of the wrapper. An error in
it is caught, so that no compile fails by it. A line of a kind that it does not know is
passed over, and what it allocates is missing from what is told. Several GPUs are summed.
""",
    ),
)
