"""Do the tests see it when a module is wrong? Seeded mutants, one at a time.

    scripts/run_patched.sh python scripts/mutate.py MODULE [TEST ...]

MODULE is a file of torch_overlay/torch or of scripts/. An overlay module's own tests (as
its topics name them) are run first, then the TESTs given, files of test/; each mutant
lies in a copy of the patched checkout, or of this project. One that they let pass has
survived: exit status 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from patchset.files import clone, replace_file
from patchset.patch import OVERLAY, REPOSITORY
from patchset.series import SERIES
from rich.console import Console
from rich.progress import track


SWAPPED: dict[Any, Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)


def replacements(tree: ast.AST) -> Iterator[tuple[Any, str]]:
    """Every node that can be mutated, with the text that takes its place."""
    for node in ast.iter_child_nodes(tree):
        # Before Python 3.12, what is inside an f-string has no place of its own.
        if not isinstance(node, ast.JoinedStr):
            yield from replacements(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            swapped = [SWAPPED[type(node.ops[0])]()]
            compare = ast.Compare(node.left, swapped, node.comparators)
            yield node, f"({ast.unparse(compare)})"
        elif isinstance(node, ast.BoolOp):
            other = ast.BoolOp(SWAPPED[type(node.op)](), node.values)
            yield node, f"({ast.unparse(other)})"
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield node, str(node.value + 1)
        elif isinstance(node, DROPPED) and not isinstance(node.value, ast.Constant):
            yield node, "pass"


def mutants(source: str) -> list[tuple[int, str]]:
    """Line and whole text of every mutant that compiles."""
    raw, found = source.encode(), []  # The syntax tree counts columns in bytes.
    lines = raw.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    for node, text in replacements(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        changed = (raw[:start] + text.encode() + raw[end:]).decode()
        with contextlib.suppress(SyntaxError):
            compile(changed, "mutant", "exec")
            found.append((node.lineno, changed))
    return found


def stage(module: Path, folder: Path) -> tuple[Path, Path, list[list[str]]]:
    """Where to mutate, where to run the tests, and those that the topics name."""
    # Bytecode is told apart by second and size, and mutants may have both in common.
    os.environ.update(CI="", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    if not module.is_relative_to(OVERLAY):
        for path in ("scripts", "test", "torch_overlay", "patches", "results"):
            shutil.copytree(REPOSITORY / path, folder / path)
        for path in ("pyproject.toml", "README.md", "build", ".venv"):
            (folder / path).symlink_to(REPOSITORY / path)
        return folder / module.relative_to(REPOSITORY), folder, []
    path = str(module.relative_to(OVERLAY))
    root = clone(Path(torch.__file__).parents[1], folder / "pytorch", [path])
    os.environ["PYTHONPATH"] = str(root)
    own = [[str(root / p.test)] for p in SERIES if path in p.files]
    return root / path, REPOSITORY, own


def passes(commands: list[list[str]], root: Path, limit: int) -> bool:
    """Whether every command succeeds, each within ``limit`` seconds (0: any time)."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        return not any(
            subprocess.run(
                ["timeout", str(limit), sys.executable, *command],
                cwd=root,
                capture_output=True,
                check=False,
            ).returncode
            for command in commands
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="*", metavar="TEST")
    parser.add_argument("--count", type=int, default=20, help="mutants (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    module, console = options.module.resolve(), Console(soft_wrap=True)
    source = module.read_text()
    possible = mutants(source)
    chosen = random.Random(options.seed).sample(
        possible, min(options.count, len(possible))
    )
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        place, root, commands = stage(module, Path(folder))
        if options.tests:
            commands.append(["-m", "pytest", "-x", "-q", "-n", "0", *options.tests])
        if not commands:
            parser.error(f"{options.module}: no topic has a test for it; name a TEST")
        began = time.monotonic()
        if not passes(commands, root, 0):
            parser.error("the tests fail without any mutant")
        limit = 30 + 3 * int(time.monotonic() - began)
        for line, changed in track(chosen, module.name, console=console):
            replace_file(place, changed.encode())
            if passes(commands, root, limit):
                survivors += 1
                lines = source.splitlines(), changed.splitlines()
                diff = [*difflib.unified_diff(*lines, lineterm="", n=0)][3:]
                console.print(f"survived {options.module}:{line}", *diff, sep="\n")
    console.print(f"{len(chosen)} of {len(possible)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
