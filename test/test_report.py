"""Pages, guides and pictures are those of the stored results, and a difference is seen."""

import json
import shutil

import pytest
from benchmarks import report
from benchmarks.pages import found, LIMITS, Mark


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Guides and results in a place of their own, for a test to change."""
    guides = [tmp_path / guide.name for guide in report.GUIDES]
    for guide, copy in zip(report.GUIDES, guides):
        shutil.copy(guide, copy)
    shutil.copytree(report.RESULTS, tmp_path / "results")
    monkeypatch.setattr(report, "GUIDES", guides)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    # Links lead from there to the results, as they do from docs/.
    monkeypatch.setattr(report, "REPOSITORY", tmp_path.parent)
    return tmp_path


def blocks():
    """What guides have between the comments, by the name there."""
    return {
        match[2]: match[0]
        for guide in report.GUIDES
        for match in report.BLOCK.finditer(guide.read_text())
    }


def test_pages_are_current():
    assert report.main(["--check"]) == 0


def test_every_result_has_a_page_and_every_block_a_result():
    wanted = {*report.QUESTIONS, *(name for name, _ in report.TABLES.values())}
    assert {place.stem for place in report.RESULTS.glob("*.json")} <= wanted
    assert {place.stem for place in report.RESULTS.glob("*.md")} == {
        *report.QUESTIONS,
        "README",
    }
    assert blocks().keys() <= report.QUESTIONS.keys() | report.TABLES.keys()


def test_guides_have_few_rows_and_a_link():
    for name, text in blocks().items():
        # The proposal has all pull requests; two tables are no question's.
        if name not in ("forms", *report.TABLES):
            lines = text.splitlines()
            heads = sum(line.startswith("| ---") for line in lines)
            assert sum(line.startswith("| ") for line in lines) - 2 * heads <= 10
            assert f"results/{name}.md)" in text


def test_sets_of_nets_are_columns():
    named = ("Nets of the project: peak", "Held-out nets: peak", "of both")
    marks = [Mark(what, str(at), "", True) for at, what in enumerate(named)]
    assert found(marks[2:]) == "| what | found |\n| --- | --- |\n| of both | 2 |\n"
    assert found(marks).splitlines()[0::2] == [
        "| what | all | nets of the project | held-out nets |",
        "| peak |  | 0 | 1 |",
    ]


def test_check_sees_a_picture_a_page_and_a_result_that_changed(copies, capsys):
    places = {
        name: copies / "results" / name
        for name in ("operators.svg", "unasked.md", "unasked.json")
    }
    before = {name: place.read_text() for name, place in places.items()}
    places["operators.svg"].write_text("")
    places["unasked.md"].write_text(before["unasked.md"] + "more\n")
    assert report.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "results/operators.svg is not what" in printed
    assert "results/unasked.md is not what" in printed
    assert places["operators.svg"].read_text() == ""
    report.main([])
    assert {name: place.read_text() for name, place in places.items()} == before
    data = json.loads(before["unasked.json"])
    data["measured"][0]["installed"]["peak"] *= 3
    places["unasked.json"].write_text(json.dumps(data))
    assert report.main([]) == 0
    after = places["unasked.md"].read_text()
    assert f"## {LIMITS}" in after and f"## {LIMITS}" not in before["unasked.md"]
    assert f"{data['measured'][0]['net']} has a peak" in after


def test_what_nobody_ran_is_said_with_its_command(copies):
    for name in ("unasked", "gpu"):
        (copies / f"results/{name}.json").unlink(missing_ok=True)
    report.main([])
    texts = [(copies / f"results/{name}.md").read_text() for name in ("unasked", "gpu")]
    assert "as it is: `scripts/benchmark.sh all --only unasked` does it" in texts[0]
    assert "Nobody has run this yet: `scripts/benchmark.sh gpu" in texts[1]


def test_an_unknown_block_is_refused(copies):
    guide = report.GUIDES[0]
    guide.write_text("<!-- report: peaks -->\n<!-- report end -->\n")
    with pytest.raises(SystemExit, match="no report is named 'peaks'"):
        report.main([])
    assert "Nobody" not in guide.read_text()
