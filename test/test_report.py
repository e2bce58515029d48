"""The tables on the pages are those of the stored results, and a difference is seen."""

import json
import shutil

import pytest
from benchmarks import report


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Pages and results in a place of their own, for a test to change."""
    pages = [tmp_path / page.name for page in report.PAGES]
    for page, copy in zip(report.PAGES, pages):
        shutil.copy(page, copy)
    shutil.copytree(report.RESULTS, tmp_path / "results")
    monkeypatch.setattr(report, "PAGES", pages)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return tmp_path


def test_pages_are_current():
    assert report.main(["--check"]) == 0


def test_every_result_is_shown():
    shown = {
        match[2]
        for page in report.PAGES
        for match in report.BLOCK.finditer(page.read_text())
    }
    assert shown > {*report.PARTS, *report.NOT_YET}
    stored = {place.stem for place in report.RESULTS.glob("*.json")}
    wanted = {report.PARTS.get(table, (table,))[0] for table in shown}
    assert stored - report.NOT_YET.keys() == wanted - report.NOT_YET.keys()


def test_check_sees_another_figure_and_another_result(copies, capsys):
    figure, result = copies / "results/peak.svg", copies / "results/compare.json"
    drawn, data = figure.read_text(), json.loads(result.read_text())
    figure.write_text(drawn.replace("</svg>", ""))
    data["measured"][0]["steps"][0]["peak"] += 10**6
    result.write_text(json.dumps(data))
    pages = [page.read_text() for page in report.PAGES]
    assert report.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "peak.svg is not what results/ gives" in printed
    assert "README.md is not what results/ gives" in printed
    assert [page.read_text() for page in report.PAGES] == pages
    assert report.main([]) == 0
    assert figure.read_text() == drawn
    assert [page.read_text() for page in report.PAGES] != pages
    assert report.main(["--check"]) == 0
