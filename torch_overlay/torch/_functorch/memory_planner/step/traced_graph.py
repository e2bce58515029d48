"""A joint graph traced in a step: what its calls may miss, and plans for them."""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager, nullcontext
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch import nn
from torch._functorch import config
from torch._functorch._aot_autograd.schemas import PlainTensorMeta
from torch._functorch._aot_autograd.utils import _is_tangent
from torch._guards import compile_context, CompileContext, tracing, TracingContext
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.traceback import _get_memory_budget_annotation
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..graph.other_sizes import calls_and_storages
from ..peak.plan_search import menu_with_chunks, plan_graph
from ..saved.saved_bytes import plan_within


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ..graph.inputs_outputs import Missing

    from ..graph.joint import BudgetedGraph
    from ..peak.footprint import Footprint
    from ..peak.menu import Menu


# How close to the lowest peak a step's first plans come.
_CLOSE = 1.06
# Calls of a model's part that are assumed to be alive at once, until a step is seen.
_CALLS = 4
# The code of the functions that call a module, to find modules on the stack.
_CALLING = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__


def context_of_tracing() -> Callable[[], AbstractContextManager[None]]:
    """A context that restores the settings of this trace, to compile again in it."""
    traced, compiled = TracingContext.try_get(), CompileContext.try_get()
    fake_mode: Any = getattr(traced, "fake_mode", None)
    options = config.get_config_copy()

    @contextmanager
    def as_traced() -> Iterator[None]:
        from torch._dynamo.convert_frame import compile_lock
        from torch._inductor.virtualized import V

        with (
            # As Dynamo does: one thread compiles at a time, and a caller's modes would
            # see what is compiled.
            compile_lock,
            _disable_current_modes(),
            tracing(traced),
            compile_context(compiled),
            V.set_fake_mode(fake_mode),
            # As in AOTAutograd's first compile: passes that add calls rely on it.
            fake_mode or nullcontext(),
            config.patch(options),
            torch.enable_grad(),
        ):
            yield

    return as_traced


class TracedGraph:
    """A joint graph that was traced in a step.

    Args:
        joint: the graph.
        state: AOTAutograd's, with what is known of its inputs.
        symbols: those whose values a call's inputs tell.
    """

    def __init__(
        self, joint: BudgetedGraph, state: Any, symbols: Container[Any]
    ) -> None:
        self.joint, self._state, self._symbols = joint, state, symbols
        self._alike = _count_modules_alike()

    @functools.cached_property
    def may_miss(self) -> bool:
        """Whether calls may get no tangent for some output.

        Not if a tangent is a tensor subclass, or has a size that depends on data.
        """
        metas = self._state.fw_metadata.subclass_tangent_meta
        tangents = filter(_is_tangent, self.joint.joint.find_nodes(op="placeholder"))
        sizes = set().union(*(free_symbols(node.meta["val"]) for node in tangents))
        is_plain = all(isinstance(meta, PlainTensorMeta) for meta in metas)
        return is_plain and all(size in self._symbols for size in sizes)

    @functools.cached_property
    def _has_own_budget(self) -> bool:
        """Whether the user gave a region of the model its own budget, which is kept."""
        joint = self.joint
        return joint.budget != joint.ask.budget or any(
            _get_memory_budget_annotation(node) is not None
            for node in joint.joint.nodes
        )

    @functools.cached_property
    def structural_key(self) -> Any:
        """What graphs of other sizes share with this one; None if none may match."""
        if self._has_own_budget:
            return None
        model, static = self.joint.model, self._state.fw_metadata.static_input_indices
        shapes = [tuple(self._state.flat_args[i].shape) for i in static]
        ends = len(model.outputs), len(model.tangents), len(model.gradients)
        computed = tree_leaves([each.node.meta.get("val") for each in model.operators])
        # Autocast makes another graph of the same code.
        precisions = {
            value.dtype
            for value in computed
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
        }
        calls, _ = calls_and_storages(model)
        return calls, self.joint.num_fwd_outputs, ends, shapes, precisions

    def plans_for(self, missing: Optional[Missing]) -> tuple[Menu, int]:
        """Plans for calls whose backward misses this, and the index of the lean one.

        The lean plan has the lowest estimated peak with all of the graph's calls.
        """
        joint, is_only = self.joint, self._has_own_budget

        def menu_for(each: BudgetedGraph) -> Menu:
            fixed = plan_within(each, each.budget).saved_values if is_only else None
            return plan_graph(each, missing, fixed, each is joint)

        found = menu_for(joint) if is_only else menu_with_chunks(joint, menu_for)
        return found, self._plan_for_unknown_step(found.plans)

    def _plan_for_unknown_step(self, plans: Sequence[Footprint]) -> int:
        """The index of the plan for calls in a step of which nothing is known yet.

        Its estimated peak is close to the lowest if the step has one micro-batch.  Of
        such plans, it is best for later ones, which add to the gradients of the first.
        """
        joint, gradients = self.joint, self._gradient_bytes()
        calls = joint.ask.graph_calls or self._expected_calls()
        others = calls - 1
        returned = joint.model.nbytes_of(joint.model.outputs)

        def all_wait(plan: Footprint) -> float:
            """The peak if all calls wait for their backward, but for gradients."""
            return others * (plan.kept + returned) + max(plan.forward, plan.backward)

        def of_one(plan: Footprint) -> float:
            # All other calls have gradients when the last backward runs.
            return max(all_wait(plan), others * gradients + plan.backward)

        most = _CLOSE * min(map(of_one, plans))
        close = (i for i, plan in enumerate(plans) if of_one(plan) <= most)
        return min(close, key=lambda i: (all_wait(plans[i]), plans[i].cost))

    def _gradient_bytes(self) -> int:
        """The bytes of the parameters' gradients."""
        inputs, values = self._state.fw_metadata, self._state.flat_args
        trained = (
            values[i].untyped_storage()
            for i in inputs.static_input_indices
            if inputs.input_info[i].requires_grad
        )
        return sum(each.nbytes() for each in trained)

    def _expected_calls(self) -> int:
        """The calls that are alive at once, as far as the graph tells."""
        inputs = self._state.fw_metadata
        static = {*inputs.static_input_indices}
        infos = enumerate(inputs.input_info)
        # A model that is compiled as a whole wants no gradient but its parameters'.
        is_part = any(each.requires_grad for i, each in infos if i not in static)
        return max(_CALLS, self._alike) if is_part or self._alike > 1 else 1


def _count_modules_alike() -> int:
    """How many parts of the running model are like the one called now: its blocks, say.

    The part and the model are the innermost and outermost module on the call stack.
    Returns 0 if there is none.  O(stack + modules).
    """
    called: list[nn.Module] = []
    frame: Any = sys._getframe()
    while frame is not None:
        # Dynamo's code may have constants that cannot be hashed.
        if any(frame.f_code is code for code in _CALLING):
            called.append(frame.f_locals["self"])
        frame = frame.f_back
    if not called:
        return 0
    part, model = getattr(called[0], "_orig_mod", called[0]), called[-1]
    return [*map(_key_of_module, model.modules())].count(_key_of_module(part))


def _key_of_module(module: nn.Module) -> Any:
    """A key that is equal for modules that a compiled graph cannot tell apart."""
    return type(module), [each.shape for each in module.parameters()]
