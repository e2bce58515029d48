"""Finds a net by its name: the project's, one of those held out, or a user's own."""

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

from benchmarks import held_out, nets
from benchmarks.libraries import denoising, nearest, Trained, with_inputs
from benchmarks.nets import Built, LossOf, Net, told
from benchmarks.options import SETS


PROJECT, HELD_OUT = SETS
# Eight kinds of nets, and twelve others, as `Net.held_out` says. What is asked of a part
# of them, or of the small ones that `nets` and `held_out` have as well, says so.
AT_SIZE: dict[str, tuple[Net, ...]] = {
    PROJECT: nets.AT_SIZE,
    HELD_OUT: held_out.AT_SIZE,
}
LIBRARIES = {"transformers": with_inputs, "diffusers": denoising}


def names(of: Iterable[Net]) -> tuple[str, ...]:
    return tuple(net.name for net in of)


def set_of(name: str) -> str:
    return HELD_OUT if find(name).held_out else PROJECT


def find(spec: str, *sizes: int, **settings: Any) -> Net:
    """The net of that name, or that of a user's function, named ``module:function``.

    The function returns a model and its inputs, in a tuple or by name in a dict. It takes
    no arguments, or ``sizes``: that of the batch, and the length of its sequences.
    ``transformers:CLASS`` and ``diffusers:CLASS`` are models of those libraries, their
    configurations' defaults overridden by ``settings``. ValueError says what is wrong
    with a spec.
    """
    known = {**nets.NETS, **held_out.NETS}
    if spec in known:
        if sizes:
            raise ValueError(f"{spec} has a batch of its own")
        return known[spec]
    place, colon, name = spec.partition(":")
    if not colon or not place or not name:
        raise ValueError(
            f"no model named {spec!r}{nearest(spec, known)}: name your own as "
            "module:function, or a library's as transformers:CLASS or diffusers:CLASS"
        )
    if place in LIBRARIES:
        function: Any = functools.partial(LIBRARIES[place], name, **settings)
    elif settings:
        raise ValueError(f"{spec} has no configuration: only models of a library have")
    else:
        function = imported(place, name)
    try:
        inspect.signature(function).bind(*sizes)
    except TypeError as error:
        raise ValueError(f"{spec} cannot take {asked(sizes)}: {error}") from error
    return Net(spec, functools.partial(built, spec, function, sizes))


def asked(sizes: tuple[int, ...]) -> str:
    given = (f"a {name}" for name, _ in zip(("batch", "length"), sizes))
    return " and ".join(given) or "nothing; pass --batch"


def imported(place: str, name: str) -> Any:
    """A user's function; the working folder is searched for its module first."""
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(place)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == place:
            raise ValueError(
                f"there is no module {place} in {os.getcwd()} or where Python looks"
            ) from error
        raise ValueError(f"{place} does not import: {where(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    found = getattr(module, name, None)
    if found is None:
        raise ValueError(f"{place} has no {name}{nearest(name, dir(module))}")
    if not callable(found):
        raise ValueError(f"{place}:{name} is no function, but a {type(found).__name__}")
    return found


def where(error: BaseException) -> str:
    """An error, and the last line of the user's that led to it; ours say it all."""
    torchs, ours = Path(torch.__file__).parent, Path(__file__).parents[1]
    frames = [
        (Path(frame.filename), frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, ValueError) and frames[-1][0].is_relative_to(ours):
        return text
    lines = [
        f" ({file}:{line})"
        for file, line in frames
        if file.suffix == ".py"
        and not (file.is_relative_to(torchs) or file.is_relative_to(ours))
    ]
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind) + "".join(lines[-1:])


def built(spec: str, function: Callable[..., Any], sizes: tuple[int, ...]) -> Built:
    """The model as one that returns its loss, and its inputs that are tensors."""
    made = function(*sizes)
    find = None
    if isinstance(made, Trained):
        find = made.find
        made = made[:2]
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise ValueError(
            f"{spec} returned {told(made)}, not (model, inputs), with the inputs in a "
            "tuple or a dict"
        )
    module, inputs = made
    if not isinstance(module, nn.Module):
        raise ValueError(f"{spec} returned {told(module)} where its model is needed")
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    named = isinstance(inputs, Mapping)
    if not named and not isinstance(inputs, (tuple, list)):
        raise ValueError(
            f"{spec} returned {told(inputs)} where its inputs are needed: tensors in a "
            "tuple, or by name in a dict"
        )
    for name, value in inputs.items() if named else enumerate(inputs):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"input {name!r} of {spec} is {told(value)}, not a tensor: have the model "
                "hold what is none"
            )
    values = tuple(inputs.values() if named else inputs)
    return LossOf(module.train(), tuple(inputs) if named else (), find), values
