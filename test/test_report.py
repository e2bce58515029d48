"""The README's tables are those of the stored results, and a difference is seen."""

import json

import pytest
import report


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """README and results in a place of their own, for a test to change."""
    (tmp_path / "README.md").write_text(report.README.read_text())
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    return tmp_path


def test_readme_is_current():
    assert report.main(["--check"]) == 0


def test_check_sees_another_result(copy, monkeypatch, capsys):
    for place in report.RESULTS.glob("*.json"):
        (copy / place.name).write_text(place.read_text())
    data = json.loads((copy / "quickstart.json").read_text())
    data["rows"][0]["measured"]["saved_bytes"] += 1024
    (copy / "quickstart.json").write_text(json.dumps(data))
    monkeypatch.setattr(report, "RESULTS", copy)
    before = report.README.read_text()
    assert report.main(["--check"]) == 1
    assert "are not those of results/" in capsys.readouterr().out
    assert report.README.read_text() == before
    assert report.main([]) == 0
    assert report.README.read_text() != before
    assert report.main(["--check"]) == 0
