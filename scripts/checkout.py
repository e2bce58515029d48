#!/usr/bin/env python3
"""Run a PyTorch checkout's Python tree on an installed wheel's binaries.

A full build of PyTorch takes hours, yet everything this project changes is
Python. Two commands make a tree that runs without compiling:

``assemble``  builds a checkout from the torch that a Python has installed: its
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
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from patchset.files import locked, replace_file


REPOSITORY = Path(__file__).resolve().parent.parent

# What a build of PyTorch puts into torch/. A checkout has none of it under
# version control, so `assemble` links it even where it is text.
BUILD_OUTPUT = ("torch/bin", "torch/include", "torch/lib", "torch/share", "torch/test")
PYTHON = (".py", ".pyi")
# Above this a file that is not Python is data that nobody patches.
LARGEST_TEXT = 1 << 20

STAMP = ".assembled_from_wheel.json"
MANIFEST = ".linked_from_wheel.json"

EPILOG = """\
exit status:
  0  done, or already in the wanted state
  2  bad call, or refused: the message says what is in the way and what to do
"""


class Refusal(Exception):
    """The request cannot be met as things stand; nothing was changed."""


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


PROBE = """
import importlib.metadata, json
try:
    torch = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    answer = None
else:
    answer = {
        "version": torch.version,
        "root": str(torch.locate_file("")),
        "record": torch.read_text("RECORD"),
    }
print(json.dumps(answer))
"""


def installed_wheel(python: str) -> Wheel:
    """Ask ``python`` for its torch and parse the RECORD that pip wrote.

    PYTHONPATH is taken away and the question asked from an empty folder, or a
    checkout that is on the path would answer in the installation's place.
    """
    if os.sep in python:
        python = os.path.abspath(python)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as nowhere:
        try:
            probe = subprocess.run(
                [python, "-c", PROBE],
                cwd=nowhere,
                env=environment,
                capture_output=True,
                text=True,
            )
        except OSError as error:
            raise Refusal(f"cannot run {python}: {error.strerror}") from error
    if probe.returncode != 0:
        raise Refusal(f"{python} could not look for torch:\n{probe.stderr.strip()}")
    answer = json.loads(probe.stdout)
    if answer is None:
        raise Refusal(
            f"{python} has no torch installed.\n"
            f"Install one first, say: {python} -m pip install torch==2.13.0"
        )
    if not answer["record"]:
        raise Refusal(
            f"torch {answer['version']} in {answer['root']} has no RECORD: it was "
            "not installed from a wheel.\n"
            "Give --python a virtual environment where pip or uv installed torch."
        )

    files: dict[str, Recorded] = {}
    for path, algorithm_and_hash, size in csv.reader(answer["record"].splitlines()):
        top = PurePosixPath(path).parts[0]
        if top in ("..", "/") or top.endswith(".dist-info") or path.endswith(".pyc"):
            continue
        files[path] = Recorded(
            algorithm_and_hash.removeprefix("sha256="), int(size or 0)
        )
    root = Path(answer["root"]).resolve()
    if "torch/__init__.py" not in files:
        raise Refusal(
            f"torch {answer['version']} in {root} is an editable install: its RECORD "
            "names no file of torch/.\nGive --python an environment with torch's wheel."
        )
    return Wheel(python, answer["version"], root, dict(sorted(files.items())))


def sha256_of(path: Path) -> str:
    """The file's sha256 in the form a RECORD holds it."""
    with open(path, "rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def altered_files(wheel: Wheel) -> list[str]:
    """Recorded files that are gone or changed, each with what is wrong.

    Copied files are hashed; of a linked file only the size is compared, since
    hashing some gigabytes of libraries would take longer than all the rest.
    """
    faults = []
    for path, entry in wheel.files.items():
        installed = wheel.root / path
        try:
            size = installed.stat().st_size
        except OSError:
            faults.append(f"{path}: missing")
            continue
        if size != entry.size:
            faults.append(f"{path}: {size} bytes, {entry.size} in the RECORD")
        elif belongs_to_tree(path, entry) and sha256_of(installed) != entry.sha256:
            faults.append(f"{path}: its sha256 is not the RECORD's")
    return faults


def belongs_to_tree(path: str, entry: Recorded) -> bool:
    """Whether a file is source by its place, name and size (its text is not read)."""
    if path.startswith(tuple(folder + "/" for folder in BUILD_OUTPUT)):
        return False
    return path.endswith(PYTHON) or entry.size <= LARGEST_TEXT


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
    directories: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    # The block's name in info/exclude, whether that file and its folder are ours,
    # and whether a line end had to be added in front of the block.
    exclude: dict[str, Any] | None = None

    @staticmethod
    def read(checkout: Path) -> Manifest | None:
        path = checkout / MANIFEST
        try:
            return Manifest(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise Refusal(
                f"{path} is damaged ({error}); restore or delete it"
            ) from None

    def write(self, checkout: Path) -> None:
        text = json.dumps(vars(self), indent=1) + "\n"
        replace_file(checkout / MANIFEST, text.encode())


def plan_links(
    checkout: Path, wheel: Wheel, before: Manifest | None
) -> tuple[list[str], list[str]]:
    """Folders to make and paths to link, so that no recorded file is lacking.

    What an earlier `link` made counts as lacking. A folder that the checkout
    lacks is linked whole, unless Python files lie in it: Python would then write
    its bytecode, and a patch tool its files, through the link into the
    installation. Such a folder is made here and filled with links.
    """
    ours = set(before.links + before.directories) if before else set()
    holds_python = {
        str(parent)
        for path in wheel.files
        if path.endswith(PYTHON)
        for parent in PurePosixPath(path).parents
    }
    directories: dict[str, None] = {}
    links: dict[str, None] = {}

    for path in wheel.files:
        for parent in [str(p) for p in reversed(PurePosixPath(path).parents)][1:]:
            if parent in links:
                break
            if parent in ours or not os.path.lexists(checkout / parent):
                if parent not in holds_python:
                    links[parent] = None
                    break
                directories[parent] = None
            elif os.path.islink(checkout / parent):
                # The user's own link: what lies behind it is not the checkout's.
                break
            elif not os.path.isdir(checkout / parent):
                raise Refusal(
                    f"{checkout / parent} is a file; torch {wheel.version} has a "
                    "folder there. Move it away and run this again."
                )
        else:
            if path in ours or not os.path.lexists(checkout / path):
                links[path] = None
    return list(directories), list(links)


def link(checkout: Path, wheel: Wheel) -> str:
    """Make ``checkout`` runnable with the wheel's binaries; say what was done."""
    check_link_target(checkout, wheel)
    before = Manifest.read(checkout)
    directories, links = plan_links(checkout, wheel, before)
    for path in links:
        if not (wheel.root / path).exists():
            raise Refusal(
                f"{wheel.root / path} is in torch's RECORD but missing.\n"
                f"Reinstall it: {wheel.python} -m pip install --force-reinstall "
                f"--no-deps torch=={wheel.release}"
            )

    wanted = Manifest(
        wheel.version, str(wheel.root), wheel.digest(), directories, links
    )
    if before is not None:
        wanted.exclude = before.exclude
        in_git = exclude_file(checkout) is not None
        if (
            before == wanted
            and in_git == (wanted.exclude is not None)
            and not unlinked(checkout, wanted)
        ):
            return f"{checkout} is already linked to torch {wheel.version}"
        remove_links(checkout, before)

    wanted.exclude = exclude_plan(checkout)
    wanted.write(checkout)
    if wanted.exclude is not None:
        add_exclude_block(checkout, wanted)
    for path in directories:
        (checkout / path).mkdir(exist_ok=True)
    for path in unlinked(checkout, wanted):
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
    for built in sorted((checkout / "torch").glob("_C.*")):
        if built.suffix in (".so", ".pyd") and not built.is_symlink():
            raise Refusal(
                f"{checkout} has binaries of its own ({built.name}): it runs as it is"
            )


def unlinked(checkout: Path, manifest: Manifest) -> list[str]:
    """The manifest's links that do not stand (yet, or any more) as planned."""
    root = Path(manifest.root)
    return [
        path
        for path in manifest.links
        if not os.path.islink(checkout / path)
        or os.readlink(checkout / path) != str(root / path)
    ]


def remove_links(checkout: Path, manifest: Manifest) -> list[str]:
    """Undo `link`; return paths that are no longer its links, and so were left."""
    strange = {p for p in unlinked(checkout, manifest) if os.path.lexists(checkout / p)}
    for path in manifest.links:
        if path not in strange:
            (checkout / path).unlink(missing_ok=True)
    for path in reversed(manifest.directories):
        # Running the checkout leaves bytecode beside the linked files.
        shutil.rmtree(checkout / path / "__pycache__", ignore_errors=True)
        try:
            (checkout / path).rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            strange.add(path)
    if manifest.exclude is not None:
        restore_exclude(checkout, manifest.exclude)
    (checkout / MANIFEST).unlink(missing_ok=True)
    return sorted(strange)


# ------------------------------------------------------ .git/info/exclude


def exclude_file(checkout: Path) -> Path | None:
    """Where git reads this checkout's private ignore list, or None without git."""
    if not os.path.lexists(checkout / ".git"):
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "--git-path", "info/exclude"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Refusal(f"{checkout} needs git, which does not run: {error}") from error
    if answer.returncode != 0:
        raise Refusal(f"git cannot read {checkout}:\n{answer.stderr.strip()}")
    # A worktree answers with an absolute path, a plain checkout with a relative one.
    return checkout / answer.stdout.rstrip("\n")


def exclude_markers(name: str) -> tuple[str, str]:
    """The first and last line of the block called ``name``."""
    return (
        f"# >>> linked from the torch wheel: {name}\n",
        f"# <<< linked from the torch wheel: {name}\n",
    )


def exclude_plan(checkout: Path) -> dict[str, Any] | None:
    """What must be remembered to restore the exclude file byte for byte."""
    path = exclude_file(checkout)
    if path is None:
        return None
    # Worktrees share the file, so blocks are told apart by their checkout.
    name = str(checkout)
    drop_exclude_block(path, name)
    text = read_exclude(path)
    return {
        "block": name,
        "made_folder": not path.parent.exists(),
        "made_file": not path.exists(),
        "added_line_end": bool(text) and not text.endswith("\n"),
    }


def read_exclude(path: Path) -> str:
    # newline="" keeps CRLF as it is; surrogateescape keeps any other byte.
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def write_exclude(path: Path, text: str) -> None:
    replace_file(path, text.encode("utf-8", "surrogateescape"))


def add_exclude_block(checkout: Path, manifest: Manifest) -> None:
    path = exclude_file(checkout)
    assert path is not None and manifest.exclude is not None
    covered = [f"/{MANIFEST}"]
    for made in manifest.directories:
        if str(PurePosixPath(made).parent) not in manifest.directories:
            covered.append(f"/{made}/")
    for linked in manifest.links:
        if str(PurePosixPath(linked).parent) not in manifest.directories:
            covered.append(f"/{linked}")
    patterns = [re.sub(r"([\\*?\[\]])", r"\\\1", p) + "\n" for p in covered]
    first, last = exclude_markers(manifest.exclude["block"])
    block = first + "".join(patterns) + last
    line_end = "\n" if manifest.exclude["added_line_end"] else ""
    path.parent.mkdir(exist_ok=True)
    write_exclude(path, read_exclude(path) + line_end + block)


def drop_exclude_block(path: Path, name: str, added_line_end: bool = False) -> None:
    """Take the block called ``name`` out, with the line end that went before it."""
    text = read_exclude(path)
    first, last = exclude_markers(name)
    start = text.find(first)
    end = text.find(last, start)
    if start < 0 or end < 0:
        return
    end += len(last)
    # Lines written after the block by someone else need the line end.
    if added_line_end and end == len(text) and text[:start].endswith("\n"):
        start -= 1
    write_exclude(path, text[:start] + text[end:])


def restore_exclude(checkout: Path, remembered: dict[str, Any]) -> None:
    path = exclude_file(checkout)
    if path is None:
        return
    drop_exclude_block(path, remembered["block"], remembered["added_line_end"])
    if remembered["made_file"] and path.exists() and not read_exclude(path):
        path.unlink()
    if remembered["made_folder"] and path.parent.is_dir():
        with suppress(OSError):
            path.parent.rmdir()


# ----------------------------------------------------------------- assemble


def assemble(wheel: Wheel, destination: Path, replace: bool) -> str:
    """Build ``destination`` from the wheel; say what was done.

    It is built beside its place and moved there when it is complete and has
    imported, so that whatever stands at ``destination`` is whole.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    with locked(destination.parent):
        if destination.exists() and not replace:
            return reuse(wheel, destination)
        refuse_altered(wheel)
        staging = destination.with_name(f".{destination.name}.incomplete")
        if staging.exists():
            shutil.rmtree(staging)
        copied = copy_tree(wheel, staging)
        stamp = {"version": wheel.version, "digest": wheel.digest()}
        (staging / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
        link(staging, wheel)
        check_import(wheel, staging)
        if destination.exists():
            retired = destination.with_name(f".{destination.name}.retired")
            if retired.exists():
                shutil.rmtree(retired)
            os.replace(destination, retired)
            os.replace(staging, destination)
            shutil.rmtree(retired)
        else:
            os.replace(staging, destination)
    return (
        f"assembled {destination} from torch {wheel.version}: "
        f"{copied} files copied, the binaries linked"
    )


def refuse_altered(wheel: Wheel) -> None:
    """Refuse an installation that is not what pip put there."""
    faults = altered_files(wheel)
    if faults:
        shown = "\n".join("  " + fault for fault in faults[:10])
        more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise Refusal(
            f"torch {wheel.version} in {wheel.root} is not as it was installed:\n"
            f"{shown}{more}\n"
            "Undo what changed it (a patch set that was applied to the installation, "
            "say), or reinstall it:\n"
            f"  {wheel.python} -m pip install --force-reinstall --no-deps "
            f"torch=={wheel.release}"
        )


def reuse(wheel: Wheel, destination: Path) -> str:
    """Keep a checkout assembled from this wheel, patched or not; mend its links."""
    advice = "give another destination, or --replace to build it anew (edits are lost)"
    try:
        stamp = json.loads((destination / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise Refusal(
            f"{destination} was not assembled by this tool: {advice}"
        ) from None
    if stamp["digest"] != wheel.digest():
        raise Refusal(
            f"{destination} was assembled from another torch ({stamp['version']}; "
            f"{wheel.python} has {wheel.version}): {advice}"
        )
    link(destination, wheel)
    return f"{destination} is already assembled from torch {wheel.version}"


def copy_tree(wheel: Wheel, staging: Path) -> int:
    """Copy every source file of the RECORD, and add version.txt; count them."""
    copied = 0
    for path, entry in wheel.files.items():
        if not belongs_to_tree(path, entry):
            continue
        content = (wheel.root / path).read_bytes()
        if not path.endswith(PYTHON) and not is_text(content):
            continue
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        copied += 1
    (staging / "version.txt").write_text(wheel.release + "\n")
    return copied


def is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def check_import(wheel: Wheel, checkout: Path) -> None:
    """Import torch from ``checkout`` in a fresh process and see that it is its own."""
    probe = subprocess.run(
        [wheel.python, "-c", "import torch; print(torch.__file__)"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    expected = checkout / "torch" / "__init__.py"
    if probe.returncode != 0:
        raise Refusal(
            f"torch {wheel.version} does not import from its assembled checkout:\n"
            f"{probe.stderr.strip()}"
        )
    loaded = Path(probe.stdout.strip().splitlines()[-1])
    if not loaded.samefile(expected):
        raise Refusal(f"{wheel.python} imported {loaded} instead of {expected}")


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
        help="build a checkout from the installed torch",
        description="Build a PyTorch checkout from the torch that a Python has "
        "installed: the Python tree copied, the binaries linked. A checkout that was "
        "assembled from the same torch before is kept as it is, patches included.",
        epilog=EPILOG,
        formatter_class=formatter,
    )
    one.add_argument(
        "destination",
        nargs="?",
        type=Path,
        help="where to (default: build/pytorch-VERSION beside scripts/)",
    )
    one.add_argument(
        "--replace",
        action="store_true",
        help="build it anew even if DESTINATION exists; edits in it are lost",
    )

    two = commands.add_parser(
        "link",
        help="link the installed torch's binaries into a checkout of one's own",
        description="Link every file of the installed torch that CHECKOUT lacks into "
        "it, so that it runs without a build. In a git checkout the links are excluded "
        "through .git/info/exclude.",
        epilog=EPILOG,
        formatter_class=formatter,
    )
    two.add_argument(
        "--remove", action="store_true", help="take the links out again instead"
    )
    two.add_argument("checkout", type=Path, metavar="CHECKOUT")

    for command in (one, two):
        command.add_argument(
            "--python",
            default=sys.executable,
            metavar="PY",
            help="the Python whose torch is used (default: the one running this)",
        )
    return main_parser


def run(arguments: argparse.Namespace) -> str:
    if arguments.command == "assemble":
        wheel = installed_wheel(arguments.python)
        default = REPOSITORY / "build" / f"pytorch-{wheel.release}"
        destination = (arguments.destination or default).resolve()
        return assemble(wheel, destination, arguments.replace)

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
