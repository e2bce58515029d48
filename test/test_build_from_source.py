"""scripts/build_from_source.sh, but for the hours: what it refuses, and going on."""

import fcntl
import os
import shutil
import signal
import subprocess
import time

import pytest
from patchset.patch import REPOSITORY


SCRIPT = REPOSITORY / "scripts" / "build_from_source.sh"
# Each "file" takes a while, and leaves a line; `install` is what the script builds.
NINJA = """
rule compile
  command = sleep 0.7 && echo $out >> ran && touch $out
build a.o: compile
build b.o: compile
build c.o: compile
build install: phony a.o b.o c.o
"""


def start(*words):
    return subprocess.Popen(
        [SCRIPT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*words, expect):
    process = start(*words)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == expect, said
    return said


def wait_for(place, text):
    while not place.exists() or text not in place.read_text():
        time.sleep(0.02)


@pytest.fixture
def begun(checkout):
    """A tree as if cmake had been run with --minimal, and what it made were short."""
    if shutil.which("ninja") is None or shutil.which("ionice") is None:
        pytest.skip("needs ninja and ionice")
    root = checkout("2.13.0")
    (root / "CMakeLists.txt").touch()
    (root / "setup.py").write_text("raise SystemExit('not to be installed')\n")
    state = root / "build" / "from-source"
    state.mkdir(parents=True)
    (root / "build" / "build.ninja").write_text(NINJA)
    (state / "options").write_text("--minimal \n")
    (state / "configured").touch()
    return root


def test_help_and_bad_calls(tmp_path):
    assert run("--help", expect=0).startswith("usage: scripts/build_from_source.sh")
    said = run(tmp_path, expect=2)
    assert f"'{tmp_path}' is no source tree of PyTorch: it has no CMakeLists" in said
    assert "no source tree" in run(expect=2)
    assert "no option --fast" in run("--fast", tmp_path, expect=2)
    assert "--jobs needs a value" in run("--jobs", expect=2)
    assert "give one CHECKOUT" in run(tmp_path, "another", expect=2)
    assert not os.listdir(tmp_path)


def test_options_stay_those_of_the_first_time(begun):
    said = run("--distributed", "--minimal", begun, expect=2)
    assert "was begun with '--minimal'; go on with that" in said
    assert not (begun / "build" / "ran").exists()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_stopped_is_gone_on_with(begun, end):
    """A kill leaves the compiler running, which has to end first."""
    ran, words = begun / "build" / "ran", ("--jobs", "1", begun)
    process = start(*words)
    wait_for(begun / "build" / ".ninja_log", "a.o")
    for _ in range(3):  # As timeout(1) does, and who is impatient.
        process.send_signal(end)
        time.sleep(0.01)
    process.wait(timeout=10)
    if end == signal.SIGKILL:
        assert "another run is building" in run(*words, expect=2)
        with open(begun / "build" / "from-source" / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
    else:
        time.sleep(1)
        assert ran.read_text() == "a.o\n"
    assert "not to be installed" in run(*words, expect=1)
    assert ran.read_text() == "a.o\nb.o\nc.o\n"
