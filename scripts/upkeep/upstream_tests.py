"""The command behind ``scripts/run_upstream_tests.sh``: upstream's own test files, run
without the set and with it.

TREE is a source tree of PyTorch, of a release that the set is for. Its test files are
run by that release's torch, as the wheel has it and with the set put onto it, and are
compared test by test. Those that ask for CUDA run on the CPU: in what is run, a device
"cuda" reads "cpu", and what skips them is gone. Tests that this makes fail without the
set fail on both sides, and say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional
from xml.etree import ElementTree

from patchset.files import clone, replace_file
from patchset.patch import RELEASES, REPOSITORY
from patchset.series import SERIES
from rich.console import Console
from rich.progress import Progress

from . import debian_source
from .refresh import environment, untouched
from .releases import Unavailable


FILES = (
    "test/dynamo/test_activation_checkpointing.py",
    "test/dynamo/test_aot_autograd_cache.py",
    "test/functorch/test_ac.py",
    "test/functorch/test_ac_knapsack.py",
    "test/functorch/test_aotdispatch.py",
    "test/functorch/test_memory_efficient_fusion.py",
)
# An operator each, by the thousand, none of which is partitioned by a budget.
LEFT_OUT = "not OpInfo and not ModuleInfo"
ON_CPU = (
    (r"skipUnless\((HAS_CUDA|torch\.cuda\.is_available\(\))", "skipUnless(True"),
    (r"skipIf\(\s*not (HAS_CUDA|torch\.cuda\.is_available\(\))", "skipIf(False"),
    (r"""(["'])cuda\1""", '"cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
)
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
EPILOG = """\
exit codes: 0 no test fails with the set only; 1 one does, or a file could not be run;
2 bad call, or the release's torch cannot be had
"""

Outcomes = dict[str, str]
console = Console()


def moved(tree: Path, folder: Path, files: Sequence[str]) -> Path:
    """The test files, which ask for the CPU, and links to what lies beside them."""
    for file in files:
        text = (tree / file).read_text()
        for pattern, words in ON_CPU:
            text = re.sub(pattern, words, text)
        place = folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        for other in (tree / file).parent.iterdir():
            link = place.parent / other.name
            if str(other.relative_to(tree)) not in files and not link.exists():
                link.symlink_to(other)
        place.write_text(text)
    return folder


def outcomes(python: str, checkout: Path, file: Path) -> Outcomes:
    """What each test of the file does by the checkout's torch; RuntimeError where pytest
    came to no end."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = f"-q -c {os.devnull} --noconftest -p no:cacheprovider --timeout 600"
        done = subprocess.run(
            [python, "-m", "pytest", *options.split(), f"--rootdir={file.parent}"]
            + ["-k", LEFT_OUT, f"--junitxml={report}", file.name],
            cwd=file.parent,
            env={
                **os.environ,
                "PYTHONPATH": str(checkout),
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled",
                "OMP_NUM_THREADS": "1",
                "CI": "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1) or not report.exists():
            last = done.stdout.strip().splitlines()[-1:]
            raise RuntimeError(f"pytest gave {done.returncode}: {' '.join(last)}")
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{c.get('classname')}.{c.get('name')}": outcome(c) for c in cases}


def outcome(case: ElementTree.Element) -> str:
    found = {child.tag for child in case}
    if found & {"failure", "error"}:
        return FAILED
    return SKIPPED if "skipped" in found else PASSED


def compared(before: Outcomes, after: Outcomes) -> dict[str, Any]:
    """Counts of the tests, and the names of those that only one side fails."""
    both = Counter(kind for test, kind in after.items() if before.get(test) == kind)
    return {
        "tests": len(before.keys() | after.keys()),
        **{kind: both[kind] for kind in (PASSED, FAILED, SKIPPED)},
        "only_with": worse(before, after),
        "only_without": worse(after, before),
    }


def worse(before: Outcomes, after: Outcomes) -> list[str]:
    """The tests that fail after only, or that passed and are not run any more."""
    return sorted(
        test
        for test in before.keys() | after.keys()
        if (after.get(test) == FAILED and before.get(test) != FAILED)
        or (before.get(test) == PASSED and after.get(test) != PASSED)
    )


def page(data: dict[str, Any]) -> str:
    heading = ["file", "tests", "pass", "fail on both sides", "skipped"]
    lines = []
    for file, row in data["files"].items():
        counts = [str(row[key]) for key in ("tests", PASSED, FAILED, SKIPPED)]
        only = [", ".join(row[k]) or "-" for k in ("only_with", "only_without")]
        lines.append([file.removeprefix("test/"), *counts, *only])
    heading += ["fail with the set only", "fail without it only"]
    table = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in table) + (
        f"\nRun on a CPU; torch {data['torch']}. What fails on both sides says nothing about "
        "the set.\n"
    )


def run(tree: Path, release: str, files: Sequence[str], folder: Path) -> dict[str, Any]:
    source = moved(tree, folder / "tests", files)
    found = {}
    with (
        environment(release) as python,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        released = untouched(release, python)
        paths = {path for patch in SERIES for path in patch.paths()}
        patched = clone(released, folder / "pytorch", paths)
        subprocess.run(
            [REPOSITORY / "scripts" / "apply_patch.sh", patched],
            env={**os.environ, "APPLY_PYTHON": python},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        bar = progress.add_task("", total=2 * len(files))
        for file in files:
            sides = []
            for side, checkout in (("without", released), ("with", patched)):
                progress.update(bar, description=f"{file} {side} the set")
                sides.append(outcomes(python, checkout, source / file))
                progress.advance(bar)
            found[file] = compared(*sides)
    return {"torch": release, "files": found}


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run_upstream_tests.sh",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tree", nargs="?", type=Path, metavar="TREE")
    parser.add_argument(
        "--debian", action="store_true", help="Debian's source package of 2.6.0 instead"
    )
    parser.add_argument(
        "--file",
        action="append",
        help=f"of TREE, once or more; else those that it has of {', '.join(FILES)}",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="store the counts here, beside those of other files of that release",
    )
    options = parser.parse_args(arguments)
    if options.debian == (options.tree is not None):
        parser.error("give a TREE, or --debian")
    try:
        tree = debian_source.tree() if options.debian else options.tree.resolve()
        release = (tree / "version.txt").read_text().strip().partition("a0")[0]
    except Unavailable as reason:
        parser.error(str(reason))
    except OSError as error:
        parser.error(f"this is no source tree of PyTorch: {error}")
    if release not in RELEASES:
        parser.error(f"{tree} is PyTorch {release}; known are {', '.join(RELEASES)}")
    files = options.file or [file for file in FILES if (tree / file).is_file()]
    missing = [file for file in files or FILES if not (tree / file).is_file()]
    if missing:
        parser.error(f"{tree} has no {missing[0]}")
    try:
        with tempfile.TemporaryDirectory(dir=REPOSITORY / "build") as folder:
            data = run(tree, release, files, Path(folder))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(page(data), soft_wrap=True)
    if options.json is not None:
        if options.json.exists():
            stored = json.loads(options.json.read_text())
            if stored["torch"] == release:
                data["files"] = {**stored["files"], **data["files"]}
        replace_file(options.json, (json.dumps(data, indent=1) + "\n").encode())
    return int(any(row["only_with"] for row in data["files"].values()))


if __name__ == "__main__":
    sys.exit(main())
