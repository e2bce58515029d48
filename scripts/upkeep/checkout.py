"""Run a PyTorch checkout's Python tree on an installed wheel's binaries.

A full build of PyTorch takes hours, yet everything this project changes is
Python. Two commands make a tree that runs without compiling, by the torch of the
Python that runs this:

``assemble``  builds a checkout: the wheel's Python tree is copied, so that it can be
              patched, and its binaries are linked in, so that it can be run.
``link``      does the second half for a checkout the user already has, and
              ``link --remove`` takes it back, byte for byte.

Both read the wheel's RECORD and nothing else: whatever pip did not install is
never copied or linked. The installation itself is only ever read.
"""

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path, PurePosixPath

from patchset.files import locked
from patchset.target import BadCall, exit_status, import_fault


# What a wheel of torch installs.
PACKAGES = ("torch", "torchgen", "functorch")
# What a build of PyTorch puts into torch/. A checkout has none of it under
# version control, so `assemble` links it even where it is text.
BUILD_OUTPUT = ("torch/bin/", "torch/include/", "torch/lib/", "torch/share/")
PYTHON = (".py", ".pyi")
# Above this a file that is not Python is data that nobody patches.
LARGEST_TEXT = 1 << 20

# Which wheel a checkout was assembled from.
MARKER = ".linked_from_wheel.json"

DESCRIPTION = """\
Links the binaries of the torch installed in the .venv into CHECKOUT, so that its Python
tree runs without compiling PyTorch; --remove takes the links out again. The .venv is
set up first where it is missing. CHECKOUT must be of the same major.minor release: for
another one than the default, set TORCH_VERSION, or TORCH_VERSION=installed for the torch
of APPLY_PYTHON or python3.

Run the checkout with PYTHONPATH=CHECKOUT in front; its scripts and tests would import
the installed torch otherwise.

  TORCH_VERSION=2.15.0 scripts/link_build.sh CHECKOUT
"""
EPILOG = """\
Exit status: 0 done or already in the wanted state; 2 bad call, or refused with the
reason.
"""


# ---------------------------------------------------------------- the wheel


@dataclass(frozen=True)
class Wheel:
    """The torch distribution installed for this Python.

    ``files`` maps a path to what its RECORD says: urlsafe base64 of the sha256, and the
    size in bytes.
    """

    version: str
    root: Path
    files: dict[str, tuple[str, int]]

    @property
    def release(self) -> str:
        """The version without its local part: 2.13.0 of 2.13.0+cpu."""
        return self.version.partition("+")[0]

    def digest(self) -> str:
        """Identify the installed contents, wherever they are installed."""
        lines = (f"{path} {sha256}\n" for path, (sha256, _) in self.files.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def installed_wheel() -> Wheel:
    """The torch of this Python, by the RECORD that pip wrote."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        raise BadCall(f"{sys.executable} has no torch installed") from None
    root, files = Path(str(torch.locate_file(""))).resolve(), {}
    record = torch.read_text("RECORD") or ""
    for path, algorithm_and_hash, size in csv.reader(record.splitlines()):
        if path.startswith(tuple(f"{p}/" for p in PACKAGES)) and path[-4:] != ".pyc":
            files[path] = algorithm_and_hash.removeprefix("sha256="), int(size or 0)
    if "torch/__init__.py" not in files:
        raise BadCall(
            f"torch {torch.version} in {root} was not installed from a wheel: "
            "no RECORD names its files"
        )
    return Wheel(torch.version, root, dict(sorted(files.items())))


def is_source(path: str, size: int) -> bool:
    """Whether somebody may want to edit the file, by its place, name and size."""
    if path.startswith(BUILD_OUTPUT) or path.endswith((".so", ".pyd")):
        return False
    return path.endswith(PYTHON) or size <= LARGEST_TEXT


def is_altered(wheel: Wheel, path: str) -> bool:
    """Whether the file is not what pip put there."""
    if not (wheel.root / path).is_file():
        return True
    digest = hashlib.sha256((wheel.root / path).read_bytes()).digest()
    found = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return found != wheel.files[path][0]


# -------------------------------------------------------------------- links


def links_of(checkout: Path) -> dict[Path, str]:
    """Each link to the same path in another folder, and that folder: what `link` made.

    No list is kept, so a killed call can be finished and undone.
    """
    found = {}
    for package in PACKAGES:
        for folder, folders, files in os.walk(checkout / package):
            for place in (Path(folder, name) for name in folders + files):
                inside = f"/{place.relative_to(checkout)}"
                if place.is_symlink() and os.readlink(place).endswith(inside):
                    found[place] = os.readlink(place)[: -len(inside)]
    return found


def plan_links(checkout: Path, wheel: Wheel) -> list[str]:
    """Paths to link, so that no recorded file is lacking.

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
    links: dict[str, None] = {}
    for path in wheel.files:
        for parent in list(reversed(PurePosixPath(path).parents))[1:]:
            place = checkout / parent
            if str(parent) in links or place.is_symlink():
                # What lies behind the user's own link is not the checkout's.
                break
            if not place.exists() and parent not in made:
                links[str(parent)] = None
                break
        else:
            if not os.path.lexists(checkout / path):
                links[path] = None
    return list(links)


def link(checkout: Path, wheel: Wheel) -> str:
    """Make ``checkout`` runnable with the wheel's binaries; say what was done."""
    check_link_target(checkout, wheel)
    if {*links_of(checkout).values()} == {str(wheel.root)} and all(
        (checkout / path).exists() for path in wheel.files
    ):
        return f"{checkout} is already linked to torch {wheel.version}"
    remove_links(checkout)
    links = plan_links(checkout, wheel)
    for path in links:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(wheel.root / path, checkout / path)
    return f"linked {len(links)} paths of torch {wheel.version} into {checkout}"


def check_link_target(checkout: Path, wheel: Wheel) -> None:
    """Refuse a tree that is no checkout, of another release, or built already."""
    version_file = checkout / "version.txt"
    if not (checkout / "torch" / "__init__.py").is_file() or not version_file.is_file():
        raise BadCall(
            f"{checkout} is not a PyTorch checkout: it needs version.txt and "
            "torch/__init__.py"
        )
    version = version_file.read_text(encoding="utf-8").strip()
    ours, theirs = (re.match(r"\d+\.\d+", v) for v in (version, wheel.version))
    if ours is None or theirs is None or ours[0] != theirs[0]:
        raise BadCall(
            f"{checkout} is PyTorch {version} by its version.txt, but "
            f"{sys.executable} has torch {wheel.version}: their Python and binaries do "
            "not fit.\nName the matching one in TORCH_VERSION, or its Python in "
            "APPLY_PYTHON with TORCH_VERSION=installed."
        )
    for built in (checkout / "torch").glob("_C.*"):
        if built.suffix in (".so", ".pyd") and not built.is_symlink():
            raise BadCall(
                f"{checkout} has binaries of its own ({built.name}): it runs as it is"
            )


def remove_links(checkout: Path) -> int:
    """Undo `link`; return how many links there were."""
    links = links_of(checkout)
    for place in links:
        place.unlink()
    for package in PACKAGES:
        for name, _, _ in os.walk(checkout / package, topdown=False):
            folder = Path(name)
            # Running the checkout leaves bytecode beside the linked files.
            if all(place.name == "__pycache__" for place in folder.glob("*")):
                shutil.rmtree(folder, ignore_errors=True)
    return len(links)


# ----------------------------------------------------------------- assemble


def assembled_from(checkout: Path) -> str | None:
    """The digest of the wheel that it was assembled from."""
    with suppress(OSError, ValueError, LookupError):
        return str(json.loads((checkout / MARKER).read_text())["digest"])
    return None


def assemble(wheel: Wheel, destination: Path) -> str:
    """Build ``destination`` from the wheel; say what was done.

    It is built beside its place and moved there when it is complete and has
    imported, so that whatever stands at ``destination`` is whole. A checkout that
    was assembled from this wheel is kept, patched or not; its links are repaired.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with locked(destination.parent):
        if destination.exists():
            if assembled_from(destination) != wheel.digest():
                raise BadCall(
                    f"{destination} was not assembled from the torch {wheel.version} "
                    f"of {sys.executable}: delete it to have it built anew (edits are "
                    "lost), or give another destination"
                )
            link(destination, wheel)
            return f"{destination} is already assembled from torch {wheel.version}"
        sources = [p for p, (_, size) in wheel.files.items() if is_source(p, size)]
        altered = [path for path in sources if is_altered(wheel, path)]
        if altered:
            raise BadCall(
                f"torch {wheel.version} in {wheel.root} is not as it was installed; "
                f"{len(altered)} files are gone or changed, such as "
                f"{', '.join(altered[:5])}.\n"
                "Undo what changed it, say a patch set that was applied to it, or: "
                f"{sys.executable} -m pip install --force-reinstall --no-deps "
                f"torch=={wheel.release}"
            )
        staging = destination.with_name(f".{destination.name}.incomplete")
        if staging.exists():
            shutil.rmtree(staging)
        for path in sources:
            for each in (path, cache_from_source(path)):
                if (wheel.root / each).is_file():
                    _copy(wheel.root / each, staging / each)
        (staging / "version.txt").write_text(wheel.release + "\n")
        (staging / MARKER).write_text(json.dumps({"digest": wheel.digest()}) + "\n")
        link(staging, wheel)
        fault = import_fault(sys.executable, staging)
        if fault is not None:
            raise BadCall(
                f"torch {wheel.version} does not import from its assembled checkout "
                f"{staging}:\n{fault}"
            )
        os.replace(staging, destination)
    return (
        f"assembled {destination} from torch {wheel.version}: "
        f"{len(sources)} files copied, the binaries linked"
    )


def _copy(source: Path, destination: Path) -> None:
    """With the time of change, by which bytecode is current, but writable."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)
    times = source.stat()
    os.utime(destination, ns=(times.st_atime_ns, times.st_mtime_ns))


def run(arguments: argparse.Namespace) -> None:
    checkout = arguments.checkout.resolve()
    if arguments.command == "assemble":
        print(assemble(installed_wheel(), checkout))
    elif arguments.remove:
        print(f"removed {remove_links(checkout)} links from {checkout}")
    else:
        print(link(checkout, installed_wheel()))


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Of ``link_build.sh``, after the command, ``link``; scripts alone call the other."""
    parser = argparse.ArgumentParser(
        prog="link_build.sh",
        usage="scripts/%(prog)s [--remove] CHECKOUT",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("command", choices=("assemble", "link"), help=argparse.SUPPRESS)
    add("--remove", action="store_true", help="take the links out again instead")
    add("checkout", type=Path, metavar="CHECKOUT", help="of PyTorch")
    found = parser.parse_args(arguments)
    tree, needed = found.checkout, "torch/__init__.py"
    if found.command == "link" and not (tree / needed).is_file():
        parser.error(f"'{tree}' is no PyTorch checkout: it has no {needed}")
    return found


def main(arguments: list[str] | None = None) -> int:
    asked = options(arguments)
    return exit_status(lambda: run(asked))


if __name__ == "__main__":
    sys.exit(main())
