"""Do the tests see it when a module is wrong? Seeded mutants, one at a time.

    scripts/run_patched.sh python test/mutate.py MODULE [TEST ...]

MODULE is a file of torch_overlay/torch or of scripts/. An overlay module's own test (as
its topic names it) is run first, then the TESTs given, files of test/; each mutant lies
in a copy of the patched checkout, or of this project. A mutant that every test lets pass
has survived: it is printed with its place and its change.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from patchset.files import clone, replace_file
from patchset.patch import OVERLAY, REPOSITORY
from patchset.series import SERIES
from rich.console import Console
from rich.progress import track


SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)


def replacements(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every node that can be mutated, with the text that takes its place."""
    for node in ast.iter_child_nodes(tree):
        # Before Python 3.12, what is inside an f-string has no place of its own.
        if not isinstance(node, ast.JoinedStr):
            yield from replacements(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = SWAPPED[type(node.ops[0])]()
            changed = ast.Compare(node.left, [operator], node.comparators)
            yield node, f"({ast.unparse(changed)})"
        elif isinstance(node, ast.BoolOp):
            changed = ast.BoolOp(SWAPPED[type(node.op)](), node.values)
            yield node, f"({ast.unparse(changed)})"
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield node, str(node.value + 1)
        elif isinstance(node, DROPPED) and not isinstance(node.value, ast.Constant):
            yield node, "pass"


def mutants(source: str) -> list[tuple[int, str]]:
    """Line and whole text of every mutant that differs and compiles."""
    # The syntax tree counts columns in bytes.
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    raw, found = b"".join(lines), []
    for node, text in replacements(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        changed = (raw[:start] + text.encode() + raw[end:]).decode()
        with contextlib.suppress(SyntaxError):
            compile(changed, "mutant", "exec")
            found.append((node.lineno, changed))
    return found


def stage(module: Path, folder: Path) -> tuple[Path, list[list[str]], dict[str, str]]:
    """A copy to mutate: the module in it, what runs its own tests, the environment."""
    environment = {**os.environ, "CI": "", "OMP_NUM_THREADS": "1"}
    checkout = Path(torch.__file__).parents[1]
    if not module.is_relative_to(OVERLAY):
        root = folder / "project"
        root.mkdir()
        for path in ("scripts", "test", "torch_overlay", "patches", "results"):
            shutil.copytree(REPOSITORY / path, root / path)
        for path in ("pyproject.toml", "README.md", "build", ".venv"):
            (root / path).symlink_to(REPOSITORY / path)
        environment["PYTHONPATH"] = str(checkout)
        return root / module.relative_to(REPOSITORY), [], environment
    path = str(module.relative_to(OVERLAY))
    place = clone(checkout, folder / "pytorch") / path
    environment["PYTHONPATH"] = str(folder / "pytorch")
    tested = dict.fromkeys(p.tested for p in SERIES if path in p.files)
    own = [[*shlex.split(words)[1:]] for words in tested]
    return place, [[str(OVERLAY / test), *rest] for test, *rest in own], environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="*", metavar="TEST")
    parser.add_argument("--count", type=int, default=20, help="mutants (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allow", type=int, default=0, help="survivors that may be")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the outcome")
    options = parser.parse_args()
    module, console = options.module.resolve(), Console(soft_wrap=True)
    source = module.read_text()
    possible = mutants(source)
    chosen = random.Random(options.seed).sample(
        possible, min(options.count, len(possible))
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place, commands, environment = stage(module, Path(folder))
        root = REPOSITORY if module.is_relative_to(OVERLAY) else Path(folder, "project")
        if options.tests:
            commands.append(["-m", "pytest", "-x", "-q", "-n", "0", *options.tests])
        if not commands:
            parser.error(f"{options.module}: no topic has a test for it; name a TEST")

        def passes(limit: float | None = None) -> bool:
            with tempfile.TemporaryDirectory() as cache:
                environment["TORCHINDUCTOR_CACHE_DIR"] = cache
                return all(
                    subprocess.run(
                        [sys.executable, *command],
                        cwd=root,
                        env=environment,
                        capture_output=True,
                        timeout=limit,
                    ).returncode == 0
                    for command in commands
                )  # fmt: skip

        began = time.monotonic()
        if not passes():
            parser.error("the tests fail without any mutant")
        limit = 30 + 3 * (time.monotonic() - began)
        for line, changed in track(chosen, module.name, console=console):
            replace_file(place, changed.encode())
            try:
                survived = passes(limit)
            except subprocess.TimeoutExpired:
                survived = False
            lines = source.splitlines(), changed.splitlines()
            diff = [*difflib.unified_diff(*lines, lineterm="", n=0)][3:]
            rows.append({"line": line, "survived": survived, "diff": diff})
            if survived:
                console.print(f"survived {options.module}:{line}", *diff, sep="\n")
    survivors = sum(row["survived"] for row in rows)
    console.print(f"{len(rows)} of {len(possible)} mutants, {survivors} survived")
    if options.json:
        outcome = {"module": str(options.module), "seed": options.seed, "mutants": rows}
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return int(survivors > options.allow)


if __name__ == "__main__":
    sys.exit(main())
