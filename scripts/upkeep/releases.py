"""The supported releases' Python trees, taken from their wheels."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Optional

from patchset.files import locked
from patchset.patch import minor, RELEASES, REPOSITORY


TREES = REPOSITORY / "build" / "releases"

# The macOS wheels are the small ones (66 to 139 MB) and hold the same Python tree.
DOWNLOAD = (
    "--no-deps",
    "--only-binary=:all:",
    "--python-version=3.12",
    "--implementation=cp",
    "--platform=macosx_11_0_arm64",
    "--platform=macosx_14_0_arm64",
)
# A wheel that is only read need not suit the machine: see unconstrained_pip in
# scripts/environment.sh.
UNCONSTRAINED = {"PIP_CONSTRAINT": os.devnull, "PIP_BUILD_CONSTRAINT": os.devnull}


class Unavailable(RuntimeError):
    """The release's wheel cannot be had here; the message has pip's reason."""


def of_its_minor(version: str) -> Optional[str]:
    """The newest supported release of the version's minor one, such as 2.15 of 2.15.0a0."""
    with suppress(ValueError):
        here = minor(version)
        return max((r for r in RELEASES if minor(r) == here), default=None)
    return None


def tree(release: str) -> Path:
    """The folder with the release's Python files, fetched where it is missing."""
    place = TREES / release
    TREES.mkdir(parents=True, exist_ok=True)
    with locked(TREES):
        if not place.is_dir():
            _fetch(release, place)
    return place


def _fetch(release: str, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=TREES) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", *DOWNLOAD]
            + ["--dest", folder, f"torch=={release}"],
            env={**os.environ, **UNCONSTRAINED},
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(Path(folder).glob("torch-*.whl"))
        if done.returncode or len(wheels) != 1:
            raise Unavailable(
                f"torch {release} could not be had (pip exit {done.returncode}): "
                f"{done.stderr.strip()[-500:]}"
            )
        fresh = Path(folder) / "tree"
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [
                name
                for name in wheel.namelist()
                if name.startswith("torch")
                and name.endswith((".py", "METADATA", "RECORD"))
            ]
            wheel.extractall(fresh, names)
        shutil.move(fresh, place)
