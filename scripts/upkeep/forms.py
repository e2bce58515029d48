"""The command behind ``scripts/benchmark.sh forms``: what each pull request changes.

A module of ``benchmarks/forms/`` measures a few models by whatever torch runs it. Here
that is the newest release's, as it came out and with the pull request's branch.
"""

import argparse
import ast
import difflib
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Optional

from patchset.files import replace_file
from patchset.images import APPLIES, FAULTY, survey
from patchset.meaning import meaning
from patchset.patch import RELEASES, REPOSITORY
from patchset.series import exported, FORMS, stack
from patchset.target import Conflict, find
from patchset.transaction import Change

from .refresh import clone, digest_of, environment, lay
from .releases import tree
from .upstream_checks import run_test


RESULTS = REPOSITORY / "results" / "forms.json"
SCRIPTS = REPOSITORY / "scripts"
MODULES = SCRIPTS / "benchmarks" / "forms"
# Modules that start processes, read options or write pages: no figure is theirs.
PRESENTING = ("fresh", "options", "pages")
EPILOG = """\
What was measured on the very same files is not measured again, so that a call that was
stopped goes on where it was. exit codes: 0 measured, or all as it was; 1 a form could
not be measured, or with --check is not as stored; 2 bad call, or the release cannot be
had
"""

# What is stored of a form: what is measured, on which release, the lines that it adds,
# and by model before and after; a digest of the files that decide it.
Entry = dict[str, Any]


def topics() -> list[str]:
    """Those that have a module, by name."""
    stems = sorted(place.stem for place in MODULES.glob("*.py"))
    return [stem.replace("_", "-") for stem in stems if stem != "__init__"]


def module(topic: str) -> str:
    return topic.replace("-", "_")


def stored() -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    if RESULTS.is_file():
        entries = json.loads(RESULTS.read_text())
    return entries


def store(entries: dict[str, Entry]) -> None:
    kept = {topic: entries[topic] for topic in topics() if topic in entries}
    text = json.dumps(kept, indent=1)
    replace_file(RESULTS, f"{text}\n".encode())


def digest(topic: str, release: str) -> str:
    """Of what the branch changes there, and of the modules that decide what is measured."""
    root = find(str(tree(release)))
    series = stack(FORMS[exported(topic)])
    steps = survey(root, series=series, release=release).patches
    if steps[-1].state not in (APPLIES, FAULTY):
        raise Conflict(f"{steps[-1].state} on torch {release} ({steps[-1].detail})")
    # Without its test, as a wheel's tree has none.
    own = digest_of(change for step in steps for change in step.changes)
    deciding = "".join(meaning(place.read_text()) for place in measuring(topic))
    return hashlib.sha256(f"{own}\0{deciding}".encode()).hexdigest()[:16]


def measuring(topic: str) -> list[Path]:
    """The topic's module, and those of ``benchmarks`` behind it that decide figures."""
    found: set[Path] = set()
    pending = [MODULES / f"{module(topic)}.py"]
    while pending:
        place = pending.pop()
        if place in found or place.stem in PRESENTING or not place.is_file():
            continue
        found.add(place)
        for node in ast.walk(ast.parse(place.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.module.partition(".")[0] == "benchmarks":
                imported = (f"{node.module}.{name.name}" for name in node.names)
                names = (node.module, *imported)
                pending += (SCRIPTS / f"{name.replace('.', '/')}.py" for name in names)
    return sorted(found)


def table(entry: Entry) -> str:
    """What is stored of a form, in Markdown: a column for each figure of a model."""
    found = by_model(entry)
    figures = [*next(iter(found.values()))]
    lines = [("model", *(figure or "measured" for figure in figures))]
    lines.append(("---", *["---:"] * len(figures)))
    lines += ((model, *map(change, of.values())) for model, of in found.items())
    if len(figures) > 1:
        columns = zip(*(of.values() for of in found.values()))
        lines.append(("after / before: geometric mean, most", *map(compared, columns)))
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    what = entry["what"][0].upper() + entry["what"][1:]
    return f"{what}, before → after, on torch {entry['torch']}:\n\n{rows}"


def by_model(entry: Entry) -> dict[str, dict[str, Sequence[float]]]:
    """The figures of each model, before and after, by what they are."""
    found: dict[str, dict[str, Sequence[float]]] = {}
    for name, both in entry.get("models", {}).items():
        model, _, figure = name.partition(": ")
        found.setdefault(model, {})[figure] = both
    return found


def change(both: Iterable[float]) -> str:
    """What is before and after, or one of them where they do not differ."""
    return " → ".join(dict.fromkeys(map(number, both)))


def compared(column: Sequence[Sequence[float]]) -> str:
    """The geometric mean of what is after / before, and the most.

    Nothing for counts, some of which are 0.
    """
    if not all(map(all, column)):
        return ""
    ratios = [after / before for before, after in column]
    return f"{statistics.geometric_mean(ratios):.3f}, {max(ratios):.3f}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def run(topic: str, checkout: Path, python: str) -> Entry:
    """What the topic's module finds by that checkout's torch."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "row.json"
        task = json.dumps({"form": module(topic)})
        # -P: the checkout may have a folder named benchmarks.
        words = ["-P", "-m", "benchmarks.fresh", "benchmarks.form", task, str(place)]
        done = run_test(words, checkout, python, path=[SCRIPTS])
        row: Entry = json.loads(place.read_text()) if place.is_file() else {}
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise Conflict(row.get("error", f"ended with status {done.returncode}"))
    return row


def measure(
    topic: str, checkout: Path, release: str, python: str, untouched: dict[str, Entry]
) -> Entry:
    """The topic's entry; ``checkout`` is the untouched release, and left alone.

    Several modules may measure the same: ``untouched`` has what they found there.
    """
    asks = meaning((MODULES / f"{module(topic)}.py").read_text())
    if asks not in untouched:
        untouched[asks] = run(topic, checkout, python)
    before = untouched[asks]
    with clone(checkout) as root:
        series = stack(FORMS[exported(topic)])
        *below, own = survey(find(str(root)), series=series, release=release).patches
        lay(root, (change for step in (*below, own) for change in step.changes))
        after = run(topic, root, python)
    models = {name: [value] for name, value in before["models"].items()}
    if models.keys() != after["models"].keys():
        raise Conflict("before and after are of different models")
    for name, value in after["models"].items():
        models[name].append(value)
    what = {"what": before["what"], "torch": release, "lines": added(own.changes)}
    return {**what, "models": models}


def added(changes: Sequence[Change]) -> int:
    """How many lines they add, those of tests aside."""
    count = 0
    for change in changes:
        if not change.path.startswith("test/"):
            texts = (text or b"" for text in (change.before, change.after))
            old, new = (text.decode().splitlines() for text in texts)
            # Its first lines are the headings.
            diff = [*difflib.unified_diff(old, new)][2:]
            count += sum(line.startswith("+") for line in diff)
    return count


def measure_all(wanted: Sequence[str], release: str, again: bool, check: bool) -> int:
    """Measure what is not as stored, and store each at once."""
    entries = stored()
    pending, failed = {}, []
    for topic in wanted:
        try:
            key = digest(topic, release)
        except Conflict as error:
            print(f"{topic}: {error}", file=sys.stderr)
            failed.append(topic)
            continue
        if again or entries.get(topic, {}).get("tree") != key:
            pending[topic] = key
        else:
            print(f"{topic}: as stored")
    if check:
        for topic in pending:
            print(f"{topic}: not measured on its files: scripts/benchmark.sh forms")
        return int(bool(pending or failed))
    if pending:
        with environment(release) as (python, checkout):
            untouched: dict[str, Entry] = {}
            for at, (topic, key) in enumerate(pending.items(), 1):
                print(f"{topic} ({at} of {len(pending)}) ...", flush=True)
                try:
                    entry = measure(topic, checkout, release, python, untouched)
                except Conflict as error:
                    print(f"{topic}: {error}", file=sys.stderr)
                    failed.append(topic)
                    continue
                entries[topic] = {**entry, "tree": key}
                store(entries)
                print(table(entry))
    if failed:
        print(f"could not be measured: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark.sh forms",
        description="Measures what each pull request changes, on the newest release as "
        "it came out and with the pull request's branch, and stores it in "
        "results/forms.json, from where it gets into the pull request's text.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--form",
        nargs="+",
        metavar="NAME",
        choices=topics(),
        help=f"these alone, of {', '.join(topics())}",
    )
    parser.add_argument("--again", action="store_true", help="what is stored as well")
    parser.add_argument(
        "--check",
        action="store_true",
        help="measure nothing: say what is not stored, or of files that have changed",
    )
    options = parser.parse_args(arguments)
    wanted = options.form or topics()
    try:
        return measure_all(wanted, RELEASES[-1], options.again, options.check)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
