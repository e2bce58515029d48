"""The PyTorch tree at hand: where it is, what kind it is, what may be touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Optional

from .files import naming
from .patch import CONFIG, KNAPSACK, PARTITIONERS, RELEASES


class BadCall(Exception):
    """The call or the target is wrong; nothing else was done (exit 2)."""


class Conflict(Exception):
    """The tree does not admit the change; nothing was written (exit 1)."""


class Unfinished(Exception):
    """What was written could be neither finished nor undone; the same call goes on
    from there (exit 4)."""


def exit_status(command: Callable[[], None]) -> int:
    """Run a command that writes nothing into the tree; what it refuses is told."""
    try:
        command()
    except BadCall as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Conflict as error:
        print(f"conflict: {error}", file=sys.stderr)
        return 1
    return 0


STATE_NAME = ".activation-memory-budget"
NEEDS = (
    f"TARGET must be the root of a PyTorch checkout (git or unpacked source, of "
    f"{', '.join(RELEASES)} or main), or use --installed [--python PY] for an installed "
    "torch"
)


def run_python(python: str, code: str, *path: object) -> str:
    """What ``code`` prints under ``python``, with ``path`` for its PYTHONPATH."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME")
    }
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    # A path is one from here; a bare name is looked up.
    program = os.path.abspath(python) if os.sep in python else python
    done = subprocess.run(
        [program, "-c", code],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"{python}: {last}")
    return done.stdout.strip()


def import_fault(python: str, root: Path) -> Optional[str]:
    """Why ``python`` does not import the tree's own partitioner afresh, or None."""
    module = KNAPSACK[: -len(".py")].replace("/", ".")
    code = f"import {module} as m, torch._functorch.partitioners; print(m.__file__)"
    try:
        place = run_python(python, code, root)
    except (OSError, RuntimeError) as error:
        return str(error)
    return None if place == str(root / KNAPSACK) else f"{module} came from {place}"


@dataclass(frozen=True)
class Target:
    """The root of a PyTorch tree.

    ``root`` holds ``torch/``. ``installed`` says that it is a site-packages
    folder: the overlay's tests are not laid there. ``git_dir`` is set for a git
    checkout. ``python`` is the one to import the result with. ``state`` is the
    folder for backups and the journal, outside ``torch/`` and never seen by git.
    """

    root: Path
    version: str
    installed: bool
    git_dir: Optional[Path]
    python: str = sys.executable

    @property
    def state(self) -> Path:
        return (self.git_dir or self.root) / STATE_NAME

    def wants(self, path: str) -> bool:
        return path.startswith("torch/") or not self.installed

    def read(self, path: str) -> Optional[bytes]:
        """The file's bytes, or None where there is none.

        Raises Conflict for what must not be replaced: a link, a file of no text,
        anything that is no plain file.
        """
        here = self.root
        for part in Path(path).parts:
            here = here / part
            if here.is_symlink():
                raise Conflict(
                    f"{path}: {here} is a symbolic link; replacing it would change "
                    "or detach what it points to. Patch the tree it points to"
                )
        if not here.exists():
            return None
        if not here.is_file():
            raise Conflict(f"{path}: not a plain file")
        with naming(here):
            content = here.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise Conflict(f"{path}: {error}; get upstream's back") from None
        return content

    def check_writable(self, *paths: str) -> None:
        """Conflict where one of them, or the state, can be neither made nor replaced."""
        for place in (self.state, *(self.root / path for path in paths)):
            folder = next(parent for parent in place.parents if parent.exists())
            if not (folder.stat().st_mode & 0o200 and os.access(folder, os.W_OK)):
                raise Conflict(f"{place}: the folder {folder} is not writable")
            if place.exists() and not place.stat().st_mode & 0o200:
                raise Conflict(f"{place}: read-only; chmod u+w {place} first")


def git_dir(root: Path) -> Optional[Path]:
    """The repository whose work tree starts at ``root``, not one further up."""
    dot_git = root / ".git"
    if dot_git.is_dir():
        return dot_git
    if dot_git.is_file():
        word, _, place = dot_git.read_text(errors="replace").strip().partition(": ")
        if word == "gitdir":
            return (root / place).resolve()
    return None


def _version(root: Path) -> str:
    marker = root / "version.txt"
    if marker.is_file():
        return marker.read_text().strip()
    for line in (root / "torch/version.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip("'\"")
    raise OSError("no version")


def find(place: str) -> Target:
    """The tree at ``place``; BadCall where that is no PyTorch tree."""
    root = Path(place)
    if not root.is_dir():
        raise BadCall(f"{place}: no such folder. {NEEDS}")
    root = root.resolve()
    init, state = root / "torch/__init__.py", root / STATE_NAME
    if state.exists() and not init.is_file():
        raise BadCall(
            f"{place}: torch was uninstalled under the patch set, of which files are "
            f"left over. Delete {init.parent} and {state}, or install torch again and "
            "then run --reverse"
        )
    for path in ("torch/__init__.py", PARTITIONERS, CONFIG, KNAPSACK):
        if not (root / path).is_file():
            raise BadCall(f"{place}: not a PyTorch tree (no {path}). {NEEDS}")
    try:
        version = _version(root)
    except (OSError, UnicodeDecodeError):
        raise BadCall(
            f"{place}: neither version.txt nor torch/version.py says which PyTorch "
            f"this is. {NEEDS}"
        ) from None
    sources = any((root / name).is_file() for name in ("version.txt", "setup.py"))
    return Target(root, version, not sources, git_dir(root) if sources else None)


def find_installed(python: str) -> Target:
    """The tree of the torch that ``python`` imports; BadCall where there is none."""
    code = (
        "import importlib.util as u, json; s = u.find_spec('torch'); "
        "print(json.dumps(list(s and s.submodule_search_locations or [])))"
    )
    # That of whoever called the script; what the script put there has no torch.
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    try:
        folders = json.loads(run_python(python, code, *map(os.path.abspath, path)))
    except (OSError, RuntimeError, ValueError) as error:
        raise BadCall(f"--python {python}: cannot be run: {error}") from None
    if not folders:
        raise BadCall(f"--python {python}: no torch is installed there. {NEEDS}")
    return replace(find(str(Path(folders[0]).parent)), python=python)
