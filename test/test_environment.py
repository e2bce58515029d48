"""What the scripts set up: pip's calls on a machine with a cap, and the checkout."""

import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import called
from patchset.patch import KNAPSACK, REPOSITORY
from patchset.series import SERIES
from upkeep import releases


CAPPED = "this_is_capped"


def made_up_wheel(folder, name, version, tag):
    """The least that pip takes for a wheel."""
    metadata = f"{name}-{version}.dist-info"
    texts = {
        f"{name}/__init__.py": f"__version__ = '{version}'\n",
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\n"
        f"Version: {version}\n",
        f"{metadata}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        for path, text in texts.items():
            wheel.writestr(path, text)
        record = "".join(f"{path},,\n" for path in [*texts, f"{metadata}/RECORD"])
        wheel.writestr(f"{metadata}/RECORD", record)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A pip configuration: where wheels come from, and a cap on their versions."""
    (tmp_path / "constraints.txt").write_text(f"{CAPPED}<2\ntorch<2\n")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nno-index = true\nfind-links = {tmp_path}\n"
        + f"[install]\nconstraint = {tmp_path / 'constraints.txt'}\n"
        + f"[download]\nconstraint = {tmp_path / 'constraints.txt'}\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return tmp_path


def installing(machine, words):
    """environment.sh's status and words of an install into a folder."""
    script = f"set -e; source scripts/environment.sh; PYTHON=$1; {words}"
    script = f"{script} --target {machine / 'there'}"
    done = called("bash", "-c", script, "bash", sys.executable, cwd=REPOSITORY)
    return done.returncode, done.stdout + done.stderr


def test_environment_is_free_of_constraints_but_not_of_the_index(machine):
    """The plain pip fails, so this test can; and pip speaks only where it fails."""
    made_up_wheel(machine, CAPPED, "2.0", "py3-none-any")
    code, _ = installing(machine, f'"$PYTHON" -m pip install --quiet {CAPPED}==2.0')
    assert code == 1 and not (machine / "there" / CAPPED).exists()
    install = f"quiet unconstrained_pip install {CAPPED}"
    assert installing(machine, f"{install}==2.0") == (0, "")
    assert (machine / "there" / CAPPED).is_dir()
    code, said = installing(machine, f"{install}==3.0")
    assert code == 1 and f"No matching distribution found for {CAPPED}==3.0" in said


def test_commands_that_start_together_set_up_once(tmp_path):
    wanted = 'echo "torch==$TORCH_VERSION $(cksum <requirements.txt)"'
    words = f"""
source scripts/environment.sh
VENV=$1/venv
{{ flock 9; sleep 2; mkdir "$VENV"; {wanted} >"$VENV/.complete"; }} 9>"$VENV.lock" &
until [ -e "$VENV.lock" ]; do sleep 0.1; done
ensure_environment
wait
"""
    done = called("bash", "-c", words, "bash", str(tmp_path), cwd=REPOSITORY)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert [each.name for each in (tmp_path / "venv").iterdir()] == [".complete"]


def test_tree_is_free_of_constraints_but_not_of_the_index(machine, monkeypatch):
    monkeypatch.setattr(releases, "TREES", machine / "trees")
    made_up_wheel(machine, "torch", "2.99.0", "cp312-cp312-macosx_14_0_arm64")
    assert (releases.tree("2.99.0") / "torch/__init__.py").is_file()
    # The machine's index has no other.
    with pytest.raises(releases.Unavailable, match=r"torch 2\.98\.0 could not"):
        releases.tree("2.98.0")


CHECKOUT = Path(torch.__file__).parents[1]
OVERLAY = REPOSITORY / "torch_overlay"


def test_tests_run_by_the_checkouts_torch():
    assert CHECKOUT.is_relative_to(REPOSITORY / "build")
    for path in {KNAPSACK, *(path for patch in SERIES for path in patch.files)}:
        assert (CHECKOUT / path).read_bytes() == (OVERLAY / path).read_bytes(), path


def test_the_torch_that_is_installed_needs_no_environment(monkeypatch):
    monkeypatch.setenv("TORCH_VERSION", "installed")
    monkeypatch.setenv("APPLY_PYTHON", sys.executable)
    words = "source scripts/environment.sh; ensure_environment; echo $PYTHON $CHECKOUT"
    done = called("bash", "-ec", words, cwd=REPOSITORY)
    checkout = REPOSITORY / "build" / "pytorch-installed"
    assert (done.stderr, done.stdout.split()) == ("", [sys.executable, str(checkout)])
