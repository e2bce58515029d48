"""What Dynamo and AOTAutograd say of a graph, and how they call what was made of it."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Optional

from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext

__all__ = ["boxed", "boxed_call", "traced_name"]


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
