"""The messages that the pages on trouble quote are those of the code."""

import ast
import re
from pathlib import Path


REPOSITORY = Path(__file__).parents[1]
PAGES = ("symptoms", "warnings", "out_of_memory", "ignored", "differs", "install")
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
    pages = [(REPOSITORY / f"docs/{page}.md").read_text() for page in PAGES]
    quoted = {text for page in pages for text in QUOTED.findall(" ".join(page.split()))}
    known = [*strings()]
    assert len(quoted) > 20
    assert [each for each in quoted if not any(each in text for text in known)] == []
