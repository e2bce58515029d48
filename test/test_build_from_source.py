"""scripts/build_from_source.sh, but for the hours: what it refuses."""

import os
import subprocess

from patchset.patch import REPOSITORY


SCRIPT = REPOSITORY / "scripts" / "build_from_source.sh"


def run(*words, expect):
    done = subprocess.run(
        [SCRIPT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


def test_help_and_bad_calls(tmp_path):
    assert run("--help", expect=0).startswith("usage: scripts/build_from_source.sh")
    said = run(tmp_path, expect=2)
    assert f"'{tmp_path}' is no source tree of PyTorch: it has no CMakeLists" in said
    assert "no source tree" in run(expect=2)
    assert "no option --fast" in run("--fast", tmp_path, expect=2)
    assert "--jobs needs a value" in run("--jobs", expect=2)
    assert "give one CHECKOUT" in run(tmp_path, "another", expect=2)
    assert not os.listdir(tmp_path)


def test_options_stay_those_of_the_first_time(checkout):
    root = checkout("2.13.0")
    for name in ("CMakeLists.txt", "setup.py"):
        (root / name).touch()
    state = root / "build" / "from-source"
    state.mkdir(parents=True)
    (state / "options").write_text("--minimal \n")
    said = run("--distributed", "--minimal", root, expect=2)
    assert "was begun with '--minimal'; go on with that" in said
