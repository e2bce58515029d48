"""Debian's source package of PyTorch: fetched, unpacked, and ready to build in a chroot.

It has the tests and the C++ that no wheel has, and comes by way of the machine's own
apt mirror. What Debian took out of ``third_party/`` its other packages bring, so it
wants to be built on Debian of that suite.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from patchset.files import locked

from .releases import TREES, Unavailable


CACHE = TREES.parent / "debian"
SUITE = "trixie"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# What torch and its tests import, beyond what Debian builds the package with.
IMPORTED = (
    "filelock fsspec hypothesis jinja2 networkx pytest scipy sympy typing-extensions"
)


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    """The command's output; Unavailable with the end of what it said if it fails."""
    if shutil.which(command[0]) is None:
        raise Unavailable(f"no {command[0]} on this machine")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        words = " ".join(map(str, command[:1] + command[-3:]))
        said = (done.stderr or done.stdout).strip()[-500:]
        raise Unavailable(f"`{words}` gave {done.returncode}: {said}")
    return done.stdout


def _mirror() -> str:
    listed = _run("apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)")
    for line in listed.splitlines():
        uri = line.rpartition(" ")[2]
        if uri.rstrip("/").endswith("/debian"):
            return uri
    raise Unavailable("apt knows no Debian mirror; run apt-get update")


def package() -> Path:
    """The package's .dsc, its archives beside it; fetched where it is missing."""
    found = list(CACHE.glob("pytorch_*.dsc"))
    if found:
        return found[0]
    entry = f"deb-src [signed-by={KEYRING}] {_mirror()} {SUITE} main\n"
    shutil.rmtree(CACHE, ignore_errors=True)
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (CACHE / folder).mkdir(parents=True)
    (CACHE / "sources.list").write_text(entry)
    options = [
        f"Dir::Etc::sourcelist={CACHE}/sources.list",
        "Dir::Etc::sourceparts=/dev/null",
        f"Dir::State={CACHE}/state",
        f"Dir::Cache={CACHE}/cache",
        "APT::Sandbox::User=root",
    ]
    apt = ["apt-get", *(word for option in options for word in ("-o", option))]
    _run(*apt, "update", cwd=CACHE)
    _run(*apt, "source", "--download-only", "pytorch", cwd=CACHE)
    return next(CACHE.glob("pytorch_*.dsc"))


def tree() -> Path:
    """Upstream's part of the package, unpacked once."""
    place = CACHE / "pytorch"
    TREES.mkdir(parents=True, exist_ok=True)
    with locked(TREES.parent):
        if not place.is_dir():
            archive = next(package().parent.glob("pytorch_*.orig.tar.xz"))
            shutil.rmtree(CACHE / "unpacking", ignore_errors=True)
            with tarfile.open(archive) as source:
                source.extractall(CACHE / "unpacking", filter="data")
            next((CACHE / "unpacking").iterdir()).rename(place)
    return place


def chroot(root: Path) -> Path:
    """A Debian in ``root`` with the package, patched by Debian, in /src/pytorch of it.

    Needs root and debootstrap, and 3 GB. What is there already is kept.
    """
    place = root / "src" / "pytorch"
    if place.is_dir():
        return place
    if os.geteuid():
        raise Unavailable("a chroot can be made by root only")
    mirror = _mirror()
    complete = root / ".debootstrapped"
    if not complete.exists():
        print(f"debootstrap {SUITE} ...", flush=True)
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        options = ("--variant=minbase", f"--keyring={KEYRING}")
        _run("debootstrap", *options, SUITE, root, mirror)
        complete.touch()
    print("the package, and what it is built with ...", flush=True)
    (root / "src").mkdir(exist_ok=True)
    with locked(TREES.parent):
        description = package()
        for archive in CACHE.glob("pytorch_*"):
            shutil.copy(archive, root / "src")
    apt = ("chroot", root, "apt-get", "--yes", "--no-install-recommends")
    _run("chroot", root, "dpkg", "--configure", "-a")  # For what a kill left half done.
    _run(*apt, "update")
    _run(*apt, "build-dep", f"/src/{description.name}")
    modules = (f"python3-{name}" for name in (*IMPORTED.split(), "venv"))
    _run(*apt, "install", "libopenblas0-pthread", *modules)
    fresh = place.with_name("unpacking")
    shutil.rmtree(fresh, ignore_errors=True)
    inside = f"/src/{fresh.name}"
    _run("chroot", root, "dpkg-source", "-x", f"/src/{description.name}", inside)
    # As debian/rules does: the code is of another version of FlatBuffers.
    code = "torch/csrc/jit/serialization"
    _run(
        *("chroot", root, "flatc", "--cpp", "--gen-mutable", "--scoped-enums"),
        *("-o", f"{inside}/{code}", f"{inside}/{code}/mobile_bytecode.fbs"),
    )
    # Debian moves the libraries into /usr/lib. Here they stay beside the package, where
    # upstream's look for each other.
    settings = fresh / "cmake" / "Dependencies.cmake"
    origin = '(CMAKE_INSTALL_RPATH "${_rpath_portable_origin}")'
    text = settings.read_text().replace('(CMAKE_INSTALL_RPATH "")', origin)
    if origin not in text:
        raise Unavailable(f"{settings} sets no CMAKE_INSTALL_RPATH as expected")
    settings.write_text(text)
    fresh.rename(place)
    return place


if __name__ == "__main__":
    try:
        chroot(Path(sys.argv[1]))
    except Unavailable as reason:
        sys.exit(f"error: {reason}")
