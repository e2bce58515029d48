from __future__ import annotations

from ..patch import Edit, GRAPH_COMPILE, module_path, Patch


_OUTPUT_CODE = "torch/_inductor/output_code.py"
_IMPORT = "from .runtime.autotune_cache import AutotuneCacheBundler\n"
_SOURCE = "        self.runnable_graph_str = runnable_graph_str\n"
_IMPORTED = "from .wrapper_memory import wrapper_memory\n"
_CONFIG = "from .. import config\n"
_STAGE = "def aot_stage2_autograd(\n"

PATCH = Patch(
    name="compiled-peak",
    subject="Keep compiled graphs within the peak that was asked for",
    why="""\
Plans for peak memory are chosen by an estimate of what inductor's kernels hold. Fusion
across layers can make it wrong by a factor of two, and nobody is told.

What a compiled graph holds is in the wrapper that inductor generates: every allocation
and every del. CompiledFxGraph.memory has it, read from that code, and goes into the
cache with the graph. Where forward and backward of a plan hold more than was asked for,
the estimates are corrected by what they hold, and the joint graph is split and compiled
by another plan, before anything has run. After four compiles the lowest is kept, with a
warning that has both numbers. The backward is compiled with the forward for that.
""",
    test="test/inductor/test_compiled_peak.py",
    sources=(module_path("compiled_peak"), "torch/_inductor/wrapper_memory.py"),
    needs=("peak-budget", "buffer-reuse"),
    edits=(
        Edit(_OUTPUT_CODE, anchor=_IMPORT, replacement=_IMPORT + _IMPORTED),
        Edit(
            _OUTPUT_CODE,
            anchor=_SOURCE,
            replacement="        self.memory = "
            'wrapper_memory(graph, getattr(self, "source_code", ""))\n' + _SOURCE,
            inside="__init__",
        ),
        Edit(
            GRAPH_COMPILE,
            anchor=_CONFIG,
            replacement=_CONFIG
            + "from .._activation_checkpointing.compiled_peak import within_peak\n",
        ),
        Edit(GRAPH_COMPILE, anchor=_STAGE, replacement="@within_peak\n" + _STAGE),
    ),
    # Before, inductor's estimate leaves out what the forward returned.
    since=(2, 13),
    landed=((GRAPH_COMPILE, "@within_peak\n"),),
    risks="""\
Reading a wrapper of 3,900 lines takes some 40 ms. Plans are only compared where the target
is "peak", or a peak in bytes is set; a plan that is replaced costs one more compile of
the graph. Workspaces of kernels are not in the wrapper.
""",
    kind="new features",
)
