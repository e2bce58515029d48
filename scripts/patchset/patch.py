"""What a patch is: whole files of the overlay and anchored edits of upstream's.

Everything else (the checked-in patches, the manifest, what ``apply_patch.sh`` does) is
derived from the patches in ``topics/``, in the order of ``series.SERIES``, and from the
files in ``torch_overlay/``.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional


REPOSITORY = Path(__file__).resolve().parents[2]
OVERLAY = REPOSITORY / "torch_overlay"

MANIFEST = Path(__file__).with_name("manifest.json")
Manifest = dict[str, dict[str, dict[str, Optional[str]]]]
# ``release -> path -> {"before": sha256, "after": sha256}`` of the files that it has.
KNOWN: Manifest = json.loads(MANIFEST.read_text())
# The supported releases, oldest first.
RELEASES = tuple(KNOWN)


def module_path(name: str) -> str:
    """A module beside upstream's knapsacks."""
    return f"torch/_functorch/_activation_checkpointing/{name}.py"


def planner_path(name: str) -> str:
    """A module of the planner's own package."""
    return f"torch/_functorch/memory_planner/{name}.py"


PARTITIONERS = "torch/_functorch/partitioners.py"
CONFIG = "torch/_functorch/config.py"
KNAPSACK = module_path("knapsack")
GRAPH_COMPILE = "torch/_functorch/_aot_autograd/graph_compile.py"
AUTOGRAD_CACHE = "torch/_functorch/_aot_autograd/autograd_cache.py"


def minor(version: str) -> tuple[int, int]:
    """``"2.13.0a0+git1"`` -> ``(2, 13)``; ValueError where that cannot be read."""
    major, _, rest = version.partition(".")
    return int(major), int(rest.partition(".")[0])


def grammar(release: str) -> tuple[int, int]:
    """The oldest Python that this release of torch runs on."""
    return (3, 9) if minor(release) < (2, 9) else (3, 10)


@dataclass(frozen=True)
class Edit:
    """One replacement in one file that is not ours.

    ``anchor`` must occur exactly once in the file. Where the text to replace is
    longer, it runs from ``anchor`` to the end of the next ``through``, and
    ``digests`` (of any release, the first 16 hex digits of the SHA-256) pin it, so
    that upstream's lines need not stand here and no unknown line can be swallowed.
    ``inside`` names the function that must hold the new text, None the module
    level. No edit is of a line that another one wrote. The edit is for releases
    ``since`` to ``until``, both included, of its patch's.
    """

    path: str
    anchor: str
    replacement: str
    inside: Optional[str] = None
    since: tuple[int, int] = (2, 6)
    until: Optional[tuple[int, int]] = None
    through: Optional[str] = None
    digests: tuple[str, ...] = ()

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
            if found not in self.digests:
                number = text.count("\n", 0, start) + 1
                raise LookupError(
                    f"{self.path}:{number}: the lines from {self.anchor.strip()!r} on "
                    f"have digest {found}, not {' or '.join(self.digests)}"
                )
        return start, end


def edits(diff: str) -> tuple[Edit, ...]:
    """The edits that a diff tells.

    Each begins with ``@@ PATH [FUNCTION] [since RELEASE] [until RELEASE]``. Lines stay,
    or with a ``-`` go, or with a ``+`` come. A ``~`` stands for lines that go and are
    not shown, with the digests of all that go.
    """
    found = []
    for hunk in re.split("^@@ ", diff, flags=re.MULTILINE)[1:]:
        head, *lines = hunk.splitlines()
        path, *words = head.split()
        inside = words.pop(0) if len(words) % 2 else None
        limits = dict(zip(words[::2], map(minor, words[1::2])))
        old, new, digests = [""], "", ()
        for line in lines:
            if line.startswith("~"):
                old.append("")
                digests = tuple(line[1:].split())
                continue
            if not line.startswith("+"):
                old[-1] += f"{line[1:]}\n"
            if not line.startswith("-"):
                new += f"{line[1:]}\n"
        through = old[1] if digests else None
        edit = Edit(path, old[0], new, inside, through=through, digests=digests)
        found.append(replace(edit, **limits))
    return tuple(found)


@dataclass(frozen=True)
class Patch:
    """One topic: whole files of the overlay, edits, and the words for a reviewer.

    ``landed`` lists (path, text) pairs that are all present where upstream
    already has the feature. ``faults`` is what may still be wrong with it there, each
    with a regular expression that finds it in the first of these files.
    A patch is for releases from ``since`` on, and where it has edits, for theirs.
    ``lacking`` warns of what goes wrong on those before. ``test``, one of the files,
    fails without the patch; ``sources`` are the others.

    For the pull request: ``needs`` names the patches that it builds on, ``risks`` what
    a reviewer should look at, ``beyond`` what it does not do. ``repro`` is a program of
    at most 15 lines that goes wrong, or shows nothing, without it. ``lines`` is how many
    it may add, tests aside. ``minimal`` is the same topic in upstream's own text, where
    that is smaller than what the set does.
    """

    name: str
    subject: str
    why: str
    test: str
    risks: str = ""
    repro: str = ""
    beyond: str = ""
    trailers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    since: tuple[int, int] = (2, 11)
    lacking: str = ""
    landed: tuple[tuple[str, str], ...] = ()
    faults: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    lines: Optional[int] = None
    minimal: Optional[Patch] = None

    def fits(self, release: str) -> bool:
        if minor(release) < self.since:
            return False
        return not self.edits or bool(self.edits_for(release))

    def edits_for(self, release: str) -> list[Edit]:
        return [
            edit
            for edit in self.edits
            if max(edit.since, self.since) <= minor(release)
            and (edit.until is None or minor(release) <= edit.until)
        ]

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.sources, self.test)

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(path for path in self.files if path.startswith("test/"))

    @property
    def tested(self) -> str:
        """The command that fails without the patch."""
        return f"python {self.test}"

    @property
    def message(self) -> str:
        """Of its commit: subject, reason, trailers, how it was tested."""
        trailers = "\n".join((*self.trailers, f"Tested: {self.tested}"))
        return f"{self.subject}\n\n{self.why}\n{trailers}\n"

    def paths(self) -> tuple[str, ...]:
        return self.files + tuple(dict.fromkeys(e.path for e in self.edits))
