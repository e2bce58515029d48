from ..patch import edits, Patch


PATCH = Patch(
    name="overwritten-arguments",
    lines=60,
    subject="Compare inductor's kernel orders with results written over arguments",
    why="""\
Inductor estimates the peak of several orders of a graph's kernels and takes the lowest.
None of them is generated yet, so the estimate counts a result beside the argument that it
will be written over. That may be the larger half of a peak: of four orders a worse one is
picked: by the schedule of a ResNet-50 for an H100, an estimate, 1,171 MB instead of 874.

Orders are now compared as code generation will make them: a result takes the memory of an
argument that its kernel is the last to read. These are not all the conditions of
decide_inplace_update, which knows more of kernels when it is asked: streams, mempools,
aliases and layouts other than fixed ones are not looked at here.
""",
    trailers=("See also: #192578",),
    repro="""\
import torch
from torch._inductor import memory

def result(order, peak, method):
    print(method, peak)
    return inner(order, peak, method)

inner, memory.PeakMemoryResult = memory.PeakMemoryResult, result
given = [torch.ones(shape) for shape in ((4096, 64), (64, 256), (256, 64))]
with torch.no_grad():
    torch.compile(lambda x, wide, back: torch.relu(x @ wide) @ back)(*given)
# all orders: 8388608 without this change, 5242880 with it, as what is generated
""",
    beyond="""\
Once kernels are generated the estimate counts what they do, not what is expected; that
is a change of its own.
""",
    test="test/inductor/test_overwritten_arguments.py",
    edits=edits('''\
@@ torch/_inductor/memory.py
-    from .scheduler import BaseSchedulerNode, SchedulerBuffer
+    from .scheduler import BaseSchedulerNode, SchedulerBuffer, SchedulerNode
@@ torch/_inductor/memory.py
+def _overwrites(node: SchedulerNode, name: str, result: SchedulerBuffer) -> bool:
+    """
+    Whether a kernel that is the last to read an argument will write a result of its
+    ``node`` over it. The conditions are those of SchedulerNode.decide_inplace_update.
+    """
+    from .codegen.wrapper import can_match_buffer_size
+
+    scheduler = node.scheduler
+    donated = scheduler.name_to_donated_buffer
+    argument = donated.get(name) or scheduler.name_to_buf.get(name)
+    if argument is None or not V.graph.wrapper_code.can_reuse(argument, node):
+        return False
+    kernel = scheduler.get_fused_node(node)
+    readers = [
+        user
+        for user in argument.users
+        if user.get_name() not in node.ancestors
+        and scheduler.name_to_fused_node.get(user.get_name()) is kernel
+    ]
+    return (
+        [user.node for user in readers] == [node]
+        and readers[0].can_inplace
+        and can_match_buffer_size(argument.node, result.node)
+    )
+
+
+def _count_what_is_overwritten(buf_info_list: list[BufferInfo]) -> None:
+    """
+    Before kernels are generated: a result takes the memory of an argument that its
+    kernel is the last to read, where it will be written over that.
+    """
+    from .scheduler import SchedulerNode
+
+    wrapper = V.graph.wrapper_code
+    if not config.inplace_buffers or wrapper is None or wrapper.allocated:
+        return
+    info_of = {info.buffer.get_name(): info for info in buf_info_list}
+    for info in buf_info_list:
+        node = getattr(info.buffer, "defining_op", None)
+        if not isinstance(node, SchedulerNode) or not info.size_alloc:
+            continue
+        for name in OrderedSet(dep.name for dep in node.read_writes.reads):
+            argument = info_of.get(name)
+            if (
+                argument is not None
+                and argument.end_step == info.start_step
+                and argument.size_free
+                and _overwrites(node, name, info.buffer)
+            ):
+                info.size_alloc, info.size_free = 0, argument.size_free
+                argument.size_free = 0
+                break
+
+
 def estimate_peak_memory(
@@ torch/_inductor/memory.py estimate_peak_memory until 2.12
+    _count_what_is_overwritten(buf_info_list)
     memory = [0 for _ in range(len(nodes) + 1)]
@@ torch/_inductor/memory.py estimate_peak_memory since 2.13
+    _count_what_is_overwritten(buf_info_list)
     return peak_memory_from_buf_info_list(buf_info_list, len(nodes))
'''),
    landed=(("torch/_inductor/memory.py", "_count_what_is_overwritten("),),
    risks="""\
Kernels may run in another order; they and their arguments stay the same. The conditions
repeat those of SchedulerNode.decide_inplace_update: where these drift apart, an estimate
is off.
""",
)
