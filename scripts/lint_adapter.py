"""Runs one linter on the files that lintrunner names, in lintrunner's JSON lines.

``lint_adapter.py NAME @PATHSFILE``: NAME is one of ``LINTERS``. Every finding is
one JSON object on standard output; a linter that cannot run is a finding too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path


BIN = Path(sys.executable).parent
# Where a linter says path:line:column: text, or some of it.
FINDING = re.compile(
    r"^(?P<path>[^:\s][^:]*):(?P<line>\d+):(?:(?P<char>\d+):)?\s*(?P<text>.+)$"
)
LINTERS = {
    "ruff": ["ruff", "check", "--output-format=concise", "--quiet"],
    "format": ["ruff", "format", "--check", "--output-format=concise", "--quiet"],
    "mypy": ["mypy", "--no-error-summary", "--show-column-numbers"],
    "codespell": ["codespell"],
}


def findings(name: str, paths: list[str]) -> list[dict[str, object]]:
    tool, *options = LINTERS[name]
    done = subprocess.run(
        [BIN / tool, *options, *paths], capture_output=True, text=True, check=False
    )
    found: list[dict[str, object]] = []
    for text in done.stdout.splitlines():
        match = FINDING.match(text)
        if match:
            found.append(
                {
                    "path": match["path"],
                    "line": int(match["line"]),
                    "char": int(match["char"]) if match["char"] else None,
                    "code": name.upper(),
                    "severity": "error",
                    "name": name,
                    "description": match["text"],
                }
            )
    if done.returncode and not found:
        words = (done.stderr or done.stdout).strip() or f"exit {done.returncode}"
        found.append(
            {
                "path": None,
                "line": None,
                "char": None,
                "code": name.upper(),
                "severity": "error",
                "name": f"{name}-failed",
                "description": words,
            }
        )
    return found


if __name__ == "__main__":
    linter, pathsfile = sys.argv[1], sys.argv[2].removeprefix("@")
    for finding in findings(linter, Path(pathsfile).read_text().split()):
        print(json.dumps(finding | {"original": None, "replacement": None}))
