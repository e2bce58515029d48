"""The set on a real source tree with its tests: Debian's source package of 2.6.0."""

import shutil
import subprocess
import tarfile

import pytest
from conftest import contents, PATHS, snapshot
from patchset import apply
from patchset.files import clone, locked
from patchset.releases import TREES


CACHE = TREES.parent / "debian"
SUITE = "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def unpack(place):
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get on this machine")
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    mirrors = [line.split()[1] for line in targets if line.count(" ") == 1]
    mirrors = [m for m in mirrors if m.rstrip("/").endswith("/debian")]
    if not mirrors:
        pytest.skip("apt knows no Debian mirror; run apt-get update")
    shutil.rmtree(CACHE, ignore_errors=True)
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (CACHE / folder).mkdir(parents=True)
    (CACHE / "sources.list").write_text(
        f"deb-src [signed-by={KEYRING}] {mirrors[0]} {SUITE} main\n"
    )
    options = [
        f"Dir::Etc::sourcelist={CACHE}/sources.list",
        "Dir::Etc::sourceparts=/dev/null",
        f"Dir::State={CACHE}/state",
        f"Dir::Cache={CACHE}/cache",
        "APT::Sandbox::User=root",
    ]
    command = ["apt-get", *(word for o in options for word in ("-o", o))]
    for words in (["update"], ["source", "--download-only", "pytorch"]):
        done = subprocess.run(
            [*command, *words], cwd=CACHE, capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"apt-get {words[0]}: {done.stderr.strip()[-300:]}")
    archive = next(CACHE.glob("pytorch_*.orig.tar.xz"))
    with tarfile.open(archive) as source:
        source.extractall(CACHE / "unpacking", filter="data")
    next((CACHE / "unpacking").iterdir()).rename(place)


def test_source_tree(tmp_path, capsys):
    """Fetched by way of the machine's own apt mirror, and unpacked once."""
    TREES.mkdir(parents=True, exist_ok=True)
    source = CACHE / "pytorch"
    with locked(TREES.parent):
        if not source.is_dir():
            unpack(source)
    root = clone(source, tmp_path / "pytorch", PATHS)
    before = snapshot(root)
    assert "2.6.0" in (root / "version.txt").read_text()
    assert (root / "test/functorch/test_ac.py").is_file()

    assert apply.main(["--status", str(root)]) == 0
    assert "every file as released" in capsys.readouterr().out
    assert apply.main([str(root)]) == 0
    assert contents(root)["test/functorch/test_ac_knapsack_solvers.py"]
    assert apply.main(["--reverse", str(root)]) == 0
    assert snapshot(root) == before
