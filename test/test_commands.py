"""Every command answers --help and wrong options at once, and sets nothing up for it."""

import re
import shutil

import pytest
from conftest import called
from patchset.patch import RELEASES, REPOSITORY


# environment.sh is no command, and what_fits.sh has tests of its own.
NONE = ("environment.sh", "what_fits.sh")
SCRIPTS = (place.name for place in (REPOSITORY / "scripts").glob("*.sh"))
COMMANDS = sorted({*SCRIPTS} - {*NONE})


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A clone in which nothing is set up."""
    root = tmp_path_factory.mktemp("clone")
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "scripts", root / "scripts", ignore=without)
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    for name in ("torch_overlay", "patches", "requirements.txt"):
        (root / name).symlink_to(REPOSITORY / name)
    return root


def answer(root, command, *words):
    done = called(root / "scripts" / command, *words, timeout=60)
    assert not (root / ".venv").exists() and not (root / "build").exists()
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_given_at_once(fresh, command):
    done = answer(fresh, command, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: ")
    assert command in done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("apply_patch.sh --chek /tmp", "--chek"),
        ("apply_patch.sh", "no TARGET"),
        ("apply_patch.sh /no/such", "/no/such"),
        ("build_from_source.sh --quick", "--quick"),
        ("build_from_source.sh", "no CMakeLists.txt"),
        ("build_from_source.sh /no/such", "/no/such"),
        ("export_pr.sh", "CHECKOUT"),
        ("export_pr.sh no-topic /tmp", "no-topic"),
        ("export_pr.sh /tmp", "name a TOPIC, --all or --status"),
        ("export_pr.sh --all cache-key /tmp", "name a TOPIC, or --all"),
        ("export_pr.sh --all --status /tmp", "--status"),
        ("export_pr.sh --status --force /tmp", "nothing to force"),
        ("generate_patches.sh --chek", "--chek"),
        ("generate_patches.sh 2.13.0", "2.13.0"),
        ("link_build.sh", "usage"),
        ("link_build.sh --nope /tmp", "--nope"),
        ("link_build.sh /no/such", "/no/such"),
        ("quickstart.sh --nope", "--nope"),
        ("quickstart.sh --torch newest", "newest"),
        ("quickstart.sh --json /no/such/file", "/no/such"),
        ("refresh.sh", "VERSION"),
        ("refresh.sh newest", "newest"),
        ("refresh.sh --all 2.13.0", "--all"),
        ("refresh.sh 2.15.0 --from /tmp", "name one VERSION, --all or --from"),
        ("refresh.sh --check 2.15.0", "--check goes with --all"),
        ("report.sh --nope", "--nope"),
        ("report.sh README.md", "README.md"),
        ("report.sh --check now", "--check now"),
        ("run_patched.sh", "usage"),
        ("run_patched.sh --torch 2.15.0 python", "--torch"),
        ("run_tests.sh --torch", "no version of torch"),
        ("run_tests.sh --torch newest", "newest"),
    ],
)
def test_a_wrong_call_is_refused_at_once(fresh, call, said):
    done = answer(fresh, *call.split())
    assert done.returncode == 2
    assert said in done.stderr


def test_options_of_a_build_stay_those_of_the_first_time(checkout):
    root = checkout("2.13.0")
    for name in ("CMakeLists.txt", "setup.py"):
        (root / name).touch()
    state = root / "build" / "from-source"
    state.mkdir(parents=True)
    (state / "options").write_text("\n")
    done = called(REPOSITORY / "scripts/build_from_source.sh", "--minimal", root)
    assert done.returncode == 2
    assert "was begun without --minimal; go on with that" in done.stderr


def test_version_is_of_the_set_and_its_content(fresh):
    first = answer(fresh, "apply_patch.sh", "--version")
    assert first.returncode == 0
    version = re.search(
        r'^version = "(.+)"', (fresh / "pyproject.toml").read_text(), re.M
    )
    assert first.stdout.splitlines()[0].endswith(f" {version[1]}")
    assert all(release in first.stdout for release in RELEASES)
    (fresh / "torch_overlay").unlink()
    shutil.copytree(REPOSITORY / "torch_overlay", fresh / "torch_overlay")
    assert answer(fresh, "apply_patch.sh", "--version").stdout == first.stdout
    next((fresh / "torch_overlay").rglob("*.py")).write_text("")
    assert answer(fresh, "apply_patch.sh", "--version").stdout != first.stdout
