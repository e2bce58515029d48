"""One linter of .lintrunner.toml on some files; prints what lintrunner reads.

    PYTHONPATH=scripts python -m upkeep.lint CODE [--tool COMMAND | --pattern REGEX] [PATH | @LIST] ...

``--tool`` runs a command of the environment that this runs in. A file with a match of
``--pattern`` is wrong. Where neither is given, upstream's linters run.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Optional

from .upstream_checks import new_findings


# How ruff, mypy, codespell and shellcheck put it.
FINDING = re.compile(r"^([^:\n]+):(\d+):(?:\d+:)? ?(.+)$", re.MULTILINE)


# Path, line and words. Without a path, the linter could not do its work.
Finding = tuple[Optional[str], Optional[int], str]


def run(tool: str, paths: list[str]) -> list[Finding]:
    name, *rest = shlex.split(tool)
    command = [str(Path(sys.executable).with_name(name)), *rest, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    matches = FINDING.findall(done.stdout)
    if done.returncode and not matches:
        return [(None, None, done.stdout + done.stderr)]
    return [(path, int(line), words) for path, line, words in matches]


def search(pattern: str, words: str, paths: list[str]) -> list[Finding]:
    found: list[Finding] = []
    for path in paths:
        # Not as text, which would hide a carriage return.
        text = Path(path).read_bytes().decode()
        for match in re.finditer(pattern, text, re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            found.append((path, line, words))
    return found


def upstream(paths: list[str]) -> list[Finding]:
    """usort, ruff and its format by upstream's settings."""
    files = {os.path.relpath(path): Path(path).read_text() for path in paths}
    found = (finding.partition(": ") for finding in new_findings({}, files))
    return [(path, None, words) for path, _, words in found]


def main() -> int:
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("code", metavar="CODE")
    parser.add_argument("paths", metavar="PATH", nargs="*")
    parser.add_argument("--tool", metavar="COMMAND")
    parser.add_argument("--pattern", metavar="REGEX")
    parser.add_argument("--words", help="for what is wrong")
    options = parser.parse_intermixed_args()
    if options.tool:
        found = run(options.tool, options.paths)
    elif options.pattern:
        found = search(options.pattern, options.words, options.paths)
    else:
        found = upstream(options.paths)
    unused = dict.fromkeys(("char", "original", "replacement"))
    for path, line, words in found:
        name = {"path": path, "line": line, "code": options.code, "name": options.code}
        print(json.dumps({**name, **unused, "severity": "error", "description": words}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
