"""What fits into the memory of a GPU, and what does it cost? No GPU is needed.

    scripts/what_fits.sh --model my_module:my_function --batch 1,2,4,8 --memory 24GiB
    scripts/what_fits.sh --model transformers:GPT2LMHeadModel --length 512 --batch 4,8 \\
        --config n_layer=24 --blocks --memory 16GiB
    TORCH_VERSION=2.15.0 scripts/what_fits.sh --gpu rtx4090 --model my_module:my_function

Training steps are planned for fake tensors: no weights, no downloads. For each batch it
says what a step holds without a budget, at the lowest of upstream's budgets, and at the
lowest of this set; what the plan for that memory costs; and the lines that ask for it.
"""

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import torch
from benchmarks import fresh, nets, ways
from benchmarks.pages import environment, show, store
from benchmarks.replay import GPUS

from what_fits import page


UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def memory(text: str) -> int:
    match = re.fullmatch(r"(\d+\.?\d*) ?(\w*)", text)
    nbytes = int(float(match[1]) * UNITS.get(match[2], 0)) if match else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: a number above 0 of {', '.join(filter(None, UNITS))}"
        )
    return nbytes


def sizes(text: str) -> list[int]:
    found = [int(each) if each.isdecimal() else 0 for each in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,2,4: numbers above 0")
    return sorted({*found})


def setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not like num_hidden_layers=16")
    with suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value)
    return name, value


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="what_fits.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    model = """your function as module:function, which returns (model, inputs) and takes
        nothing, a batch size, or that and a length; or transformers:CLASS, with random
        weights"""
    add("--model", required=True, help=model)
    add("--batch", type=sizes, metavar="N,...", help="such as 1,2,4,8")
    add("--length", type=sizes, metavar="N,...", help="of the sequences")
    add(
        "--memory",
        type=memory,
        metavar="SIZE",
        help="such as 24GiB; default: the GPU's",
    )
    gpu = "by inductor's schedule for it; without it, operator by operator"
    add("--gpu", choices=sorted(GPUS), help=gpu)
    blocks = """compile these submodules one by one, under a StepBudget; without a
        PATTERN of their names, those that models commonly repeat"""
    add("--blocks", nargs="?", const=nets.BLOCKS, help=blocks)
    add("--compile-loss", action="store_true", help="F.cross_entropy, by itself")
    add("--config", type=setting, nargs="+", default=[], metavar="KEY=VALUE")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    optimizer = "of torch.optim; default: AdamW"
    add(
        "--optimizer", choices=("AdamW", "Adam", "SGD"), default="AdamW", help=optimizer
    )
    fsdp = "shard blocks by FSDP2 over so many GPUs, one of which is looked at"
    add("--fsdp", type=int, default=0, metavar="RANKS", help=fsdp)
    add("--json", type=Path, metavar="FILE", help="store it, and a picture (.svg)")
    return parser


def tasks(asked: dict[str, Any]) -> Iterator[fresh.Task]:
    """Each batch, or length, each way."""
    for size in itertools.product(asked["batch"] or [None], asked["length"] or [None]):
        for way in (page.UPSTREAM, page.OURS):
            wheel = fresh.UNTOUCHED if way == page.UPSTREAM else "patched"
            named = dict(zip(("batch", "length"), size))
            yield {**named, "way": way, "torch": wheel, "_asked": asked}


def checked(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """Ends the program for what cannot be measured, before anything is."""
    if asked.gpu and torch.version.cuda is None:
        parser.error(
            f"torch {torch.__version__} was built without CUDA, which schedules for a "
            "GPU need; try TORCH_VERSION=2.15.0 scripts/what_fits.sh, or leave --gpu out"
        )
    if asked.length and not asked.batch:
        asked.batch = [1]
    if len(asked.batch or ()) > 1 and len(asked.length or ()) > 1:
        parser.error("several batches and several lengths: only one of them can vary")
    if asked.fsdp and asked.blocks is None:
        parser.error("--fsdp shards blocks: name them by --blocks")
    if asked.json is not None and not asked.json.parent.is_dir():
        parser.error(f"there is no folder {asked.json.parent}")
    if asked.memory is None and asked.gpu:
        asked.memory = GPUS[asked.gpu].total_memory
    net = None
    try:
        net = page.net_of(next(tasks(vars(asked))))
        module = net.fake()[1]
        if asked.blocks is not None:
            ways.blocks_of(module, net.blocks)
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else repr(error)
        parser.error(f"{asked.model}: {what}" if net else what)


def main(words: Optional[list[str]] = None) -> int:
    parser = options()
    asked = parser.parse_args(words)
    checked(parser, asked)
    todo = [*tasks({**vars(asked), "json": None})]
    rows = [fresh.measured(page.__name__, task) for task in todo]
    data = {"environment": environment(), "asked": todo[0]["_asked"], "measured": rows}
    show(page.page(data))
    if asked.json is not None:
        store(asked.json, data)
        page.plot(data, asked.json)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
