"""What Dynamo and AOTAutograd say of a graph, and how they call what was made of it."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any, Callable, Optional, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule


__all__ = [
    "boxed",
    "boxed_call",
    "marked",
    "storages_of",
    "tensors_in",
    "traced_name",
]


def boxed_call(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function that takes its last argument, a list, for what AOTAutograd passes it."""
    call: Any = functools.partial(function, *arguments)
    call._boxed_call = True
    return call


def traced_name() -> Optional[str]:
    """The class of the module, or the function, that is compiled, if Dynamo tells.

    A lambda is named by its place.
    """
    codes = getattr(TracingContext.try_get(), "traced_code", ())
    # What was called first, and then what that called, as it ended: of a decorated
    # forward, the last is the one within.
    ordered = (*codes[:1], *reversed(codes[1:]))
    names = [str(getattr(code, "co_qualname", code.co_name)) for code in ordered]
    for name in names:
        if name.endswith(".forward"):
            return name.split(".")[-2]
    if not names:
        return None
    name, first = names[0].rpartition("<locals>.")[2], ordered[0]
    if name.endswith("<lambda>"):
        return f"{os.path.basename(first.co_filename)}:{first.co_firstlineno}"
    return name


def boxed(compiled: Any) -> Any:
    """What a compiler returned, as a function of a list."""
    is_boxed = getattr(compiled, "_boxed_call", False)
    return compiled if is_boxed else make_boxed_func(compiled)


def marked(compile_graph: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """A compiler whose results are called by ``run``."""

    def compile_marked(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        return boxed_call(run, boxed(compile_graph(graph, inputs)))

    return compile_marked


def storages_of(values: Iterable[Any]) -> list[Any]:
    """References to the storages of each tensor, None for what is none."""
    return [
        weakref.ref(each.untyped_storage()) if isinstance(each, torch.Tensor) else None
        for each in values
    ]


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor)]
