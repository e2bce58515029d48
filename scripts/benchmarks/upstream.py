"""Upstream's own modules, from the untouched wheel beside the checkout."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
from base64 import urlsafe_b64encode
from pathlib import Path
from types import ModuleType

from patchset.patch import KNAPSACK, PARTITIONERS


def untouched(path: str, name: str) -> ModuleType:
    """The module at ``path`` as its wheel brought it, loaded as ``name``.

    RuntimeError where it is another one. What it imports is the running torch's.
    """
    wheel = importlib.metadata.distribution("torch")
    recorded = {str(f): f.hash for f in wheel.files or ()}.get(path)
    if recorded is None:
        raise RuntimeError(f"the installed torch has no {path} in its RECORD")
    source = Path(str(wheel.locate_file(path)))
    digest = hashlib.sha256(source.read_bytes()).digest()
    if urlsafe_b64encode(digest).rstrip(b"=").decode() != recorded.value:
        raise RuntimeError(f"the installed torch's {path} is not its wheel's")
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def untouched_knapsack() -> ModuleType:
    return untouched(KNAPSACK, "untouched_knapsack")


def untouched_partitioners() -> ModuleType:
    """The wheel's partitioner, with the wheel's default solver."""
    # Its relative imports need the package that it belongs to.
    module = untouched(PARTITIONERS, "torch._functorch.untouched_partitioners")
    # But what they find there is the running torch's.
    vars(module)["dp_knapsack"] = untouched_knapsack().dp_knapsack
    return module
