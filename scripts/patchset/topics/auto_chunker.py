from ..patch import edits, Patch


PATCH = Patch(
    name="auto-chunker",
    subject="Let inductor's chunker take the head of an ordinary language model",
    why="""\
config.auto_chunker runs a head and its loss in chunks of the batch. It never does for a
model at real size: it looks for a product that is eight times as large as what it reads,
and counts the weights, which for 4,096 tokens and 152,000 words are most of it. And it
gives up where logits are looked at as [batch, tokens, words] while they are converted to
float, which most models do.

The factor that all chunks share does not count any more, and pointwise operators on
views of rows are computed on the rows. Rows that logits[:, :-1] leaves out are left out
before the product. Values for each token are vectors of rows, and what does not depend
on the logits is made before the chunks, not by each of its own rows. Of several products, the largest that no other
product reads is divided: that of a low-rank adapter is larger than what it reads, too. What a chunk computes is marked as run in the
forward, as the backward would otherwise repeat whole heads to save a hidden state.
""",
    test="test/inductor/test_auto_chunker_rows.py",
    sources=(
        "torch/_inductor/fx_passes/auto_chunker/flat_rows.py",
        "torch/_inductor/fx_passes/auto_chunker/left_out_rows.py",
        "torch/_inductor/fx_passes/auto_chunker/limits.py",
    ),
    edits=edits("""\
@@ torch/_inductor/fx_passes/auto_chunker/__init__.py
 from .core import find_amplifier_node
+from .flat_rows import compute_on_rows
+from .left_out_rows import leave_out_rows
@@ torch/_inductor/fx_passes/auto_chunker/__init__.py chunk
+    if any(node.meta["val"].dim() for node in get_tangent_nodes(graph)):
+        raise CantChunk("Skip chunking, as a tangent is no scalar")
+
+    amplifier_node = leave_out_rows(amplifier_node)
+    compute_on_rows(graph, amplifier_node.meta["val"].shape[0])
     propagate(amplifier_node)
@@ torch/_inductor/fx_passes/auto_chunker/__init__.py chunk
     num_chunks = config.auto_chunker.num_chunk or decide_num_chunks(gm)
+    rows = amplifier_node.meta["val"].shape[0]
+    if -(-rows // -(-rows // num_chunks)) != num_chunks:
+        raise CantChunk(f"Skip chunking, as {rows} rows are no {num_chunks} chunks")
@@ torch/_inductor/fx_passes/auto_chunker/applier.py
 from torch.fx.passes.fake_tensor_prop import FakeTensorProp
+from torch.utils.checkpoint import CheckpointPolicy
@@ torch/_inductor/fx_passes/auto_chunker/applier.py
+from .limits import accumulator_dtype, is_made_before, is_made_once
 from .utils import get_args_of_node_type, get_fake_tensor_from_node_arg, is_tangent_node
@@ torch/_inductor/fx_passes/auto_chunker/applier.py is_chunking_subgraph_input
-    return len(arg_nodes_no_meta) > 0 or node.op == "placeholder"
+    if len(arg_nodes_no_meta) > 0 or node.op == "placeholder":
+        return True
+    return is_made_before(node) or is_made_once(node)
@@ torch/_inductor/fx_passes/auto_chunker/applier.py replace_tangent_to_one
-            node.replace_all_uses_with(one)
+            # What is computed outside of chunks reads the tangent itself.
+            node.replace_all_uses_with(
+                one, lambda user: get_chunking_meta(user) is not None
+            )
@@ torch/_inductor/fx_passes/auto_chunker/applier.py create_accumulators
-                override_dtype = torch.float32
+                override_dtype = accumulator_dtype(fake_tensor.dtype)
@@ torch/_inductor/fx_passes/auto_chunker/applier.py call_subgraph_for_each_chunk
                 torch.ops.higher_order.invoke_subgraph, (sub_gm, subgraph_id, *args), {}
             )
+            # The backward would run chunks again, to save a little of what they read.
+            output_node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
+            # Propagation passes over the first call of a subgraph.
+            *_, returned = getattr(self.gm, subgraph_id).graph.nodes
+            output_node.meta["val"] = tuple(n.meta["val"] for n in returned.args[0])
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py
+from .flat_rows import amplified
+from .limits import (
+    has_only_later_dims,
+    is_made_before,
+    is_pointwise,
+    is_same_for_all_chunks,
+    mark_made_before,
+    needs_sum,
+    positive_dims,
+)
 from .propagate_scale_by import propagate_scale_by
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py can_reach_amplified_node
-    target_numel = get_fake_tensor_from_node_arg(amplifier_node).numel()  # type: ignore[union-attr]
+    as_large = amplified(amplifier_node)
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py can_reach_amplified_node
-        elif get_fake_tensor_from_node_arg(node).numel() == target_numel or (  # type: ignore[union-attr]
-            not is_fwd and is_tangent_node(node)
-        ):
+        elif node in as_large or (not is_fwd and is_tangent_node(node)):
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py propagate
-    propagate_scale_by(nodes_with_chunking_meta)
+    mark_made_before(nodes_with_chunking_meta, bwd_filter)
+    propagate_scale_by([n for n in nodes_with_chunking_meta if not is_made_before(n)])
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py propagate_single_node
-    if not isinstance(target, torch._ops.OpOverload) or target not in propagate_rules:
+    if target not in propagate_rules and not is_pointwise(node):
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py propagate_single_node
-    status = propagate_rules[target](node)
+    rule = propagate_rules.get(target, propagate_general_copy_metadata)
+    status = rule(node)
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py propagate_general_copy_metadata
     node_args = get_args_of_node_type(out_node)
+    if needs_sum(out_node, *node_args):
+        return PropagateStatus.FAIL
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py propagate_general_copy_metadata_ignore_broadcast
+    if not has_only_later_dims(out_node):
+        return PropagateStatus.FAIL
     return propagate_general_copy_metadata(out_node, ignore_broadcast=True)  # type: ignore[call-arg]
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py propagate_reduce
     arg_node, reduce_dims = reduce_node.args[0:2]
+    reduce_dims = positive_dims(arg_node, reduce_dims)
+    if needs_sum(arg_node):
+        return PropagateStatus.FAIL
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py propagate_general_copy_metadata
-        ChunkingMeta.is_nop(get_chunking_meta(arg)) for arg in scalar_args
+        is_same_for_all_chunks(get_chunking_meta(arg)) for arg in scalar_args
@@ torch/_inductor/fx_passes/auto_chunker/propagator.py
         aten.squeeze.dim,
+        aten.squeeze.dims,
@@ torch/_inductor/fx_passes/auto_chunker/propagate_scale_by.py
         aten.mul.Tensor,
+        aten.mul.Scalar,
+        aten.div.Scalar,
+        aten.squeeze.dims,
         prims.convert_element_type.default,
@@ torch/_inductor/fx_passes/auto_chunker/propagate_scale_by.py propagate_where
+    if false_meta.scale_by and not true_meta.scale_by:
+        true_meta, false_meta, false_node = false_meta, true_meta, true_node
     if true_meta.scale_by and not false_meta.scale_by:
@@ torch/_inductor/fx_passes/joint_graph.py joint_graph_passes
-        except CantChunk:
+        except CantChunk as error:
+            graph.meta["not_chunked"] = str(error)
@@ torch/_inductor/fx_passes/auto_chunker/core.py reorder_nodes
     from .applier import is_chunking_subgraph_input
+    from .limits import mutates
@@ torch/_inductor/fx_passes/auto_chunker/core.py reorder_nodes
-        if all(arg in pre_chunking_nodes for arg in get_args_of_node_type(node)):
+        if not mutates(node) and all(
+            arg in pre_chunking_nodes for arg in get_args_of_node_type(node)
+        ):
@@ torch/_inductor/fx_passes/auto_chunker/core.py find_amplifier_node
-        input_size = compute_tensor_size(node.args, node.kwargs)
+        # Not the other factor, of which every chunk reads all.
+        input_size = compute_tensor_size(node.args[-2])
@@ torch/_inductor/fx_passes/auto_chunker/core.py find_amplifier_node
+            and is_last_product(node)
         ):
-            amplifier_nodes_ratio.append((node, ratio))
+            amplifier_nodes_ratio.append((node, output_size))
@@ torch/_inductor/fx_passes/auto_chunker/core.py find_amplifier_node
+    from .flat_rows import is_last_product
+
     amplifier_nodes_ratio = []
"""),
    since=(2, 11),
    landed=(
        (
            "torch/_inductor/fx_passes/auto_chunker/__init__.py",
            "compute_on_rows(graph, ",
        ),
    ),
    risks="""\
None where config.auto_chunker is off, which is its default.
""",
)
