"""Pages are short, the index has them all, links lead somewhere, quotes are the code's."""

import ast
import re
from pathlib import Path

import pytest


REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = sorted(REPOSITORY.glob("docs/*.md"))
PLACES = ("*.md", "docs/*.md", "patches/*.md", "results/*.md")
PAGES = sorted(page for place in PLACES for page in REPOSITORY.glob(place))
# The proposal is sent as one text.
MOST_WORDS = {"rfc.md": 950}
TROUBLE = ("symptoms", "warnings", "out_of_memory", "ignored", "differs", "install")
SOURCES = ("torch_overlay/torch/**/*.py", "scripts/patchset/*.py")
# Three words or more: names, commands and code have fewer, or other characters.
QUOTED = re.compile(r"`([a-z][a-z', :-]+ [a-z']+ [a-z', :-]+)`")
# Generated tables, code, and where links lead.
NOT_READ = r"(?ms)<!-- report: .*?report end -->|^ *```.*?^ *```|\]\([^)]*\)|<[^>]*>"


def anchors(page):
    """Those of the headings, as GitHub makes them, and those that are written out."""
    text = page.read_text().lower()
    slugs = [re.sub(r"[^\w -]", "", each) for each in re.findall("(?m)^#+ (.*)$", text)]
    return [slug.replace(" ", "-") for slug in slugs] + re.findall(
        '<a id="(.+?)"', text
    )


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_page_is_short_and_in_the_index(page):
    words = re.findall(r"\S*\w\S*", re.sub(NOT_READ, "", page.read_text()))
    assert len(words) <= MOST_WORDS.get(page.name, 600)
    assert (
        f"({page.name})" in (REPOSITORY / "docs/README.md").read_text() + "(README.md)"
    )


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_links_lead_somewhere(page):
    text = re.sub("`[^`]*`", "", page.read_text())
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / path if path else page
        assert target.exists(), f"there is no {path}"
        assert not anchor or anchor in anchors(target), f"{path} has no #{anchor}"


def strings():
    """Every string of the sources; of one with values in it, the parts between."""
    for pattern in SOURCES:
        for module in REPOSITORY.glob(pattern):
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_quoted_messages_exist():
    pages = [(REPOSITORY / f"docs/{page}.md").read_text() for page in TROUBLE]
    quoted = {text for page in pages for text in QUOTED.findall(" ".join(page.split()))}
    known = [*strings()]
    assert len(quoted) > 20
    assert [each for each in quoted if not any(each in text for text in known)] == []
