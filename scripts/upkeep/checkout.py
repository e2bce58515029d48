#!/usr/bin/env python3
"""Run a PyTorch checkout's Python tree on an installed wheel's binaries.

A full build of PyTorch takes hours, yet everything this project changes is
Python. Two commands make a tree that runs without compiling:

``assemble``  builds a checkout from the torch of the Python that runs this: its
              Python tree is copied, so that it can be patched, and its binaries
              are linked in, so that it can be run.
``link``      does the second half for a checkout the user already has, and
              ``link --remove`` takes it back, byte for byte.

Both read the wheel's RECORD and nothing else: whatever pip did not install is
never copied or linked. The installation itself is only ever read.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath

from patchset.files import locked, replace_file
from patchset.target import git_dir, import_fault, run_python


# What a build of PyTorch puts into torch/. A checkout has none of it under
# version control, so `assemble` links it even where it is text.
BUILD_OUTPUT = ("torch/bin/", "torch/include/", "torch/lib/", "torch/share/")
PYTHON = (".py", ".pyi")
# Above this a file that is not Python is data that nobody patches.
LARGEST_TEXT = 1 << 20

MANIFEST = ".linked_from_wheel.json"

EPILOG = """\
exit status:
  0  done, or already in the wanted state
  2  bad call, or refused: the message says what is in the way and what to do
"""


class Refusal(Exception):
    """The request cannot be met as things stand; the user's files are as they were."""


# ---------------------------------------------------------------- the wheel


@dataclass(frozen=True)
class Recorded:
    """One line of a RECORD: urlsafe base64 of the sha256, and the size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Wheel:
    """The torch distribution installed for one Python."""

    python: str
    version: str
    root: Path
    files: dict[str, Recorded]

    @property
    def release(self) -> str:
        """The version without its local part: 2.13.0 of 2.13.0+cpu."""
        return self.version.partition("+")[0]

    def digest(self) -> str:
        """Identify the installed contents, wherever they are installed."""
        lines = (f"{path} {entry.sha256}\n" for path, entry in self.files.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def reinstall(self) -> str:
        return (
            f"Reinstall it: {self.python} -m pip install --force-reinstall --no-deps "
            f"torch=={self.release}"
        )


PROBE = """
import importlib.metadata, json
try:
    torch = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    print("null")
else:
    root, record = str(torch.locate_file("")), torch.read_text("RECORD")
    print(json.dumps([torch.version, root, record]))
"""


def installed_wheel(python: str) -> Wheel:
    """Ask ``python`` for its torch and parse the RECORD that pip wrote."""
    try:
        answer = json.loads(run_python(python, PROBE))
    except (OSError, RuntimeError) as error:
        raise Refusal(f"cannot run {python}: {error}") from error
    if answer is None:
        raise Refusal(
            f"{python} has no torch installed.\n"
            f"Install one first, say: {python} -m pip install torch==2.13.0"
        )
    version, root, record = answer
    files = {}
    for path, algorithm_and_hash, size in csv.reader((record or "").splitlines()):
        top = PurePosixPath(path).parts[0]
        if top in ("..", "/") or top.endswith(".dist-info") or path.endswith(".pyc"):
            continue
        sha256 = algorithm_and_hash.removeprefix("sha256=")
        files[path] = Recorded(sha256, int(size or 0))
    if "torch/__init__.py" not in files:
        raise Refusal(
            f"torch {version} in {root} was not installed from a wheel: no RECORD "
            "names its files.\n"
            "Give --python a virtual environment where pip or uv installed torch."
        )
    return Wheel(python, version, Path(root).resolve(), dict(sorted(files.items())))


def is_source(path: str, entry: Recorded) -> bool:
    """Whether somebody may want to edit the file, by its place, name and size."""
    if path.startswith(BUILD_OUTPUT) or path.endswith((".so", ".pyd")):
        return False
    return path.endswith(PYTHON) or entry.size <= LARGEST_TEXT


def is_altered(wheel: Wheel, path: str) -> bool:
    """Whether the file is not what pip put there.

    Sources are hashed; of a file to link only the size is compared, since hashing
    some gigabytes of libraries would take longer than all the rest.
    """
    installed, entry = wheel.root / path, wheel.files[path]
    if not installed.is_file() or installed.stat().st_size != entry.size:
        return True
    if not is_source(path, entry):
        return False
    digest = hashlib.sha256(installed.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != entry.sha256


# -------------------------------------------------------------------- links


@dataclass
class Manifest:
    """What `link` put into a checkout: enough to take exactly that out again.

    It is written before the first link, so that a killed run can be finished
    by the next `link` and undone by the next `link --remove`.
    """

    version: str
    root: str
    digest: str
    directories: list[str]
    links: list[str]

    @staticmethod
    def place(checkout: Path) -> Path:
        """In git's own folder where there is one, so that git never shows it."""
        beside = checkout / MANIFEST
        return beside if beside.exists() else (git_dir(checkout) or checkout) / MANIFEST

    @staticmethod
    def read(checkout: Path) -> Manifest | None:
        path = Manifest.place(checkout)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return Manifest(**{f.name: stored[f.name] for f in fields(Manifest)})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise Refusal(
                f"{path} is damaged ({error}); restore or delete it"
            ) from None


def plan_links(checkout: Path, wheel: Wheel) -> tuple[list[str], list[str]]:
    """Folders to make and paths to link, so that no recorded file is lacking.

    A folder that the checkout lacks is linked whole, with two exceptions: one that
    holds Python files, since Python would write its bytecode and a patch tool its
    files through the link into the installation; and one right in torch/, which
    upstream's .gitignore names with a slash at the end, so that links are no match.
    Such a folder is made here and filled with links.
    """
    made = {
        parent
        for path in wheel.files
        for parent in PurePosixPath(path).parents
        if path.endswith(PYTHON) or len(parent.parts) < 3
    }
    directories: dict[str, None] = {}
    links: dict[str, None] = {}

    for path in wheel.files:
        for parent in list(reversed(PurePosixPath(path).parents))[1:]:
            place = checkout / parent
            if str(parent) in links or place.is_symlink():
                # What lies behind the user's own link is not the checkout's.
                break
            if not place.exists():
                if parent not in made:
                    links[str(parent)] = None
                    break
                directories[str(parent)] = None
            elif not place.is_dir():
                raise Refusal(
                    f"{place} is a file; torch {wheel.version} has a folder there. "
                    "Move it away and run this again."
                )
        else:
            if not os.path.lexists(checkout / path):
                links[path] = None
    return list(directories), list(links)


def link(checkout: Path, wheel: Wheel) -> str:
    """Make ``checkout`` runnable with the wheel's binaries; say what was done."""
    check_link_target(checkout, wheel)
    for path in wheel.files:
        if not (wheel.root / path).exists():
            raise Refusal(
                f"{wheel.root / path} is in torch's RECORD but missing.\n"
                + wheel.reinstall()
            )
    before = Manifest.read(checkout)
    if before is not None:
        if (before.root, before.digest) == (str(wheel.root), wheel.digest()) and all(
            (checkout / path).exists() for path in wheel.files
        ):
            return f"{checkout} is already linked to torch {wheel.version}"
        remove_links(checkout, before)

    directories, links = plan_links(checkout, wheel)
    manifest = Manifest(
        wheel.version, str(wheel.root), wheel.digest(), directories, links
    )
    text = json.dumps(vars(manifest), indent=1) + "\n"
    replace_file(Manifest.place(checkout), text.encode())
    for path in directories:
        (checkout / path).mkdir()
    for path in links:
        os.symlink(wheel.root / path, checkout / path)
    return f"linked {len(links)} paths of torch {wheel.version} into {checkout}"


def check_link_target(checkout: Path, wheel: Wheel) -> None:
    """Refuse a tree that is no checkout, of another release, or built already."""
    version_file = checkout / "version.txt"
    if not (checkout / "torch" / "__init__.py").is_file() or not version_file.is_file():
        raise Refusal(
            f"{checkout} is not a PyTorch checkout: it needs version.txt and "
            "torch/__init__.py"
        )
    version = version_file.read_text(encoding="utf-8").strip()
    ours, theirs = (re.match(r"\d+\.\d+", v) for v in (version, wheel.version))
    if ours is None or theirs is None or ours[0] != theirs[0]:
        needed = f"torch=={ours[0]}.*" if ours else "the matching torch"
        raise Refusal(
            f"{checkout} is PyTorch {version} by its version.txt, but "
            f"{wheel.python} has torch {wheel.version}: their Python and binaries do "
            "not fit.\n"
            f"Install the matching one in a virtual environment (pip install "
            f"'{needed}') and give its Python with --python."
        )
    for built in (checkout / "torch").glob("_C.*"):
        if built.suffix in (".so", ".pyd") and not built.is_symlink():
            raise Refusal(
                f"{checkout} has binaries of its own ({built.name}): it runs as it is"
            )


def remove_links(checkout: Path, manifest: Manifest) -> list[str]:
    """Undo `link`; return paths that are no longer its links, and so were left."""
    left = []
    for path in manifest.links:
        place = checkout / path
        planned = os.path.join(manifest.root, path)
        if place.is_symlink() and os.readlink(place) == planned:
            place.unlink()
        elif os.path.lexists(place):
            left.append(path)
    for path in reversed(manifest.directories):
        # Running the checkout leaves bytecode beside the linked files.
        shutil.rmtree(checkout / path / "__pycache__", ignore_errors=True)
        with suppress(OSError):
            (checkout / path).rmdir()
        if (checkout / path).exists():
            left.append(path)
    Manifest.place(checkout).unlink(missing_ok=True)
    return sorted(left)


# ----------------------------------------------------------------- assemble


def assemble(wheel: Wheel, destination: Path) -> str:
    """Build ``destination`` from the wheel; say what was done.

    It is built beside its place and moved there when it is complete and has
    imported, so that whatever stands at ``destination`` is whole. A checkout that
    was assembled from this wheel is kept, patched or not; its links are repaired.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with locked(destination.parent):
        if destination.exists():
            before = Manifest.read(destination)
            if before is None or before.digest != wheel.digest():
                raise Refusal(
                    f"{destination} was not assembled from the torch {wheel.version} "
                    f"of {wheel.python}: delete it to have it built anew (edits are "
                    "lost), or give another destination"
                )
            link(destination, wheel)
            return f"{destination} is already assembled from torch {wheel.version}"
        altered = [path for path in wheel.files if is_altered(wheel, path)]
        if altered:
            raise Refusal(
                f"torch {wheel.version} in {wheel.root} is not as it was installed; "
                f"{len(altered)} files are gone or changed, such as "
                f"{', '.join(altered[:5])}.\n"
                "Undo what changed it, say a patch set that was applied to it. "
                + wheel.reinstall()
            )
        staging = destination.with_name(f".{destination.name}.incomplete")
        if staging.exists():
            shutil.rmtree(staging)
        sources = [path for path in wheel.files if is_source(path, wheel.files[path])]
        for path in sources:
            (staging / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(wheel.root / path, staging / path)
        (staging / "version.txt").write_text(wheel.release + "\n")
        link(staging, wheel)
        fault = import_fault(wheel.python, staging)
        if fault is not None:
            raise Refusal(
                f"torch {wheel.version} does not import from its assembled checkout "
                f"{staging}:\n{fault}"
            )
        os.replace(staging, destination)
    return (
        f"assembled {destination} from torch {wheel.version}: "
        f"{len(sources)} files copied, the binaries linked"
    )


# ---------------------------------------------------------------------- CLI


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    main_parser = argparse.ArgumentParser(
        description="Make PyTorch checkouts that run on an installed wheel's binaries.",
        epilog=EPILOG,
        formatter_class=formatter,
    )
    commands = main_parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "assemble",
        help="build a checkout from the installed torch: its Python tree copied, its "
        "binaries linked; one that was built from it before is kept, patches included",
    )
    one.add_argument("destination", type=Path, metavar="DESTINATION")
    two = commands.add_parser(
        "link",
        help="link every file of the installed torch that a checkout of one's own "
        "lacks into it, where upstream's .gitignore expects what a build makes",
    )
    two.add_argument(
        "--remove", action="store_true", help="take the links out again instead"
    )
    two.add_argument(
        "--python",
        default=sys.executable,
        metavar="PY",
        help="the Python whose torch is used (default: the one running this)",
    )
    two.add_argument("checkout", type=Path, metavar="CHECKOUT")
    return main_parser


def run(arguments: argparse.Namespace) -> str:
    if arguments.command == "assemble":
        return assemble(
            installed_wheel(sys.executable), arguments.destination.resolve()
        )

    checkout = arguments.checkout.resolve()
    if not checkout.is_dir():
        raise Refusal(f"{checkout} is not a folder")
    if not arguments.remove:
        return link(checkout, installed_wheel(arguments.python))
    manifest = Manifest.read(checkout)
    if manifest is None:
        return f"{checkout} has no links to remove"
    left = remove_links(checkout, manifest)
    note = "".join(f"\nleft, because it is no link of ours: {path}" for path in left)
    return f"removed the links of torch {manifest.version} from {checkout}{note}"


def main(arguments: list[str] | None = None) -> int:
    try:
        print(run(parser().parse_args(arguments)))
    except Refusal as refusal:
        print(f"checkout.py: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
