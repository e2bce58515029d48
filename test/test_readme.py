"""What the README and a guide show: programs run and print it, the table is right."""

import re
import sys

import pytest
from conftest import called
from patchset.patch import minor, RELEASES, REPOSITORY
from patchset.series import SERIES


README = (REPOSITORY / "README.md").read_text()
PATCHES = {patch.name: patch for patch in SERIES}
# The last patch that each line of the table needs.
FEATURES = {
    "right gradients": "random-ops",
    "saved bytes": "memory-budget",
    "saves and why": "saved-report",
    "frozen layers": "frozen-layers",
    'target `"peak"`': "peak-budget",
    "are replaced": "compiled-peak",
    "StepBudget": "step-budget",
}


def block(page, marker):
    """The fenced block after a marker."""
    return re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)```", page, re.S)[1]


def printed(folder, program):
    script = folder / "train.py"
    script.write_text(program)
    # Plain loops compile fastest.
    run = (
        "import runpy, torch._inductor.config as config; config.cpp.simdlen = 1; "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = called(sys.executable, "-P", "-c", run)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_program_runs_within_its_bound(tmp_path):
    program = block(README, "program")
    assert len([line for line in program.splitlines() if line.strip()]) <= 13
    said = printed(tmp_path, program)
    assert re.search(r"^budget: +0\.2", said, re.M)
    assert re.search(r"^peak: ", said, re.M)


def test_guide_shows_what_its_example_prints(tmp_path):
    page = (REPOSITORY / "docs/report.md").read_text()
    said = printed(tmp_path, block(page, r"train\.py"))
    assert said == block(page, r"printed by train\.py")


def lines():
    table = README[README.index("## What works on which release") :]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    return rows[: next(i for i, row in enumerate(rows) if row[0] == "question")]


@pytest.mark.parametrize("feature", FEATURES)
def test_releases_have_what_the_table_says(feature):
    heading, _, *rows = lines()
    (row,) = [row for row in rows if feature in row[0]]
    fits = {
        ".".join(map(str, minor(release))): PATCHES[FEATURES[feature]].fits(release)
        for release in RELEASES[1:]
    }
    assert dict(zip(heading[1:], row[1:])) == {
        release: "yes" if is_there else "-" for release, is_there in fits.items()
    }


def test_readme_is_short():
    assert len(README.splitlines()) <= 120
