"""Trains every operator of torch's OpInfo databases under budgets.

    scripts/benchmark.sh opinfo                         all (hours)
    scripts/benchmark.sh opinfo --check                 a few of them, as CI does
    scripts/benchmark.sh opinfo --ops sort nn_functional_dropout --kind operators
    scripts/benchmark.sh opinfo --kind inductor --part 3

Each operator is called in several ways: by dtype, in place, through views, through fp8,
with sparse tensors. The ways that work without a budget make a program, whose outputs,
loss and gradients under each budget have to be those without one: bit by bit operator by
operator, to rounding under inductor. What does not work without a budget is left out, and
listed with the reason. The exit status is 1 if a budget changes a result or raises.
"""

import functools
import gc
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import partitioners
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import config as inductor_config

from benchmarks import fresh, opinfo_programs, pages
from benchmarks.opinfo_programs import Case, number, Program, Step
from benchmarks.pages import good, Mark, Row
from benchmarks.plans import warnings_noted
from benchmarks.tracing import overlay
from benchmarks.ways import budgeted, OPERATORS


class Plan(NamedTuple):
    """What is asked for."""

    target: str
    budget: float

    def __str__(self) -> str:
        return f"{self.target} {self.budget:g}"


NETS = ()
NO_BUDGET = Plan("saved", 1.0)
# Processes that share out the operators, by their names.
PARTS = 16
BACKENDS = {"operators": OPERATORS, "inductor": "inductor"}
# How AOTAutograd compiles a joint graph.
COMPILE = graph_compile.aot_stage2_autograd
PLANS = {
    "operators": [
        Plan(target, b)
        for target, more in (("saved", 0.5), ("peak", 0.3))
        for b in (0.0, more)
    ],
    "inductor": [Plan("peak", 0.0)],
}
CHECKED = 8
# The cases to try, all if there are none: kernels take long to compile.
ONLY: dict[str, tuple[str, ...]] = {
    "operators": (),
    "inductor": (opinfo_programs.PLAIN, "int64", "bool"),
}
# What kernels may differ by, relative to 1 and to the largest element.
TOLERANCE = 1e-4
# The program of all cases of an operator that work.
TOGETHER = "together"
# What is told of bodies that nobody can look into is no error.
NOT_PLANNED = "CannotPlan"
# How a row's error begins if its process was ended.
KILLED = ("ended with status -", "took more than")
MOST_LETTERS = 100


class Stopped(NamedTuple):
    """Where a process ended: in which program, and under which budget, if any."""

    operator: str
    case: str
    plan: str
    error: str


# -------------------------------------------------------------------- tasks


def tasks(asked: Any, rows: Sequence[Row]) -> Iterator[fresh.Task]:
    names = [*opinfo_programs.database()]
    if asked.ops:
        unknown = {*asked.ops} - {*names}
        if unknown:
            raise SystemExit(f"there is no operator {', '.join(sorted(unknown))}")
        names = asked.ops
    if asked.sample or asked.check:
        names = sample(names, asked.sample or CHECKED)
    is_part = asked.ops or asked.sample or asked.check
    parts: dict[int, list[str]] = {}
    for name in names:
        parts.setdefault(0 if is_part else 1 + number(name) % PARTS, []).append(name)
    for kind in ("operators",) if asked.check else BACKENDS:
        for part in sorted(parts.keys() & {*(asked.part or parts)}):
            yield from until_done({"kind": kind, "part": part}, parts[part], rows)


def sample(names: Sequence[str], count: int) -> list[str]:
    return sorted(names, key=number)[:count]


def until_done(
    task: fresh.Task, names: Sequence[str], rows: Sequence[Row]
) -> Iterator[fresh.Task]:
    """The task, and again without the programs in which its process ended."""
    stopped: list[Stopped] = []
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "note.json")
        while True:
            yield {**task, "_ops": names, "_note": str(note), "_stopped": stopped}
            errors = [
                row["error"]
                for row in rows
                if task.items() <= row.items() and "error" in row
            ]
            if not errors or not errors[0].startswith(KILLED):
                return
            operator, case, plan = json.loads(note.read_text())
            stopped.append(Stopped(operator, case, plan, errors[0]))


# -------------------------------------------------------------- in a process


def measure(task: fresh.Task) -> Row:
    warnings.simplefilter("ignore")
    kind = task["kind"]
    sweep = Sweep(kind, PLANS[kind], ONLY[kind], Path(task["_note"]))
    sweep.stopped = [Stopped(*each) for each in task["_stopped"]]
    known = opinfo_programs.database()
    # What is there stays, and need not be looked at by each collection.
    gc.freeze()
    # Plain loops compile fastest. Where a cut fails, upstream draws it where it is.
    with (
        inductor_config.patch({"cpp.simdlen": 1, "compile_threads": 1}),
        chdir(Path(task["_note"]).parent),
    ):
        for name in task["_ops"]:
            sweep.compare(name, known[name])
    return sweep.row()


class Compiled:
    """A program that is traced once, and whose graphs are compiled by several plans.

    ``saved`` has by plan what the forwards save, ``warned`` what was warned of.
    """

    def __init__(
        self, program: Program, kind: str, plans: Sequence[Plan], is_whole: bool
    ) -> None:
        self.program = program
        self.plans = [NO_BUDGET, *plans]
        self.plan = NO_BUDGET
        self.saved: dict[Plan, list[list[str]]] = {plan: [] for plan in self.plans}
        self.warned: dict[Plan, list[str]] = {plan: [] for plan in self.plans}
        torch._dynamo.reset()
        self.call = torch.compile(
            program.__call__, backend=BACKENDS[kind], dynamic=False, fullgraph=is_whole
        )

    def step(self, plan: Plan) -> Step:
        self.plan = plan
        with (
            mock.patch.object(graph_compile, "aot_stage2_autograd", self._compile),
            budgeted(plan.budget, plan.target),
        ):
            return self.program.step(self.call)

    def _compile(self, state: Any, capture: Any, *compilers: Any) -> Any:
        by_plan, metadata = {}, state.fw_metadata
        for plan in self.plans:
            try:
                run, metadata = self._compile_by(plan, state, capture, *compilers)
                by_plan[plan] = run
            except Exception as error:
                if plan == NO_BUDGET:
                    raise
                by_plan[plan] = functools.partial(raise_again, error)

        def run_chosen(args: list[Any]) -> Any:
            return by_plan[self.plan](args)

        return run_chosen, metadata

    def _compile_by(self, plan: Plan, state: Any, capture: Any, *compilers: Any) -> Any:
        decide: Any = vars(partitioners)["decide"]

        def note(*args: Any, **kwargs: Any) -> Any:
            decision = decide(*args, **kwargs)
            self.saved[plan].append([node.name for node in decision.saved_values])
            return decision

        with (
            warnings_noted() as warned,
            mock.patch.object(partitioners, "decide", note),
            budgeted(plan.budget, plan.target),
        ):
            fresh_copy = overlay("memory_planner.compile.recompile").fresh_copy
            found = COMPILE(*fresh_copy(state, capture), *compilers)
        self.warned[plan] += warned
        return found


def raise_again(error: Exception, args: list[Any]) -> None:
    raise error


@dataclass
class Sweep:
    """Operators trained without a budget and under budgets, and what came of it."""

    kind: str
    plans: Sequence[Plan]
    # The cases to try; none for all.
    only: Sequence[str] = ()
    note: Optional[Path] = None
    stopped: list[Stopped] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # By plan, the programs compared, and those that it saves other values of.
    compared: Counter[str] = field(default_factory=Counter)
    replanned: Counter[str] = field(default_factory=Counter)
    # What programs compute else under budgets, and what they raise there alone.
    differs: list[str] = field(default_factory=list)
    raises: list[str] = field(default_factory=list)
    # What got upstream's plan in place of the one asked for.
    unplanned: list[str] = field(default_factory=list)
    # By the reason, the cases that do not work without a budget.
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def row(self) -> Row:
        names = ("counts", "compared", "replanned")
        lists = ("differs", "raises", "unplanned", "skipped")
        row: Row = {name: {**getattr(self, name)} for name in names}
        return {**row, **{name: getattr(self, name) for name in lists}}

    def compare(self, name: str, info: Any) -> None:
        """Compare the cases of an operator that work: in one program if that works."""
        print(name, flush=True)
        self.counts["operators"] += 1
        before = self.counts["cases compared"]
        is_unwritten = "empty" in name or "resize" in name
        with opinfo_programs.unseeded(), filled() if is_unwritten else nullcontext():
            found = [*self.working(name, info)]
            if len(found) < 2 or not self.equal(name, found):
                for case in found:
                    self.equal(name, [case])
        self.counts["operators compared"] += self.counts["cases compared"] > before

    def working(self, name: str, info: Any) -> Iterator[Case]:
        """The cases that eager mode can train."""
        for label, make in opinfo_programs.cases(name, info):
            if self.only and label not in self.only:
                continue
            self.counts["cases"] += 1
            try:
                self.enter(name, label, "eager mode")
                case = make()
                loss, *_ = Program([case]).step()
            except Exception as error:
                self.skip(name, label, error)
            else:
                yield replace(case, is_odd=not loss.isfinite())

    def equal(self, name: str, cases: Sequence[Case]) -> bool:
        """Whether several cases compute the same under all budgets.

        Of one case, what is wrong is noted, or why it is skipped.
        """
        program, label = Program(cases), TOGETHER
        if len(cases) == 1:
            label = cases[0].name
        try:
            self.enter(name, label, str(NO_BUDGET))
            compiled = Compiled(program, self.kind, self.plans, len(cases) > 1)
            wanted = compiled.step(NO_BUDGET)
            if any(map(other_bits, wanted, compiled.step(NO_BUDGET))):
                raise RuntimeError("two equal steps differ")
            if not compiled.saved[NO_BUDGET]:
                raise RuntimeError("no graph is split in a forward and a backward")
        except Exception as error:
            if len(cases) == 1:
                self.skip(name, label, error)
            return False
        checks = [
            self.holds(name, label, compiled, plan, wanted) for plan in self.plans
        ]
        if not all(checks) and len(cases) > 1:
            return False
        self.counts["cases compared"] += len(cases)
        return True

    def holds(
        self, name: str, label: str, compiled: Compiled, plan: Plan, wanted: Step
    ) -> bool:
        """Whether a plan computes what is wanted."""
        place = f"{name} ({label}), {plan}"
        try:
            self.enter(name, label, str(plan))
            found = compiled.step(plan)
        except Exception as error:
            self.raises.append(f"{place}: {shortened(error)}")
            return False
        self.compared[str(plan)] += 1
        self.replanned[str(plan)] += compiled.saved[plan] != compiled.saved[NO_BUDGET]
        for text in compiled.warned[plan]:
            if "cannot be planned" in text:
                why = text.partition("cannot be planned: ")[2]
                self.unplanned.append(f"{place}: {why[:MOST_LETTERS]}")
        wrong = DIFFERENCE[self.kind](found, wanted)
        if wrong:
            self.differs.append(f"{place}: {wrong}")
        return not wrong

    def enter(self, name: str, label: str, plan: str) -> None:
        """Note what is tried next, in case that it ends the process; or has ended it."""
        for each in self.stopped:
            if each[:3] == (name, label, plan):
                raise RuntimeError(each.error)
        if self.note is not None:
            self.note.write_text(json.dumps([name, label, plan]))

    def skip(self, name: str, label: str, error: Exception) -> None:
        self.skipped.setdefault(shortened(error), []).append(f"{name} ({label})")
        self.counts["cases skipped"] += 1


@contextmanager
def filled() -> Iterator[None]:
    """What nobody has written has a value of its own, in buffers of kernels as well."""

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    torch.use_deterministic_algorithms(True, warn_only=True)
    with mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", empty):
        yield
    torch.use_deterministic_algorithms(False)


def shortened(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:MOST_LETTERS]


# ---------------------------------------------------------------- comparing


def plain(value: Tensor) -> Tensor:
    dense = value if value.layout == torch.strided else value.to_dense()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1)


def other_bits(found: Tensor, wanted: Tensor) -> bool:
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return True
    bits = (plain(each).view(torch.uint8) for each in (found, wanted))
    return not torch.equal(*bits)


def in_bits(found: Step, wanted: Step) -> str:
    """What differs, if anything does."""
    wrong = [
        name_of(at) for at, pair in enumerate(zip(found, wanted)) if other_bits(*pair)
    ]
    return f"other bits: {', '.join(wrong)}" if wrong else ""


def in_rounding(found: Step, wanted: Step) -> str:
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


def name_of(at: int) -> str:
    return ("loss", "outputs")[at] if at < 2 else f"gradient {at - 2}"


EQUAL = {
    "operators": "programs with other bits than without a budget",
    "inductor": "programs that differ by more than rounding",
}
DIFFERENCE: dict[str, Callable[[Step, Step], str]] = {
    "operators": in_bits,
    "inductor": in_rounding,
}


# -------------------------------------------------------------------- pages


def judged(rows: Sequence[Row]) -> Iterator[Mark]:
    for kind in BACKENDS:
        found = good(rows, kind=kind)
        programs = sum(count for row in found for count in row["compared"].values())
        for name, what in (
            ("differs", EQUAL[kind]),
            ("raises", "exceptions that there are none of without a budget"),
            ("unplanned", "programs that get upstream's plan for an error"),
        ):
            of_name = (text for row in found for text in row[name])
            wrong = [text for text in of_name if NOT_PLANNED not in text]
            measured = f"{len(wrong)} of {programs:,}"
            measured += f" ({wrong[0]})" if wrong else ""
            if found:
                limit = f"{kind}: {len(wrong)} {what}, such as {''.join(wrong[:1])}."
                yield Mark(f"{kind}: {what}", measured, "0", not wrong, limit=limit)


def total(counts: Iterable[dict[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in counts:
        found.update(each)
    return found


LEGEND = """Each operator of torch's OpInfo databases is trained in small programs, without a budget and
under budgets by the targets "saved" and "peak". A case is a way to call an operator; those
that do not work without a budget are left out. Operator by operator every bit has to be the
same, under inductor all but rounding.
"""


def table(rows: Sequence[Row]) -> str:
    lines = []
    for kind in BACKENDS:
        found = good(rows, kind=kind)
        counts, compared, replanned = (
            total(row[name] for row in found)
            for name in ("counts", "compared", "replanned")
        )
        done = ("operators", "cases")
        each = (f"{counts[f'{d} compared']:,} of {counts[d]:,}" for d in done)
        plans = (f"{p}: {replanned[p]:,} of {n:,}" for p, n in compared.items())
        if found:
            lines.append([kind, *each, "; ".join(plans)])
    heading = ("by", "operators", "cases", "plans that save something else")
    return pages.markdown(heading, lines)


def page(data: Row) -> str:
    rows = data["measured"]
    marks = [*judged(rows)]
    origin = pages.measured_on(data["environment"], pages.RUN, rows)
    tables = {"All": table(rows)}
    limits = pages.limits(marks, rows)
    return pages.page(LEGEND, origin, pages.found(marks), limits, tables)
