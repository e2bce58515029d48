"""The messages that docs/symptoms.md quotes are those of the code."""

import ast
import re
from pathlib import Path


REPOSITORY = Path(__file__).parents[1]
SOURCES = ("torch_overlay/torch/**/*.py", "scripts/patchset/*.py")
# Three words or more: names, commands and code have fewer, or other characters.
QUOTED = re.compile(r"`([a-z][a-z', :-]+ [a-z']+ [a-z', :-]+)`")


def strings():
    """Every string of the sources; of one with values in it, the parts between."""
    for pattern in SOURCES:
        for module in REPOSITORY.glob(pattern):
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_quoted_messages_exist():
    page = " ".join((REPOSITORY / "docs/symptoms.md").read_text().split())
    quoted, known = set(QUOTED.findall(page)), [*strings()]
    assert len(quoted) > 20
    assert [each for each in quoted if not any(each in text for text in known)] == []
