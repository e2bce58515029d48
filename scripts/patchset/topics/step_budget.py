from ..patch import edits, GRAPH_COMPILE, module_path, Patch, planner_path


PATCH = Patch(
    name="step-budget",
    subject="One activation memory budget for a training step",
    why="""\
A budget is set for a graph, but training runs out of memory in a step. Most training
stacks compile each block separately, or break the graph: whatever the calls keep adds
up, and a plan for the peak of one block makes the step's peak worse.

StepBudget is a context manager around a training step. The first step runs by lean
plans and is recorded. Then one or two plans are chosen for each graph, so that the
step's peak stays within the bound and little is recomputed, and the graphs are
partitioned and compiled again from their joint graphs.
""",
    test="test/functorch/test_ac_step_budget.py",
    sources=(
        planner_path("graph/workspaces"),
        planner_path("report/step_summary"),
        planner_path("step/__init__"),
        planner_path("step/aot_calls"),
        planner_path("step/partial_backward"),
        planner_path("step/plan_file"),
        planner_path("step/budget"),
        planner_path("step/call"),
        planner_path("step/calls"),
        planner_path("step/graphs"),
        planner_path("step/compiled_graph"),
        planner_path("step/single_graph_warnings"),
        planner_path("step/aot_stages"),
        planner_path("step/step_programs"),
        planner_path("step/plan_request"),
        planner_path("step/plan_step"),
        planner_path("step/recorder"),
        planner_path("step/recording_schedule"),
        planner_path("step/current_step"),
        planner_path("step/timeline"),
        planner_path("step/tensors"),
        planner_path("step/traced_graph"),
        planner_path("step/messages"),
        planner_path("step/peak_check"),
        # Where scripts imported from before there was a package.
        module_path("step_budget"),
        module_path("step_recorder"),
        "test/functorch/test_ac_step_loops.py",
    ),
    needs=("compiled-peak", "frozen-layers"),
    edits=edits("""\
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile until 2.14
-        return aot_stage2_autograd(
+        from ..memory_planner.step.aot_stages import track_training_graphs
+
+        return track_training_graphs(aot_stage2_autograd)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile until 2.14
-        return aot_stage2_inference(
+        from ..memory_planner.step.aot_stages import track_inference_graphs
+
+        return track_inference_graphs(aot_stage2_inference)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile since 2.15
-            return aot_stage2_autograd(
+            from ..memory_planner.step.aot_stages import track_training_graphs
+
+            return track_training_graphs(aot_stage2_autograd)(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile since 2.15
-            return aot_stage2_inference(
+            from ..memory_planner.step.aot_stages import track_inference_graphs
+
+            return track_inference_graphs(aot_stage2_inference)(
@@ torch/_functorch/_aot_autograd/autograd_cache.py try_load
                 compiled_fn = entry.wrap_post_compile(args, aot_config, fx_config)
+                from ..memory_planner.step.single_graph_warnings import with_warnings
+
+                compiled_fn = with_warnings(compiled_fn, entry.runtime_metadata)
"""),
    since=(2, 13),
    landed=((GRAPH_COMPILE, "track_training_graphs(aot_stage2_autograd)"),),
    minimal=Patch(
        name="step-budget",
        lines=60,
        subject="Let a library compile a joint graph again, saving other values",
        why="""\
What a compiled graph should save for its backward depends on what else a training step
holds, and nobody knows that when it is compiled: other graphs, eager code, the optimizer
and other ranks come later. A library that watches a step can know, but then it is too
late. The joint graph is gone, and a global activation_memory_budget, a reset and another
trace of the whole model are all that is left, for one share that all graphs get.

config.joint_graph_hook is called with each joint graph, once it is captured, and returns
what runs in place of the compiled graph. JointGraph.compile partitions and compiles a copy
of it, as often as it is called, then or later; an argument replaces
choose_saved_values_set. So a library can choose the values to save after a step was
measured, with one trace, and a plan of its own for each graph or call.
""",
        repro="""\
import torch
from torch._functorch import config

def hook(joint):
    first = joint.compile()
    again = joint.compile(lambda graph, node_info, **_: node_info.inputs)
    return lambda args: (again if over_limit else first)(args)

config.joint_graph_hook, over_limit = hook, False  # without this change: no such option
net = torch.compile(lambda x, w: (x @ w).sin() @ w, backend="aot_eager_decomp_partition")
x, w = (torch.randn(n, 64, requires_grad=True) for n in (4096, 64))
for over_limit in (False, True):
    saved = {t.data_ptr(): t.nbytes for t in net(x, w).grad_fn.saved_tensors}
    print(sum(saved.values()) - x.nbytes - w.nbytes)  # 2097152, then 0
""",
        beyond="""\
It plans nothing: what to save, and when, is the library's. aot_export_joint_with_descriptors
captures a joint graph and compiles it later, too, but of an nn.Module that is exported
before; the graphs that torch.compile makes of a user's loop never come there. Sizes that
vary are not tested. Graphs for inference and nested
compiled regions do not come to the hook, and only backends that partition by
min_cut_rematerialization_partition take other values. Graphs are not in AOTAutograd's
cache where there is a hook.
""",
        test="test/functorch/test_joint_graph_hook.py",
        edits=edits('''\
@@ torch/_functorch/config.py
     "joint_custom_pass",
+    "joint_graph_hook",
@@ torch/_functorch/config.py
+# Called with the JointGraph of each joint graph that is captured; returns what runs in
+# place of the compiled graph, with a list of arguments. It may compile the joint graph
+# several times, then or later, each time saving other values for the backward.
+joint_graph_hook: Callable[..., Callable[..., object]] | None = None
+
 force_autograd_cache = False
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
     compiler: str = "inductor",
     *,
+    choose_saved_values: Callable[..., list[fx.Node]] | None = None,
@@ torch/_functorch/partitioners.py min_cut_rematerialization_partition
-    saved_values = choose_saved_values_set(
+    saved_values = (choose_saved_values or choose_saved_values_set)(
         joint_graph,
@@ torch/_functorch/_aot_autograd/graph_compile.py
-from torch._guards import CompileContext, TracingContext
+from torch._guards import compile_context, CompileContext, tracing, TracingContext
@@ torch/_functorch/_aot_autograd/graph_compile.py
+class JointGraph:
+    """A captured joint graph, for config.joint_graph_hook."""
+
+    def __init__(self, *arguments: Any) -> None:
+        self._arguments = arguments
+        self.fw_metadata = arguments[0].fw_metadata
+        self._contexts = TracingContext.try_get(), CompileContext.try_get()
+        self._options = config.get_config_copy()
+
+    def compile(
+        self, choose_saved_values: Callable[..., list[torch.fx.Node]] | None = None
+    ) -> Callable[..., Any]:
+        """
+        Partition and compile the graph, by choose_saved_values in place of
+        partitioners.choose_saved_values_set, if given.
+        """
+        state, capture, partition_fn, *compilers = self._arguments
+        if choose_saved_values is not None:
+            partition_fn = functools.partial(
+                partition_fn, choose_saved_values=choose_saved_values
+            )
+        # Compiling changes these.
+        with torch._subclasses.fake_tensor.unset_fake_temporarily():
+            module = copy.deepcopy(capture.graph_module)
+        capture = dataclasses.replace(capture, graph_module=module)
+        metadata = copy.copy(state.fw_metadata)
+        state = dataclasses.replace(state, fw_metadata=metadata)
+        traced, compiled = self._contexts
+        with (
+            tracing(traced),
+            compile_context(compiled),
+            config.patch(self._options),
+            torch.enable_grad(),
+        ):
+            run, self.fw_metadata = aot_stage2_autograd(
+                state, capture, partition_fn, *compilers
+            )
+        return run
+
+
 def aot_stage2_compile(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile until 2.14
+        if config.joint_graph_hook is not None:
+            joint = JointGraph(
+                aot_state, aot_graph_capture, partition_fn, fw_compiler, bw_compiler
+            )
+            return config.joint_graph_hook(joint), joint.fw_metadata
         return aot_stage2_autograd(
@@ torch/_functorch/_aot_autograd/graph_compile.py aot_stage2_compile since 2.15
+            if config.joint_graph_hook is not None:
+                joint = JointGraph(
+                    aot_state, aot_graph_capture, partition_fn, fw_compiler, bw_compiler
+                )
+                return config.joint_graph_hook(joint), joint.fw_metadata
             return aot_stage2_autograd(
@@ torch/_functorch/_aot_autograd/autograd_cache.py check_cacheable
         raise BypassAOTAutogradCache("FX graph cache is not enabled")
+    if config.joint_graph_hook is not None:
+        raise BypassAOTAutogradCache("Won't cache what joint_graph_hook returns")
'''),
        landed=((GRAPH_COMPILE, "class JointGraph:"),),
        risks="""\
Nothing changes where the option is not set. With it, a library can save what must not be
saved, such as an input that the forward overwrites (#197039), or have a random operator
run twice. A JointGraph keeps the graph and its trace for as long as the library keeps it.
""",
    ),
)
