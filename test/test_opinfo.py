"""Budgets change nothing that torch's operators compute, and it is seen if they do.

Each operator of torch's OpInfo databases is called in several ways: by dtype, in place,
through views, through fp8, with sparse tensors. The ways that work without a budget make a
program, whose outputs, loss and gradients under each budget have to be those without one:
bit by bit operator by operator, to rounding under inductor. An operator is skipped where
no way works without a budget; one that ends the process fails, and the others go on.
"""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from benchmarks.plans import warnings_noted
from benchmarks.ways import budgeted, OPERATORS
from opinfo_programs import (
    cases,
    database,
    IN_PLACE,
    number,
    PLAIN,
    Program,
    unseeded,
    VIEWS,
)
from torch._functorch import partitioners
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.memory_planner.compile.recompile import fresh_copy
from torch._functorch.memory_planner.graph import joint


pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore"),
]

# How many operators, in all ways; without it some in a few, always the same.
FUZZ = os.environ.get("FUZZ")
KNOWN = database()
TRIED = sorted(KNOWN, key=number)[: int(FUZZ or 40)]
# How AOTAutograd compiles a joint graph.
COMPILE = graph_compile.aot_stage2_autograd
# What kernels may differ by, relative to 1 and to the largest element.
TOLERANCE = 1e-4
MOST_LETTERS = 100


# ---------------------------------------------------------------- comparing


def plain(value):
    dense = value if value.layout == torch.strided else value.to_dense()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1)


def other_bits(found, wanted):
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return True
    bits = (plain(each).view(torch.uint8) for each in (found, wanted))
    return not torch.equal(*bits)


def in_bits(found, wanted):
    """What differs, if anything does."""
    wrong = [
        name_of(at) for at, pair in enumerate(zip(found, wanted)) if other_bits(*pair)
    ]
    return f"other bits: {', '.join(wrong)}" if wrong else ""


def in_rounding(found, wanted):
    """What differs by more than rounding, if anything does."""
    wrong = []
    for at, pair in enumerate(zip(found, wanted)):
        a, b = (plain(each).to(torch.complex128) for each in pair)
        off = (
            (a - b).abs().nan_to_num().max() / (1 + b.abs().nan_to_num().max())
            if a.numel()
            else 0
        )
        if not torch.equal(a.isnan(), b.isnan()) or off > TOLERANCE:
            wrong.append(f"{name_of(at)} by {off:.1g}")
    return f"off: {', '.join(wrong)}" if wrong else ""


def name_of(at):
    return ("loss", "outputs")[at] if at < 2 else f"gradient {at - 2}"


# ----------------------------------------------------------------- compiled


class Plan(NamedTuple):
    """What is asked for."""

    target: str
    budget: float

    def __str__(self):
        return f"{self.target} {self.budget:g}"


class Kind(NamedTuple):
    """How graphs run, by which plans, in which cases, and what tells of a difference."""

    backend: str
    plans: Sequence[Plan]
    # All if there are none.
    cases: Sequence[str]
    difference: Callable


NO_BUDGET, *LEAST = Plan("saved", 1.0), Plan("saved", 0.0), Plan("peak", 0.0)
QUICK = Kind(OPERATORS, LEAST, (PLAIN, IN_PLACE, "int64"), in_bits)
MORE = [*LEAST, Plan("saved", 0.5), Plan("peak", 0.3)]
EVERY = {
    "operators": Kind(OPERATORS, MORE, (), in_bits),
    # Kernels take long to compile.
    "inductor": Kind("inductor", LEAST[1:], (PLAIN, "int64", "bool"), in_rounding),
}
KINDS = EVERY if FUZZ else {"operators": QUICK}


class Compiled:
    """A program that is traced once, and whose graphs are compiled by several plans.

    ``saved`` has by plan what the forwards save, ``warned`` what was warned of.
    """

    def __init__(self, program, kind, is_whole):
        self.program = program
        self.plans = [NO_BUDGET, *kind.plans]
        self.plan = NO_BUDGET
        self.saved = {plan: [] for plan in self.plans}
        self.warned = {plan: [] for plan in self.plans}
        torch._dynamo.reset()
        self.call = torch.compile(
            program.__call__, backend=kind.backend, dynamic=False, fullgraph=is_whole
        )

    def step(self, plan):
        self.plan = plan
        with (
            mock.patch.object(graph_compile, "aot_stage2_autograd", self._compile),
            budgeted(plan.budget, plan.target),
        ):
            return self.program.step(self.call)

    def _compile(self, state, capture, *compilers):
        by_plan, metadata = {}, state.fw_metadata
        for plan in self.plans:
            try:
                run, metadata = self._compile_by(plan, state, capture, *compilers)
                by_plan[plan] = run
            except Exception as error:
                if plan == NO_BUDGET:
                    raise
                by_plan[plan] = functools.partial(raise_again, error)

        def run_chosen(args):
            return by_plan[self.plan](args)

        return run_chosen, metadata

    def _compile_by(self, plan, state, capture, *compilers):
        decide = partitioners.decide

        def note(*args, **kwargs):
            decision = decide(*args, **kwargs)
            self.saved[plan].append([node.name for node in decision.saved_values])
            return decision

        with (
            warnings_noted() as warned,
            mock.patch.object(partitioners, "decide", note),
            budgeted(plan.budget, plan.target),
        ):
            found = COMPILE(*fresh_copy(state, capture), *compilers)
        self.warned[plan] += warned
        return found


def raise_again(error, args):
    raise error


class Compared:
    """An operator's cases, trained without a budget and under budgets.

    ``wrong`` is what programs compute else under budgets, or raise there alone, or get
    upstream's plan for; ``skipped`` the cases that do not work without a budget, and why;
    ``replanned`` the plans that save something else.
    """

    def __init__(self, name, kind):
        self.name, self.kind = name, kind
        self.wrong, self.skipped, self.replanned = [], [], set()
        self.compared = 0
        is_unwritten = "empty" in name or "resize" in name
        with unseeded(), filled() if is_unwritten else nullcontext():
            found = [*self.working()]
            # In one program, if that works.
            if len(found) < 2 or not self.equal(found):
                for case in found:
                    self.equal([case])

    def working(self):
        """The cases that eager mode can train."""
        for label, make in cases(self.name, KNOWN[self.name]):
            if self.kind.cases and label not in self.kind.cases:
                continue
            try:
                case = make()
                loss, *_ = Program([case]).step()
            except Exception as error:
                self.skip(label, error)
            else:
                yield replace(case, is_odd=not loss.isfinite())

    def equal(self, cases):
        """Whether several cases compute the same under all budgets.

        Of one case, what is wrong is noted, or why it is skipped.
        """
        is_whole = len(cases) > 1
        label = "together" if is_whole else cases[0].name
        try:
            compiled = Compiled(Program(cases), self.kind, is_whole)
            wanted = compiled.step(NO_BUDGET)
            if any(map(other_bits, wanted, compiled.step(NO_BUDGET))):
                raise RuntimeError("two equal steps differ")
            if not compiled.saved[NO_BUDGET]:
                raise RuntimeError("no graph is split in a forward and a backward")
        except Exception as error:
            if not is_whole:
                self.skip(label, error)
            return False
        checks = [self.holds(label, compiled, plan, wanted) for plan in self.kind.plans]
        if not all(checks) and is_whole:
            return False
        self.compared += len(cases)
        return True

    def holds(self, label, compiled, plan, wanted):
        """Whether a plan computes what is wanted."""
        place = f"{self.name} ({label}), {plan}"
        try:
            found = compiled.step(plan)
        except Exception as error:
            self.wrong.append(f"{place}: {shortened(error)}")
            return False
        if compiled.saved[plan] != compiled.saved[NO_BUDGET]:
            self.replanned.add(plan)
        for text in compiled.warned[plan]:
            # What is told of bodies that nobody can look into is no error.
            if "cannot be planned" in text and "CannotPlan" not in text:
                self.wrong.append(f"{place}: {text}")
        wrong = self.kind.difference(found, wanted)
        if wrong:
            self.wrong.append(f"{place}: {wrong}")
        return not wrong

    def skip(self, label, error):
        self.skipped.append(f"{self.name} ({label}): {shortened(error)}")


@contextmanager
def filled():
    """What nobody has written has a value of its own, in buffers of kernels as well."""

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    torch.use_deterministic_algorithms(True, warn_only=True)
    with mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", empty):
        yield
    torch.use_deterministic_algorithms(False)


def shortened(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:MOST_LETTERS]


# -------------------------------------------------------------------- tests


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRIED)
def test_budgets_change_nothing(name, kind, tmp_path, monkeypatch):
    # Where a cut fails, upstream draws it where it is.
    monkeypatch.chdir(tmp_path)
    found = Compared(name, KINDS[kind])
    assert not found.wrong, "\n".join(found.wrong)
    # All of the usual sample can be.
    assert found.compared or FUZZ, "\n".join(found.skipped)
    if not found.compared:
        pytest.skip("; ".join(found.skipped))


PLAIN_ONLY = QUICK._replace(cases=[PLAIN])


def test_budgets_save_something_else():
    found = Compared("cos", QUICK)
    assert found.replanned == {*LEAST}
    assert found.compared == 3 and not found.skipped


def test_what_differs_is_seen(monkeypatch):
    """Without the rule that what is random runs once, it runs twice."""
    monkeypatch.setattr(joint, "recomputable_nodes", lambda graph: None)
    wrong = Compared("randn_like", QUICK._replace(cases=(PLAIN, VIEWS))).wrong
    # What was together is compared one by one.
    for case in ("together", PLAIN):
        place = f"randn_like ({case}), saved 0: other bits: gradient"
        assert any(text.startswith(place) for text in wrong)
    assert not Compared("cos", QUICK).wrong


def test_what_raises_under_a_budget_alone_is_seen():
    kind = PLAIN_ONLY._replace(plans=[Plan("neither", 0.5)])
    (wrong,) = Compared("cos", kind).wrong
    assert wrong.startswith("cos (plain), neither 0.5: RuntimeError: activation_memory")


def test_what_does_not_work_without_a_budget_is_named():
    found = Compared("jiterator_unary", PLAIN_ONLY)
    (reason,) = found.skipped
    assert reason.startswith(
        "jiterator_unary (plain): AssertionError: Jiterator is only"
    )
    assert not found.compared


@pytest.mark.parametrize("by, wrong", [(1e-6, ""), (1e-2, "off: loss by 0.005")])
def test_rounding(by, wrong):
    one = [torch.ones(()), torch.ones(3)]
    assert in_rounding([one[0] + by, one[1]], one) == wrong
    assert in_bits([one[0] + by, one[1]], one) == "other bits: loss"
