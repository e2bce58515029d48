"""Finds a net by its name: the project's, one of those held out, or a user's own."""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks import held_out, nets
from benchmarks.nets import Built, LossOf, Net, with_inputs
from benchmarks.options import SETS


PROJECT, HELD_OUT = SETS
# Eight kinds of nets, and twelve others, as `Net.held_out` says: each at real size, and
# small. What is asked of a part of them says so.
AT_SIZE: dict[str, tuple[Net, ...]] = {
    PROJECT: nets.AT_SIZE,
    HELD_OUT: held_out.AT_SIZE,
}
SMALL: dict[str, tuple[Net, ...]] = {PROJECT: nets.SMALL, HELD_OUT: held_out.SMALL}


def names(of: Iterable[Net]) -> tuple[str, ...]:
    return tuple(net.name for net in of)


def set_of(name: str) -> str:
    return HELD_OUT if find(name).held_out else PROJECT


def find(spec: str, *sizes: int, **settings: Any) -> Net:
    """The net of that name, or that of a user's function, named ``module:function``.

    The function returns a model and its inputs, in a tuple or by name in a dict. It takes
    no arguments, or ``sizes``: that of the batch, and the length of its sequences. The
    working folder is searched for the module first. ``transformers:CLASS`` is a model of
    that library, its configuration's defaults overridden by ``settings``. ValueError says
    what is wrong with a spec.
    """
    known = {
        **nets.NETS,
        **{net.name: net for net in (*held_out.AT_SIZE, *held_out.SMALL)},
    }
    if spec in known:
        if sizes:
            raise ValueError(f"{spec} has a batch of its own")
        return known[spec]
    place, colon, name = spec.partition(":")
    if not colon:
        raise ValueError(
            f"no model named {spec!r}; there are {', '.join(known)}, and your own as "
            "module:function"
        )
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(place), name)
        if place == "transformers":
            function = functools.partial(with_inputs, name, **settings)
        inspect.signature(function).bind(*sizes)
    except Exception as error:
        raise ValueError(f"{spec}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())

    def build() -> Built:
        made = function(*sizes)
        try:
            module, inputs = made
            names = tuple(inputs) if isinstance(inputs, Mapping) else ()
            values = tuple(inputs.values() if names else inputs)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{spec} returned {type(made).__name__}, not (model, inputs), with the "
                "inputs in a tuple or a dict"
            ) from error
        return LossOf(module.train(), names), values

    return Net(spec, build)
