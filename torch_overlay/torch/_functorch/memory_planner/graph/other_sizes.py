"""Matches traces of the same code for inputs of different sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from .liveness import Program


def calls_and_storages(model: Program) -> tuple[list[Any], dict[Any, int]]:
    """The functions that a graph's forward calls, and the storages that these make.

    A storage's key is its place: the calls so far, the operator, and a count.  Both can
    be matched across traces for other sizes.  Nodes cannot, as the sizes decide which
    views and copies there are, and what the backward computes.
    """
    functions: list[Any] = []
    made: dict[Any, int] = {}
    names: list[str] = []
    # How many storages each operator has made since the last call began.
    count: Counter[Any] = Counter()
    for each in model.operators:
        target: Any = each.node.target
        stack = each.node.meta.get("source_fn_stack", ())
        computes = each.is_required and target is not torch.ops.aten.clone.default
        if computes and stack:
            before, names = names, [name for name, _ in stack]
            if names != before:
                functions.append(stack[-1][1])
        for s in each.writes:
            place = len(functions), target
            made[(*place, count[place])] = s
            count[place] += 1
    return functions, made


def times_larger(model: Program, than: Program) -> float:
    """The factor by which a graph's forward makes more bytes than at another size.

    Only storages whose sizes differ count, as some (like sums of weights) have the same
    size for any batch.  1.0 if none differ.
    """
    ours, theirs = calls_and_storages(model)[1], calls_and_storages(than)[1]
    own = other = 0
    for place in ours.keys() & theirs.keys():
        nbytes, its = model.nbytes[ours[place]], than.nbytes[theirs[place]]
        if nbytes != its:
            own, other = own + nbytes, other + its
    return own / other if own and other else 1.0
