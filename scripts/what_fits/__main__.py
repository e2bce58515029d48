"""What fits into the memory of a GPU, and what does it cost? No GPU is needed.

    scripts/what_fits.sh --model my_module:my_function --batch 1,2,4,8 --memory 24GiB
    scripts/what_fits.sh --model transformers:GPT2LMHeadModel --length 512 --batch 4,8 \\
        --config n_layer=24 --blocks --memory 16GiB
    scripts/what_fits.sh --python python --gpu rtx4090 --model my_module:my_function

Training steps are planned for fake tensors: no weights, no downloads. For each batch it
says what a step holds without a budget and at the lowest of this set; what the plan for
that memory costs; and the lines that ask for it.

Exit status: 0; 1 if something could not be measured; 2 for a bad call.
"""

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Optional, Union

from benchmarks.options import GPUS
from patchset.patch import planner_path, RELEASES


REPOSITORY = Path(__file__).resolve().parents[2]
HEADROOM = "10%"
# The pattern for the blocks that models commonly repeat.
COMMON = ""
OLDEST_PYTHON = 3, 11


# ------------------------------------------------------------------ options


def memory(text: str) -> int:
    """Bytes, by the parser of StepBudget, which is loaded without torch."""
    place = REPOSITORY / "torch_overlay" / planner_path("byte_sizes")
    spec = importlib.util.spec_from_file_location(place.stem, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        nbytes: int = module.as_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; it is like 24GiB (2**30 bytes each), or 24GB or 24G "
            "(10**9 bytes each)"
        ) from None
    return nbytes


def headroom(text: str) -> Union[int, float]:
    """A share of the memory, less than 1, or bytes."""
    share = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(%?)", text)
    if share is None:
        return memory(text)
    found = float(share[1]) / (100 if share[2] else 1)
    if found >= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a share, such as 10% or 0.1, nor a size, such as 2GiB"
        )
    return found


def sizes(text: str) -> list[int]:
    found = [int(each) if each.isdecimal() else 0 for each in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,2,4: numbers above 0")
    return sorted({*found})


def ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs from 2 on")
    return int(text)


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not like num_hidden_layers=16")
    with suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value)
    return name, value


def pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no regular expression: {error}"
        ) from None
    return text


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="what_fits.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    model = """your function as module:function, which returns (model, inputs) and takes
        nothing, a batch size, or that and a length; or transformers:CLASS or
        diffusers:CLASS, with random weights"""
    add("--model", required=True, help=model)
    add("--batch", type=sizes, metavar="N,...", help="such as 1,2,4,8")
    add("--length", type=sizes, metavar="N,...", help="of the sequences")
    memory_help = (
        "such as 24GiB (2**30 bytes each), 24GB or 24G (10**9); default: the GPU's"
    )
    add("--memory", type=memory, metavar="SIZE", help=memory_help)
    room = f"""of the memory, left free for what is not counted, such as 15%% or 2GiB;
        default: {HEADROOM}%"""
    add("--headroom", type=headroom, default=HEADROOM, metavar="SHARE", help=room)
    gpu = "by inductor's schedule for it; without it, operator by operator, unfused"
    add("--gpu", choices=GPUS, help=gpu)
    blocks = """compile these submodules one by one, under a StepBudget; without a
        PATTERN of their names, those that models commonly repeat"""
    add(
        "--blocks",
        nargs="?",
        type=pattern,
        const=COMMON,
        metavar="PATTERN",
        help=blocks,
    )
    add("--compile-loss", action="store_true", help="F.cross_entropy, by itself")
    config = (
        "of a library's model; text_config.num_hidden_layers=4 for one within another"
    )
    add(
        "--config",
        type=setting,
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help=config,
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    optimizer = "of torch.optim; default: AdamW"
    add(
        "--optimizer", choices=("AdamW", "Adam", "SGD"), default="AdamW", help=optimizer
    )
    fsdp = "shard blocks by FSDP2 over this many GPUs; one is reported"
    add("--fsdp", type=ranks, default=0, metavar="RANKS", help=fsdp)
    compare = "sweep upstream's budgets, too, which takes twice as long"
    add("--compare", action="store_true", help=compare)
    add("--json", type=Path, metavar="FILE", help="store it, and a picture (.svg)")
    python = """your own, for its torch and packages; a copy of its torch is patched,
        or used as it is where the set is installed; default: an environment of this folder"""
    add("--python", metavar="PYTHON", help=python)
    # The first of them has the solvers alone.
    releases = f"for PyTorch {RELEASES[1]} to {RELEASES[-1]}"
    add("--version", action="version", version=f"what_fits.sh, {releases}")
    return parser


def checked(words: Optional[list[str]]) -> argparse.Namespace:
    """Ends the program for what is wrong whatever the model."""
    parser = options()
    asked = parser.parse_args(words)
    if asked.length and not asked.batch:
        asked.batch = [1]
    if len(asked.batch or ()) > 1 and len(asked.length or ()) > 1:
        parser.error("several batches and several lengths: only one of them can vary")
    if asked.fsdp and asked.blocks is None:
        parser.error("--fsdp shards blocks: name them by --blocks")
    if asked.memory is not None and asked.headroom >= asked.memory:
        parser.error("--headroom is not less than --memory")
    if asked.json is not None:
        check_place(parser, asked.json)
    return asked


def check_place(parser: argparse.ArgumentParser, file: Path) -> None:
    """Before anything is measured, whether it could be stored there."""
    if file.suffix == ".svg":
        parser.error(f"--json {file}: that is the name of its picture; say .json")
    if not file.parent.is_dir():
        parser.error(f"--json {file}: there is no folder {file.parent}")
    if file.is_dir():
        parser.error(f"--json {file}: that is a folder; name a file")
    if file.with_suffix(".svg").is_dir():
        parser.error(f"--json {file}: {file.with_suffix('.svg')} is a folder")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        parser.error(f"--json {file}: nothing can be written there: {error.strerror}")


# -------------------------------------------------------------- environment

PROBE = """
import importlib.metadata as m, json, sys
found = {"python": sys.version_info[:2], "executable": sys.executable}
try:
    torch = m.distribution("torch")
    found["torch"], found["root"] = torch.version, str(torch.locate_file(""))
except m.PackageNotFoundError:
    pass
print(json.dumps(found))
"""
# Sets `CHECKOUT` and `PYTHON`, and says which.
ENSURE = """
set -euo pipefail
source "$1/scripts/environment.sh"
CHECKOUT=${2:-$CHECKOUT}
ensure_environment
quiet ensure_patched_checkout
printf '%s\\n' "$PYTHON" "$CHECKOUT"
"""
# Signals are heeded while torch is imported, too.
ANSWER = """
from what_fits import __main__ as command
command.heed_signals()
from what_fits import answer
raise SystemExit(answer.main())
"""
DIGEST = (
    "from upkeep.checkout import installed_wheel; print(installed_wheel().digest())"
)


class Refused(Exception):
    """What is asked for cannot be had; the message says why."""


def run(command: list[str], **environment: str) -> str:
    """What a command prints; it dies with this process, and all that it started."""
    child = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.returncode:
        raise Refused("")
    return said.strip()


def probed(python: str) -> dict[str, Any]:
    """What the user's Python is, and the torch that it has."""
    place = shutil.which(python)
    if place is None:
        raise Refused(f"--python {python}: there is no such program")
    place = os.path.abspath(place)
    try:
        said = subprocess.run(
            [place, "-I", "-c", PROBE], capture_output=True, text=True, timeout=60
        )
        found: dict[str, Any] = json.loads(said.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise Refused(f"--python {python}: it is no Python") from None
    if tuple(found["python"]) < OLDEST_PYTHON:
        had, needed = (".".join(map(str, v)) for v in (found["python"], OLDEST_PYTHON))
        raise Refused(f"--python {python}: Python {had}, but {needed} is needed")
    if "torch" not in found:
        raise Refused(f"--python {python}: it has no torch; install it there")
    # As it was called: a virtual environment's is a link.
    return {**found, "executable": place}


def found_torch(asked: argparse.Namespace) -> tuple[str, list[str]]:
    """The Python to measure with, and what its path has to begin with."""
    wanted: dict[str, str] = {}
    checkout = ""
    if asked.python is not None:
        has = probed(asked.python)
        if Path(has["root"], planner_path("__init__")).is_file():
            if asked.compare:
                raise Refused(
                    f"--compare needs the torch of {asked.python} without the set: "
                    "scripts/apply_patch.sh --reverse --installed --python "
                    f"{asked.python}"
                )
            return has["executable"], []
        scripts = str(REPOSITORY / "scripts")
        digest = run([has["executable"], "-c", DIGEST], PYTHONPATH=scripts)
        name = f"pytorch-{has['torch'].partition('+')[0]}-{digest[:8]}"
        checkout = str(REPOSITORY / "build" / name)
        wanted = {"TORCH_VERSION": "installed", "APPLY_PYTHON": has["executable"]}
        if not os.path.isdir(checkout):
            which = f"torch {has['torch']} of {asked.python}"
            print(f"patching a copy of {which} (once, a minute) ...", file=sys.stderr)
    command = ["bash", "-c", ENSURE, "what_fits.sh", str(REPOSITORY), checkout]
    python, checkout = run(command, **wanted).splitlines()[-2:]
    return python, [checkout]


def stopped(number: int, _: Any) -> NoReturn:
    """As a shell has it; whatever was started is ended on the way out."""
    sys.exit(128 + number)


def heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stopped)


def main() -> int:
    words = sys.argv[1:]
    heed_signals()
    asked = checked(words)
    try:
        python, path = found_torch(asked)
    except Refused as error:
        if str(error):
            print(f"what_fits.sh: error: {error}", file=sys.stderr)
        return 2
    path += [each for each in os.environ["PYTHONPATH"].split(os.pathsep) if each]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    # Without the bytecode of what torch imports, each process would take 5 s longer.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [python, "-W", "ignore", "-P", "-c", ANSWER, *words]
    sys.stdout.flush()
    os.execve(python, command, environment)


if __name__ == "__main__":
    sys.exit(main())
