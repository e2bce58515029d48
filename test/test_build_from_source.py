"""scripts/build_from_source.sh, but for the hours: what it refuses."""

import subprocess

from patchset.patch import REPOSITORY


SCRIPT = REPOSITORY / "scripts" / "build_from_source.sh"


def test_options_stay_those_of_the_first_time(checkout):
    root = checkout("2.13.0")
    for name in ("CMakeLists.txt", "setup.py"):
        (root / name).touch()
    state = root / "build" / "from-source"
    state.mkdir(parents=True)
    (state / "options").write_text("\n")
    command = [SCRIPT, "--minimal", root]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "was begun without --minimal; go on with that" in done.stderr
