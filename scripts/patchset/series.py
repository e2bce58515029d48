"""The patch set as one table: every patch, its edits, and the releases they fit.

Everything else (the checked-in patches, the manifest, the exported series, what
``apply_patch.sh`` does) is derived from ``SERIES`` and the files in
``torch_overlay/``. To change what is patched, change this file and run
``scripts/generate_patches.sh``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Optional


REPOSITORY = Path(__file__).resolve().parents[2]
OVERLAY = REPOSITORY / "torch_overlay"

RELEASES = (
    "2.6.0",
    "2.7.1",
    "2.8.0",
    "2.9.1",
    "2.10.0",
    "2.11.0",
    "2.12.1",
    "2.13.0",
    "2.14.1",
    "2.15.0",
)

PARTITIONERS = "torch/_functorch/partitioners.py"
CONFIG = "torch/_functorch/config.py"
KNAPSACK = "torch/_functorch/_activation_checkpointing/knapsack.py"


def minor(version: str) -> tuple[int, int]:
    """``"2.13.0a0+git1"`` -> ``(2, 13)``; ValueError where that cannot be read."""
    major, _, rest = version.partition(".")
    return int(major), int(rest.partition(".")[0])


@dataclass(frozen=True)
class Edit:
    """One replacement in one file that is not ours.

    ``anchor`` must occur exactly once in the file. Where the text to replace is
    longer, it runs from ``anchor`` to the end of the next ``through``, and
    ``digest`` (first 16 hex digits of its SHA-256) pins it, so that upstream's
    lines need not stand here and no unknown line can be swallowed.
    ``inside`` names the function that must hold the new text, None the module
    level. The edit is for releases ``since`` to ``until``, both included.
    """

    path: str
    anchor: str
    replacement: str
    inside: Optional[str] = None
    since: tuple[int, int] = (2, 6)
    until: Optional[tuple[int, int]] = None
    through: Optional[str] = None
    digest: Optional[str] = None

    def fits(self, release: str) -> bool:
        return self.since <= minor(release) and (
            self.until is None or minor(release) <= self.until
        )

    def locate(self, text: str) -> tuple[int, int]:
        """Start and end of the text to replace; LookupError says what is off."""
        count = text.count(self.anchor)
        if count != 1:
            line = self.anchor.strip().splitlines()[0]
            raise LookupError(f"{self.path}: {line!r} occurs {count} times, not once")
        start = text.index(self.anchor)
        end = start + len(self.anchor)
        if self.through is not None:
            last = text.find(self.through, end)
            if last < 0:
                raise LookupError(
                    f"{self.path}: no {self.through.strip()!r} after "
                    f"{self.anchor.strip()!r}"
                )
            end = last + len(self.through)
            found = hashlib.sha256(text[start:end].encode()).hexdigest()[:16]
            if found != self.digest:
                number = text.count("\n", 0, start) + 1
                raise LookupError(
                    f"{self.path}:{number}: the lines from {self.anchor.strip()!r} on "
                    f"have digest {found}, not {self.digest}"
                )
        return start, end


@dataclass(frozen=True)
class Fault:
    """What is wrong with upstream's own version, and how its text shows it.

    The fault is there when all of ``texts`` are in the file, or when ``missing``
    is not.
    """

    what: str
    path: str
    texts: tuple[str, ...] = ()
    missing: Optional[str] = None

    def found(self, text: str) -> bool:
        if self.missing is not None:
            return self.missing not in text
        return all(part in text for part in self.texts)


@dataclass(frozen=True)
class Patch:
    """One topic: whole files of the overlay, edits, and the words for a reviewer.

    ``landed`` lists (path, text) pairs that are all present where upstream
    already has the feature; ``faults`` is what may still be wrong with it there.
    """

    name: str
    subject: str
    why: str
    trailers: tuple[str, ...]
    tested: str
    files: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    landed: tuple[tuple[str, str], ...] = ()
    faults: tuple[Fault, ...] = ()

    def paths(self) -> tuple[str, ...]:
        return self.files + tuple(dict.fromkeys(e.path for e in self.edits))


def _unknown_solver(others: str) -> str:
    return f'''\
        raise RuntimeError(
            f"Unknown activation_memory_budget_solver {{SOLVER!r}}: known are "
            f"{{', '.join(KNAPSACK_SOLVERS)}}, "
            "{others}"
        )
'''


_OLD_ERROR = (
    "        raise RuntimeError("
    'f"Not aware of memory budget knapsack solver: {SOLVER}")\n'
)
_OLD_IMPORT = "from ._activation_checkpointing.knapsack import (\n"
_NEW_IMPORT = (
    "from ._activation_checkpointing.knapsack import dp_knapsack, KNAPSACK_SOLVERS\n"
)
_DISPATCH = "_optimize_runtime_with_given_memory"
_LOOK_UP = """\
    if isinstance(SOLVER, str) and SOLVER in KNAPSACK_SOLVERS:
        return KNAPSACK_SOLVERS[SOLVER](memory, runtimes, max_memory)
"""

SERIES = (
    Patch(
        name="knapsack-solvers",
        subject="Rewrite the knapsack solvers so that the capacity is kept",
        why="""\
dp_knapsack_sliding_hirschberg increments its capacity for slicing and then
splits the incremented value, so every split hands out one unit too many: three
items of one unit each and a budget of one unit give two saved items, and real
joint graphs end up to 24 % over their budget. In the same module, greedy
divides by zero on items without size, ilp drops items that the solver returns
as 0.9999999, and dp's float32 table absorbs small runtimes beside large ones.

The solvers are written anew under their old names and signatures. Both dynamic
programs share one core with two rolling rows in float64, so they agree in
value, and KNAPSACK_SOLVERS names the solvers that a config string may select.
""",
        trailers=("Fixes: #197871", "Upstream-PR: pytorch/pytorch#160914"),
        tested="python test/functorch/test_ac_knapsack_solvers.py",
        files=(KNAPSACK, "test/functorch/test_ac_knapsack_solvers.py"),
        landed=((KNAPSACK, "def dp_knapsack_sliding_hirschberg("),),
        faults=(
            Fault(
                "#197871: every split hands out one unit too many",
                KNAPSACK,
                ("capacity = capacity + 1", "right_capacity = capacity - best_split"),
            ),
            Fault(
                "greedy divides by zero on items without size",
                KNAPSACK,
                ("runtimes[i] / memory[i]",),
            ),
            Fault("ilp drops items returned as 0.9999999", KNAPSACK, ("if i == 1:",)),
            Fault(
                "dp's float32 table absorbs small runtimes",
                KNAPSACK,
                ("dtype=torch.float32",),
            ),
            Fault("no table of solvers by name", KNAPSACK, missing="KNAPSACK_SOLVERS"),
        ),
    ),
    Patch(
        name="solver-by-name",
        subject="Look the knapsack solver up by name and list the known ones",
        why="""\
The dispatch repeats one branch per solver, and a misspelt name is answered
without saying which names there are. Looking the name up in KNAPSACK_SOLVERS
makes every solver of the module selectable, the sliding Hirschberg one before
2.10 included, and the error lists them.
""",
        trailers=("Upstream-PR: pytorch/pytorch#160914",),
        tested="python test/functorch/test_ac_knapsack_solvers.py",
        edits=(
            Edit(
                PARTITIONERS,
                anchor=_OLD_IMPORT,
                through="    ilp_knapsack,\n)\n",
                digest="a5a82a77df22275b",
                replacement="from ._activation_checkpointing.knapsack import "
                "KNAPSACK_SOLVERS\n",
                until=(2, 6),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_IMPORT,
                through="    ilp_knapsack,\n)\n",
                digest="a5a82a77df22275b",
                replacement=_NEW_IMPORT,
                since=(2, 7),
                until=(2, 9),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_IMPORT,
                through="    ilp_knapsack,\n)\n",
                digest="1c723d8eb237fd0f",
                replacement=_NEW_IMPORT,
                since=(2, 10),
            ),
            Edit(
                PARTITIONERS,
                anchor='    if SOLVER == "greedy":\n',
                through="        return dp_knapsack(memory, runtimes, max_memory)\n",
                digest="0a2098dfac5ac524",
                replacement=_LOOK_UP,
                inside=_DISPATCH,
                until=(2, 9),
            ),
            Edit(
                PARTITIONERS,
                anchor='    if SOLVER == "greedy":\n',
                through="        return dp_knapsack_sliding_hirschberg"
                "(memory, runtimes, max_memory)\n",
                digest="0012834c85af406d",
                replacement=_LOOK_UP,
                inside=_DISPATCH,
                since=(2, 10),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_ERROR,
                replacement=_unknown_solver("or a callable"),
                inside=_DISPATCH,
                until=(2, 6),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_ERROR,
                replacement=_unknown_solver("dynamic_memory_budget_dp, or a callable"),
                inside=_DISPATCH,
                since=(2, 7),
                until=(2, 10),
            ),
            Edit(
                PARTITIONERS,
                anchor=_OLD_ERROR,
                replacement=_unknown_solver(
                    "dynamic_memory_budget_dp, or a CustomKnapsackSolver"
                ),
                inside=_DISPATCH,
                since=(2, 11),
            ),
        ),
        landed=((PARTITIONERS, "KNAPSACK_SOLVERS[SOLVER]("),),
    ),
    Patch(
        name="config-solver-name",
        subject="Give the sliding Hirschberg solver a name in the config",
        why="""\
The article on this solver selects it as config.dp_knapsack_sliding_hirschberg,
which raises an AttributeError. The name now stands in the config and equals the
plain string, so both ways of writing it select the same solver.
""",
        trailers=("Upstream-PR: pytorch/pytorch#160914",),
        tested="python test/functorch/test_ac_knapsack_solvers.py",
        edits=(
            Edit(
                CONFIG,
                anchor='activation_memory_budget_runtime_estimator = "flops"\n',
                replacement="""\
activation_memory_budget_runtime_estimator = "flops"

# The name of the solver that answers like "dp" and holds a few rows instead of a
# table, so that code can write config.dp_knapsack_sliding_hirschberg or the string.
dp_knapsack_sliding_hirschberg = "dp_knapsack_sliding_hirschberg"
""",
            ),
        ),
        landed=((CONFIG, "\ndp_knapsack_sliding_hirschberg = "),),
    ),
)
