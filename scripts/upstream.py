"""Upstream's own knapsack module, from the untouched wheel beside the checkout."""

import hashlib
import importlib.metadata
import importlib.util
from base64 import urlsafe_b64encode
from pathlib import Path
from types import ModuleType


KNAPSACK = "torch/_functorch/_activation_checkpointing/knapsack.py"


def untouched_knapsack() -> ModuleType:
    """The module as its wheel brought it; RuntimeError where it is another one."""
    wheel = importlib.metadata.distribution("torch")
    recorded = {str(f): f.hash for f in wheel.files or ()}.get(KNAPSACK)
    if recorded is None:
        raise RuntimeError("the installed torch has no knapsack.py in its RECORD")
    source = Path(str(wheel.locate_file(KNAPSACK)))
    digest = hashlib.sha256(source.read_bytes()).digest()
    if urlsafe_b64encode(digest).rstrip(b"=").decode() != recorded.value:
        raise RuntimeError("the installed torch's knapsack.py is not its wheel's")
    spec = importlib.util.spec_from_file_location("untouched_knapsack", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
