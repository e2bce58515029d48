"""Compiles kernels once it is known that their graph is kept, not when it is made.

The module that inductor generates for a graph asks :class:`.async_compile.AsyncCompile`
for each kernel, and waits for all of them at its end.  The memory that the graph needs
is known before that, from the module's text.  So whoever may yet discard the graph
collects the kernels that its module asks for, and has them compiled later::

    kernels = DeferredKernels()
    with kernels.collected():
        compiled = compile_fx_inner(graph, inputs)
    if compiled.memory.peak() <= allowed:
        kernels.compile()
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Optional, TYPE_CHECKING

from torch._inductor import config


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# The methods of AsyncCompile whose kernels can wait; others compile at once.
_METHODS = ("triton", "cpp", "cpp_pybinding", "cutlass", "rocm")


class DeferredKernels:
    """The kernels of some graphs, which are not compiled yet."""

    def __init__(self) -> None:
        # By graph, its module's namespace, and the call that waits for the kernels.
        self.scopes: list[tuple[dict[str, Any], Callable[[], None]]] = []
        self._options: dict[str, Any] = {}
        self.is_loading = False

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Leave the kernels of the graphs that are compiled here for later."""
        token = _deferring.set(self)
        try:
            yield
        finally:
            _deferring.reset(token)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A graph's module is loaded within: the kernels that it asks for can wait.

        Those asked for earlier cannot: they are candidates to be timed and compared.
        """
        self.is_loading, self._options = True, config.get_config_copy()
        try:
            yield
        finally:
            self.is_loading = False

    def compile(self) -> None:
        """Compile all kernels, by inductor's own pool, and wait for them."""
        scopes, self.scopes = self.scopes, []
        if not scopes:
            return
        # The options of `torch.compile` hold only while it compiles.
        with config.patch(self._options):
            for scope, _ in scopes:
                for name, value in scope.items():
                    if isinstance(value, _Kernel):
                        scope[name] = value.started
            for _, wait in scopes:
                wait()


_deferring: ContextVar[Optional[DeferredKernels]] = ContextVar(
    "_deferring", default=None
)


def deferring() -> bool:
    """Whether the kernels of a graph that is compiled now may never be needed."""
    return _deferring.get() is not None


class _Kernel:
    """A kernel that is not compiled before something needs it."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start

    @functools.cached_property
    def started(self) -> Any:
        """The kernel, or a future of it."""
        return self._start()

    @functools.cached_property
    def compiled(self) -> Any:
        wait = getattr(self.started, "result", None)
        return self.started if wait is None else wait()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Copying or inspecting a kernel asks for these, and should not compile it.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.compiled, name)


def deferrable(compiles: Any) -> Any:
    """Have ``AsyncCompile`` leave kernels for later where a graph is being loaded."""

    def deferred(name: str) -> Callable[..., Any]:
        method = getattr(compiles, name)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = functools.partial(method, self, *args, **kwargs)
            kernels = _deferring.get()
            if kernels is None or not kernels.is_loading:
                return start()
            if name != "wait":
                return _Kernel(start)
            kernels.scopes.append((*args, start))
            return None

        return call

    for name in (*_METHODS, "wait"):
        setattr(compiles, name, deferred(name))
    return compiles


def loads_kernels(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that loads the module of a graph, once its code is generated."""

    @functools.wraps(load)
    def load_module(*args: Any, **kwargs: Any) -> Any:
        deferred = _deferring.get()
        if deferred is None:
            return load(*args, **kwargs)
        with deferred.loading():
            return load(*args, **kwargs)

    return load_module
