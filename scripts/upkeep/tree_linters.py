"""The linters that a PyTorch tree lists in its own .lintrunner.toml, run by lintrunner.

What pip installs for them goes into an environment of their own; with an index on the
machine this needs no network. Linters that fetch something else may not be had: the
report says which, and why.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, Optional

from patchset.patch import REPOSITORY

from .releases import UNCONSTRAINED


CONFIG = ".lintrunner.toml"
ENVIRONMENT = REPOSITORY / "build" / "linters"


class Report(NamedTuple):
    """``new`` findings of the linters that ``ran``, and why those ``missing`` did not."""

    new: list[str]
    ran: list[str]
    missing: dict[str, str]


def lint(tree: Path, paths: Sequence[str], built: bool) -> Report:
    """What linters find in ``paths`` at the tree's HEAD, but not at its parent.

    ``built`` is whether the tree can be imported, without which mypy knows few types.
    HEAD has to be detached, and is when this returns.
    """
    variables = _environment()
    missing = {}
    chosen = []
    for linter in _relevant(tree, paths):
        reason = _unavailable(linter, tree, built, variables)
        if reason is None:
            chosen.append(linter["code"])
        else:
            missing[linter["code"]] = reason
    found: Counter[tuple[str, str]] = Counter()
    for code, path, words in _findings(tree, chosen, paths, variables):
        if path is None:
            # lintrunner shows both streams, an exception's last line on the first.
            missing[code] = _last_line(words.partition("STDOUT:")[0])
        else:
            found[path, words] += 1
    if found:
        _run(["git", "checkout", "--quiet", "HEAD^"], tree, variables)
        there = [path for path in paths if (tree / path).is_file()]
        before = _findings(tree, chosen, there, variables)
        found -= Counter((path, words) for _, path, words in before if path)
        _run(["git", "checkout", "--quiet", "-"], tree, variables)
    new = [f"{path}: {words}" for path, words in found.elements()]
    return Report(new, [code for code in chosen if code not in missing], missing)


def _relevant(tree: Path, paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The linters that may look at one of the paths; lintrunner knows what they exclude."""
    import tomllib

    for linter in tomllib.loads((tree / CONFIG).read_text())["linter"]:
        patterns = linter["include_patterns"]
        if any(fnmatch(path, pattern) for path in paths for pattern in patterns):
            yield linter


def _environment() -> dict[str, str]:
    """The variables of an environment for what linters install."""
    programs = ENVIRONMENT / "bin"
    if not (programs / "pip").exists():
        venv.create(ENVIRONMENT, with_pip=True)
    places = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    own = {"VIRTUAL_ENV": str(ENVIRONMENT), "PATH": os.pathsep.join(places)}
    return {**os.environ, **UNCONSTRAINED, **own}


def _unavailable(
    linter: dict[str, Any], tree: Path, built: bool, variables: dict[str, str]
) -> Optional[str]:
    """Why the linter cannot be had, once what it needs was asked for."""
    settings = re.search(r"--config=(mypy\S*)", " ".join(linter["command"]))
    if settings and not built:
        return "needs a build of the tree"
    setup = [word.replace("{{DRYRUN}}", "0") for word in linter.get("init_command", ())]
    if setup:
        done = _run(setup, tree, variables)
        if done.returncode:
            return _last_line(done.stdout + done.stderr)
    if settings:
        # Upstream's adapter takes a mypy that cannot start for one that finds nothing.
        started = ["python3", "-m", "mypy", f"--config-file={settings[1]}", "-c", ""]
        done = _run(started, tree, variables)
        if done.returncode:
            return _last_line(done.stdout + done.stderr)
    return None


def _findings(
    tree: Path, codes: Sequence[str], paths: Sequence[str], variables: dict[str, str]
) -> Iterator[tuple[str, Optional[str], str]]:
    """Code, path and words; no path where the linter failed."""
    if not codes or not paths:
        return
    data = f"--data-path={ENVIRONMENT / 'lintrunner'}"
    command = ["lintrunner", data, f"--take={','.join(codes)}", "--output=json", *paths]
    done = _run(command, tree, variables)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode and not found:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
    for each in found:
        path = each["path"] and os.path.relpath(tree / each["path"], tree)
        words = f"{each['code']} {each['name']}: {each['description'] or ''}"
        yield each["code"], path, " ".join(words.split()) if path else words


def _run(
    command: Sequence[str], tree: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=tree, env=variables, capture_output=True, text=True, check=False
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it says nothing"])[-1].strip()
