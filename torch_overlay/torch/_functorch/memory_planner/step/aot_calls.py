"""Names that Dynamo gives to graphs, and AOTAutograd's calling convention."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Optional, TYPE_CHECKING

from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._guards import TracingContext


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule


def boxed_call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Bind all arguments but the last, which is AOTAutograd's boxed list of inputs."""
    call: Any = functools.partial(function, *arguments)
    call._boxed_call = True
    return call


def name_of_module_or_function() -> Optional[str]:
    """The name of the compiled module's class, or of the function, if Dynamo tells.

    A lambda is named by its file and line.
    """
    codes = getattr(TracingContext.try_get(), "traced_code", ())
    # The outermost code comes first, then inlined code as it ended: of a decorated
    # forward, the wrapped one ends last.
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


def with_boxed_inputs(compiled: Any) -> Any:
    """A compiler's result as a function that takes its inputs in one list."""
    is_boxed = getattr(compiled, "_boxed_call", False)
    return compiled if is_boxed else make_boxed_func(compiled)


def with_results_run_by(
    compile_graph: Callable[..., Any], run: Callable[..., Any]
) -> Any:
    """Wrap a compiler, so that its results are called by ``run(result, args)``."""

    def compile_marked(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        return boxed_call(run, with_boxed_inputs(compile_graph(graph, inputs)))

    return compile_marked
