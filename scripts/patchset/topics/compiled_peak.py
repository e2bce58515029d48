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
    needs=("peak-budget", "buffer-reuse"),
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
    risks="""\
Only where a peak is asked for: reading a wrapper of 3,900 lines takes some 40 ms, and a
plan that is replaced costs one more lowering of the graph. Kernels of such graphs start
to compile when both are lowered, and cached graphs do not bundle their Triton kernels.
""",
)
