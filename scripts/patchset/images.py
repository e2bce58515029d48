"""What every touched file was, is and becomes, and what that makes of each patch.

Nothing here writes. ``survey`` reads the tree once and returns a ``Survey``: the
state of every patch, and step by step the files that applying it would change.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Optional

from .patch import Edit, grammar, KNOWN, minor, OVERLAY, Patch, RELEASES
from .series import SERIES
from .target import BadCall, NEEDS, Target
from .transaction import Change, digest, Journal


APPLIES = "applies"
APPLIED = "applied"
LANDED = "landed upstream"
FAULTY = "landed upstream but still faulty"
CONFLICTS = "conflicts"
ABSENT = "not for this release"
LEFT_OUT = "left out"

IN_THE_WAY = (
    "is in the way of what the patch adds, and is upstream's or somebody else's ("
    "git log tells whose). If it is yours, move it away; if it is upstream's, leave the "
    "patch out with --without; if it is the patch's and was changed here, "
    "scripts/refresh.sh --from takes that into the set"
)

View = dict[str, Optional[bytes]]


@dataclass(frozen=True)
class PatchState:
    """One patch against the tree at hand; ``changes`` is empty unless it applies."""

    patch: Patch
    state: str
    detail: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Survey:
    """The whole series against the tree at hand.

    ``release`` is the one whose edits were used, ``in_manifest`` whether the tree
    is known to be that release's to the byte.
    """

    release: str
    in_manifest: bool
    patches: tuple[PatchState, ...]

    @property
    def conflicts(self) -> list[str]:
        return [
            f"{p.patch.name}: {p.detail}" for p in self.patches if p.state == CONFLICTS
        ]

    @property
    def changes(self) -> list[Change]:
        """One change per file, in the order in which they must be written.

        New files come first: an edit of any patch may import them.
        """
        total: dict[str, Change] = {}
        for step in self.patches:
            for change in step.changes:
                first = total.get(change.path, change)
                total[change.path] = Change(change.path, first.before, change.after)
        return sorted(total.values(), key=lambda change: change.before is not None)


def overlay(path: str) -> bytes:
    return (OVERLAY / path).read_bytes()


def series_paths(target: Target, series: Sequence[Patch] = SERIES) -> list[str]:
    paths = dict.fromkeys(path for patch in series for path in patch.paths())
    return [path for path in paths if target.wants(path)]


def survey(
    target: Target,
    journal: Optional[Journal] = None,
    without: Collection[str] = (),
    series: Sequence[Patch] = SERIES,
    release: Optional[str] = None,
) -> Survey:
    """Classify every patch; Conflict where a file may not be touched at all.

    BadCall for a release before the newest known that is not offered, unless the set
    is there already. Otherwise an unknown tree is tried with every release's edits.
    ``without`` names patches to leave out, ``series`` may be another form of some of
    them. A tree of which ``release`` is given is taken for it, known or not.
    """
    paths = series_paths(target, series)
    current = {path: target.read(path) for path in (*paths, *map(_twin, paths))}
    base = _base(current, journal)
    known = release or _known_release(base)
    candidates = sorted(RELEASES, key=minor, reverse=True)
    # With an unreadable version the newest release's edits come first.
    with contextlib.suppress(ValueError):
        here = minor(target.version)
        offered = [minor(candidate) for candidate in candidates]
        if not known and not journal and here not in offered and here < offered[0]:
            raise BadCall(f"the set is not for PyTorch {target.version}. {NEEDS}")
        candidates.sort(key=lambda r: minor(r) != here)
    nearest: Optional[Survey] = None
    for candidate in [known] if known else candidates:
        states = []
        for state in _classify(series, candidate, base, current, without):
            states.append(state)
            if nearest is not None and state.state == CONFLICTS:
                break  # Of the nearest release alone all conflicts are shown.
        result = Survey(candidate, known is not None, tuple(states))
        if not result.conflicts:
            return result
        nearest = nearest or result
    assert nearest is not None
    return nearest


def _base(current: View, journal: Optional[Journal]) -> View:
    """Every file as it is without the patch set.

    A file that still is what the journal says was written counts as its backup.
    Any other is taken as it stands: torch was reinstalled or upgraded, a commit
    was checked out, somebody edited it.
    """
    base = dict(current)
    if journal is not None:
        for path, known in journal.files.items():
            if path in base and digest(base[path]) == known["after"]:
                base[path] = journal.backup(path)
    return base


def _known_release(base: View) -> Optional[str]:
    """The release that these files are of to the byte, before or after patching."""

    def is_of(path: str, files: dict[str, dict[str, Optional[str]]]) -> bool:
        # A whole file of ours may have come over any release: it tells nothing.
        ours = (OVERLAY / path).is_file() and base[path] == overlay(path)
        return ours or digest(base[path]) in files[path].values()

    for release, files in KNOWN.items():
        known = [path for path in base if files.get(path, {}).get("before")]
        if known and all(is_of(path, files) for path in known):
            return release
    return None


def _classify(
    series: Sequence[Patch],
    release: str,
    base: View,
    current: View,
    without: Collection[str],
) -> Iterator[PatchState]:
    """Every patch's state, from the files without the set and as they are."""
    view = dict(base)
    missing: set[str] = set()
    # Where all of it is there already, nothing will be written that has to compile.
    fit = (patch for patch in series if patch.fits(release))
    is_new = bool(without) or not all(_is_there(p, release, current) for p in fit)
    for patch in series:
        lacks = [name for name in patch.needs if name in missing]
        if patch.name in without or (lacks and patch.fits(release)):
            missing.add(patch.name)
            detail = f"it needs {', '.join(lacks)}" if lacks else ""
            yield PatchState(patch, LEFT_OUT, detail)
        else:
            state = _classify_one(patch, release, base, current, view, is_new)
            view.update((change.path, change.after) for change in state.changes)
            yield state


def _is_there(patch: Patch, release: str, current: View) -> bool:
    files = (path for path in patch.files if path in current)
    return all(current[path] == overlay(path) for path in files) and all(
        _has(current[edit.path], edit) for edit in patch.edits_for(release)
    )


def _classify_one(
    patch: Patch, release: str, base: View, current: View, view: View, is_new: bool
) -> PatchState:
    """The state of one patch, on top of ``view``; what ``is_new`` has to compile."""
    if not patch.fits(release):
        return PatchState(patch, ABSENT, f"nothing to change in {release}")
    files = [path for path in patch.files if path in view]
    edits = patch.edits_for(release)
    done = _is_there(patch, release, current)
    landed = bool(patch.landed) and all(
        text in _text(base.get(path)) for path, text in patch.landed
    )
    faults = [
        what
        for what, found in patch.faults
        if re.search(found, _text(base[patch.landed[0][0]]))
    ]
    if landed and not faults and not done:
        return PatchState(patch, LANDED, "upstream has it; nothing is changed")
    try:
        changes = _changes(files, edits, release, view, is_new)
    except (LookupError, SyntaxError, ValueError) as error:
        return PatchState(patch, CONFLICTS, str(error))
    if done:
        return PatchState(patch, APPLIED, "", changes)
    if landed:
        return PatchState(patch, FAULTY, "; ".join(faults), changes)
    return PatchState(patch, APPLIES, "", changes)


def _changes(
    files: Sequence[str],
    edits: Sequence[Edit],
    release: str,
    view: View,
    is_new: bool,
) -> tuple[Change, ...]:
    """The patch's changes to ``view``.

    LookupError, SyntaxError or, of a null byte on some Pythons, ValueError where it fails.
    """
    after: dict[str, bytes] = {}
    for path in files:
        after[path] = overlay(path)
        _check_replaces(path, view[path], after[path])
        if view[path] is None and view[_twin(path)] is not None:
            raise LookupError(f"{_twin(path)}: {IN_THE_WAY}")
    for edit in edits:
        before = after.get(edit.path, view[edit.path])
        if before is None:
            raise LookupError(f"{edit.path}: no such file")
        if _has(before, edit):
            after[edit.path] = before
            continue
        text = before.decode()
        start, end = edit.locate(text)
        after[edit.path] = (text[:start] + edit.replacement + text[end:]).encode()
    for path, content in after.items() if is_new else ():
        here = tuple(edit for edit in edits if edit.path == path)
        _check_syntax(path, content, release, here)
    return tuple(
        Change(path, view[path], content)
        for path, content in after.items()
        if view[path] != content
    )


def _has(content: Optional[bytes], edit: Edit) -> bool:
    """Whether the edit is in the file."""
    return _text(content).count(edit.replacement) == 1


def _text(content: Optional[bytes]) -> str:
    return "" if content is None else content.decode()


def _check_replaces(path: str, before: Optional[bytes], after: bytes) -> None:
    """LookupError where a whole file would take away something that is needed."""
    if before is None or before == after:
        return
    released = [files.get(path, {}).get("before") for files in KNOWN.values()]
    if digest(before) in released:
        return
    if not any(released):
        raise LookupError(f"{path}: {IN_THE_WAY}")
    lost = _public_names(before) - _public_names(after)
    if lost:
        raise LookupError(
            f"{path}: the file here defines {', '.join(sorted(lost))}, which the "
            "replacement lacks"
        )


def _twin(path: str) -> str:
    """The other file that Python would take for the same module."""
    package = "/__init__.py"
    if path.endswith(package):
        return f"{path[: -len(package)]}.py"
    return f"{path[: -len('.py')]}{package}"


def _public_names(source: bytes) -> set[str]:
    return {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
    }


@cache
def _check_syntax(
    path: str, content: bytes, release: str, edits: tuple[Edit, ...]
) -> None:
    """The file compiles on the oldest Python, and each edit is where it belongs."""
    if sys.version_info < grammar(release):
        oldest = ".".join(map(str, grammar(release)))
        raise BadCall(
            f"Python {oldest} or newer is needed to read PyTorch {release}, and this is "
            f"{sys.version.split()[0]}; name one in APPLY_PYTHON"
        )
    text = content.decode()
    tree = ast.parse(text, filename=path, feature_version=grammar(release))
    compile(text, path, "exec", dont_inherit=True)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for edit in edits:
        first = text.count("\n", 0, text.index(edit.replacement)) + 1
        last = first + edit.replacement.rstrip("\n").count("\n")
        around = [
            n for n in functions if n.lineno <= first and last <= (n.end_lineno or 0)
        ]
        innermost = max(around, key=lambda n: n.lineno).name if around else None
        if innermost != edit.inside:
            raise LookupError(
                f"{path}:{first}: the edit is inside {innermost or 'no function'}, "
                f"not {edit.inside or 'at module level'}"
            )
