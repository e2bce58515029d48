"""The supported releases' Python trees, taken from their wheels."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Optional

from .patch import RELEASES, REPOSITORY


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


def tree(release: str, python: str = sys.executable) -> Path:
    """The folder with the release's Python files, fetched where it is missing.

    Needs a Python with pip and an index that has the wheel; RuntimeError says so.
    """
    place = TREES / release
    if place.is_dir():
        return place
    TREES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TREES) as folder:
        done = subprocess.run(
            [python, "-m", "pip", "download", "--quiet", *DOWNLOAD]
            + ["--dest", folder, f"torch=={release}"],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(Path(folder).glob("torch-*.whl"))
        if done.returncode or len(wheels) != 1:
            raise RuntimeError(
                f"no wheel of torch {release} to be had (pip exit {done.returncode}): "
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
    return place


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description="Fetches the Python trees of the supported releases to "
        f"{TREES.relative_to(REPOSITORY)}/ (about 900 MB of wheels, one at a time)."
    )
    parser.add_argument("release", nargs="*", default=RELEASES, help="default: all")
    for release in parser.parse_args(arguments).release:
        print(f"torch {release}: {tree(release)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
