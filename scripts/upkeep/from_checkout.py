"""What ``scripts/refresh.sh --from`` does: takes changes from a patched checkout.

Whole files of the overlay are copied back. In a file of upstream's, what changed within
the lines of an edit changes that edit, where its topic's module has it. Nothing is
written unless all of it can be placed, and the new set gives that checkout to the byte.
"""

import ast
import difflib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from patchset.commits import git
from patchset.files import replace_file
from patchset.images import series_paths, Survey, survey
from patchset.patch import Edit, edits, OVERLAY, Patch, REPOSITORY
from patchset.series import SERIES
from patchset.target import Conflict, find, Target
from patchset.transaction import digest, Journal, lock, read_journal, renew, WRITTEN


TOPICS = Path("scripts", "patchset", "topics")
# What the set is made of, as folders of the repository.
PARTS = ("scripts/patchset", "torch_overlay")


def take(target: Target) -> None:
    """Change the repository; Conflict, and nothing is written, where that cannot be."""
    with lock(target), tempfile.TemporaryDirectory() as folder:
        journal = read_journal(target)
        if journal is None or journal.phase != WRITTEN:
            raise Conflict(
                f"{target.root}: the set is not there by scripts/apply_patch.sh, so "
                "nothing tells what was changed since"
            )
        clean = untouched(target, journal, Path(folder) / "pytorch")
        applied = survey(find(str(clean)))
        written = {change.path: change.after for change in applied.changes}
        current = {path: target.read(path) for path in journal.files}
        check_applied(target, journal, written)
        if all(
            current.get(path, content) == content for path, content in written.items()
        ):
            print(f"nothing has changed in {target.root} since the set was applied")
            return
        new, notes = placed(target, journal, applied, written, current)
        check_result(Path(folder), clean, new, current)
        for path, content in new.items():
            replace_file(REPOSITORY / path, content)
            print(f"wrote {path}")
        # To the byte it is what applying the new set makes of it.
        renew(target, journal)
    print(
        *dict.fromkeys(notes), "then: scripts/generate_patches.sh, and commit", sep="\n"
    )


def untouched(target: Target, journal: Journal, root: Path) -> Path:
    """What the series looks at, as it was before the set was applied."""
    for path in ("torch/__init__.py", *series_paths(target)):
        known = path in journal.files
        content = journal.backup(path) if known else target.read(path)
        if content is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
    (root / "version.txt").write_text(f"{target.version}\n")
    return root


def check_applied(target: Target, journal: Journal, written: dict[str, bytes]) -> None:
    """Conflict where another set was applied than the one here."""
    known = {path: entry["after"] for path, entry in journal.files.items()}
    ours = {path: digest(content) for path, content in written.items()}
    for path in sorted(known.keys() | ours.keys()):
        if target.wants(path) and known.get(path) != ours.get(path):
            raise Conflict(
                f"{path}: what was applied to {target.root} is not the set that is "
                "here: a patch was left out, or the set has changed since. Put your "
                "changes aside, reverse it, apply the set, and make them again"
            )


# ------------------------------------------------------------------ topics


@dataclass(frozen=True)
class Hunk:
    """An edit as a topic's module has it: the lines of source after its head's."""

    path: Path
    head: int
    lines: tuple[str, ...]
    quotes: str
    edit: Edit

    def changed(self, start: int, stop: int, new: list[str]) -> "Hunk":
        """With ``new`` for the lines of the new text from ``start`` to ``stop``."""
        result: list[str] = []
        added = [f"+{line}" for line in new]
        at = 0
        for line in self.lines:
            if line.startswith(("-", "~")):
                result.append(line)
                continue
            if at == stop:
                result += added
                added = []
            if not start <= at < stop:
                result.append(line)
            elif not line.startswith("+"):
                # A line of upstream's goes.
                result.append(f"-{line[1:]}")
            at += 1
        lines = (*result, *added)
        return Hunk(self.path, self.head, lines, self.quotes, self.edit)


def hunks() -> Iterator[Hunk]:
    """Every edit of every topic that is written as a diff."""
    for place in sorted((REPOSITORY / TOPICS).glob("*.py")):
        source = place.read_text()
        lines = source.split("\n")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            # The text begins on the line after the quotes, and each line is one line.
            first, last = node.lineno, (node.end_lineno or 0) - 1
            text = node.value.splitlines()
            if not node.value.startswith("@@ ") or len(text) != last - first:
                continue
            heads = [n for n, line in enumerate(text) if line.startswith("@@ ")]
            quotes = lines[first - 1].rstrip("\\")[-3:]
            for edit, head, end in zip(
                edits(node.value), heads, [*heads[1:], len(text)]
            ):
                body = tuple(lines[first + head + 1 : first + end])
                yield Hunk(
                    place.relative_to(REPOSITORY), first + head, body, quotes, edit
                )


def rewritten(changed: dict[Hunk, Hunk]) -> dict[str, bytes]:
    """The topics' modules with these hunks changed; one that changes nothing is gone."""
    sources: dict[Path, list[str]] = {}
    # From the end, so that the lines before stay where they are.
    for old, new in sorted(changed.items(), key=lambda pair: -pair[0].head):
        if old.path not in sources:
            sources[old.path] = (REPOSITORY / old.path).read_text().split("\n")
        idle = not any(line.startswith(("+", "-", "~")) for line in new.lines)
        first = old.head if idle else old.head + 1
        last = old.head + 1 + len(old.lines)
        sources[old.path][first:last] = [] if idle else new.lines
    return {str(path): "\n".join(text).encode() for path, text in sources.items()}


# ------------------------------------------------------------------- files


class Span(NamedTuple):
    """An edit in a file that it was applied to: its lines, and whose it is."""

    first: int
    last: int
    patch: Patch
    edit: Edit

    def holds(self, start: int, stop: int) -> bool:
        """Whether those lines are within the edit.

        Where there are none, something comes before the line ``start``. At the edit's
        ends that is its own if the line beside it is no line of upstream's.
        """
        if not self.first <= start <= stop <= self.last:
            return False
        lines = self.edit.replacement.splitlines()
        if start == stop == self.first:
            return not self.edit.anchor.startswith(lines[0])
        if start == stop == self.last:
            end = self.edit.through or self.edit.anchor
            return not end.endswith(f"{lines[-1]}\n")
        return True

    @property
    def releases(self) -> str:
        """Those that the edit is for, where the patch is for others too."""
        if not self.edit.until and self.edit.since <= self.patch.since:
            return ""
        since = ".".join(map(str, max(self.edit.since, self.patch.since)))
        if self.edit.until:
            return f"{since} to {'.'.join(map(str, self.edit.until))}"
        return f"{since} and newer"


class Placing:
    """Where changes go: files of the overlay, and hunks of the topics."""

    def __init__(self) -> None:
        self.known = list(hunks())
        self.files: dict[str, bytes] = {}
        self.changed: dict[Hunk, Hunk] = {}
        self.faults: list[str] = []  # what cannot be placed
        self.notes: list[str] = []  # what is to be looked at

    def place(self, path: str, before: bytes, after: bytes, wanted: list[Span]) -> None:
        """What was changed in one file of upstream's, which holds these edits."""
        old, new = before.decode().split("\n"), after.decode().split("\n")
        # From the end, so that the lines before a piece keep their numbers.
        for start, stop, low, high in reversed(list(pieces(old, new, wanted))):
            where = f"{path}:{low + 1}"
            within = [span for span in wanted if span.holds(start, stop)]
            if len(within) == 1:
                self.put(where, within[0], start, stop, new[low:high])
            else:
                names = " and ".join(span.patch.name for span in within)
                said = f"edits of {names}" if names else "no edit"
                self.faults.append(f"{where}: within {said}")

    def put(
        self, where: str, span: Span, start: int, stop: int, lines: list[str]
    ) -> None:
        """``lines`` for those from ``start`` to ``stop``, in the edit's source."""
        sources = [hunk for hunk in self.known if hunk.edit == span.edit]
        if not sources:
            said = f"{span.patch.name} does not have this edit as a diff"
            self.faults.append(f"{where}: {said}")
        for hunk in sources:
            if any("\\" in line or hunk.quotes in line for line in lines):
                said = f"{hunk.path} would have to escape this"
                self.faults.append(f"{where}: {said}")
            now = self.changed.get(hunk, hunk)
            at = start - span.first, stop - span.first
            self.changed[hunk] = now.changed(*at, lines)
        if span.releases:
            said = f"{span.patch.name} has an edit of {span.edit.path} that was changed"
            others = "look at those for other releases"
            self.notes.append(f"{said} for {span.releases} alone; {others}")


def pieces(
    old: list[str], new: list[str], spans: list[Span]
) -> Iterator[tuple[int, int, int, int]]:
    """What differs, as lines of the old and of the new text."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, start, stop, low, high in matcher.get_opcodes():
        if kind == "equal":
            continue
        if stop - start == high - low and not any(s.holds(start, stop) for s in spans):
            # As many lines as before may be of edits side by side.
            for at in range(stop - start):
                yield start + at, start + at + 1, low + at, low + at + 1
        else:
            yield start, stop, low, high


def placed(
    target: Target,
    journal: Journal,
    applied: Survey,
    written: dict[str, bytes],
    current: dict[str, Optional[bytes]],
) -> tuple[dict[str, bytes], list[str]]:
    """The repository's files with the changes, and what to look at; or Conflict."""
    placing = Placing()
    placing.faults += strangers(target, journal)
    ours = {path for patch in SERIES for path in patch.files}
    for path, before in written.items():
        after = current.get(path, before)
        if after is None:
            placing.faults.append(f"{path}: deleted; take it out of its topic")
        elif after != before and path in ours:
            placing.files[str((OVERLAY / path).relative_to(REPOSITORY))] = after
        elif after != before:
            text = before.decode()
            wanted = []
            for step in applied.patches:
                edits_here = (
                    step.patch.edits_for(applied.release) if step.changes else []
                )
                for edit in (edit for edit in edits_here if edit.path == path):
                    first = text.count("\n", 0, text.index(edit.replacement))
                    last = first + edit.replacement.count("\n")
                    wanted.append(Span(first, last, step.patch, edit))
            placing.place(path, before, after, wanted)
    if placing.faults:
        listed = "".join(f"\n    {fault}" for fault in placing.faults)
        raise Conflict(f"cannot be placed, so nothing was written:{listed}")
    return {**placing.files, **rewritten(placing.changed)}, placing.notes


def strangers(target: Target, journal: Journal) -> Iterator[str]:
    """What is new in the set's folders, or was changed in files that are not the set's."""
    new = {
        str(place.relative_to(target.root))
        for folder in journal.folders
        if folder.startswith("torch/")
        for place in (target.root / folder).rglob("*.py")
    }
    for path in sorted(new - journal.files.keys()):
        yield f"{path}: a new file; name it in a topic, and put it into the overlay"
    if target.git_dir is not None:
        names = git(target, "diff", "--name-only", "HEAD", "--", "torch", "test")
        for path in names.decode().splitlines():
            if path not in journal.files:
                yield f"{path}: no topic edits this file; make it an edit of one"


# ------------------------------------------------------------------- proof


def check_result(
    folder: Path,
    clean: Path,
    new: dict[str, bytes],
    current: dict[str, Optional[bytes]],
) -> None:
    """Conflict where the set with ``new`` makes anything else of the clean tree."""
    project = folder / "project"
    for part in PARTS:
        shutil.copytree(
            REPOSITORY / part,
            project / part,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for path, content in new.items():
        (project / path).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "patchset.apply", str(clean)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(project / "scripts")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3):
        raise Conflict(
            f"the set with these changes does not apply, so nothing was written: "
            f"{done.stdout.strip()}"
        )
    target = find(str(clean))
    for path, wanted in current.items():
        found = target.read(path)
        if found != wanted:
            number = first_difference(found or b"", wanted or b"")
            raise Conflict(
                f"{path}:{number}: the set with these changes would give another line, "
                "so nothing was written; change the topic by hand"
            )


def first_difference(one: bytes, other: bytes) -> int:
    lines = (io.BytesIO(content).readlines() for content in (one, other))
    pairs = enumerate(zip(*lines), 1)
    return next((n for n, (a, b) in pairs if a != b), 1 + one.count(b"\n"))
