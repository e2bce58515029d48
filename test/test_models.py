"""Models of the Hugging Face libraries, trained by its Trainer within budgets."""

import pytest
from benchmarks import check_models
from benchmarks.check_models import DYNAMIC, fault, page, WAYS, WHOLE
from benchmarks.pages import environment


@pytest.mark.parametrize(
    ("model", "way"), [("hf-bert", WHOLE), ("hf-llama", DYNAMIC)], ids=str
)
def test_gradients_and_bytes(alone, model, way):
    row = check_models.measure({"model": model, "way": way})
    for target in ("saved", "peak"):
        cell = row[target]
        assert fault(row, target) == "", cell
        # Or there would be nothing to see.
        assert cell["measured"] < cell["budget 1"]


def test_what_is_wrong_is_shown():
    cell = {"allowed": 100, "measured": 100, "same gradients": True, "budget 1": 200}
    ways = iter(WAYS)

    def row(**cells):
        return {"model": "hf-t5", "way": next(ways), **cells}

    rows = [
        row(saved=cell, peak={**cell, "measured": 101}),
        row(saved={**cell, "same gradients": False}, peak=cell),
        row(error="took more than 1 s"),
    ]
    shown = page({"environment": environment(), "measured": rows})
    (line,) = (line for line in shown.splitlines() if "hf-t5" in line)
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [
        "1.000 / **1.010, over**",
        "**1.000, other gradients** / 1.000",
        "**took more than 1 s**",
    ]
