"""Measures what `what_fits.sh` was asked, in the Python and with the torch it found."""

import argparse
import gc
import itertools
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Optional

import torch
from benchmarks import catalogue, fresh, ways
from benchmarks.pages import environment, Row, show, store
from benchmarks.replay import GPUS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from what_fits import __main__ as command
from what_fits import page, picture


# Between two lines of progress where no terminal shows them.
SECONDS = 15


def tasks(asked: dict[str, Any]) -> Iterator[fresh.Task]:
    """Each batch, or length, each way."""
    kinds = [page.PLAIN, page.OURS] + [page.UPSTREAM] * asked["compare"]
    for size in itertools.product(asked["batch"] or [None], asked["length"] or [None]):
        for way in kinds:
            wheel = fresh.UNTOUCHED if way == page.UPSTREAM else "patched"
            named = dict(zip(("batch", "length"), size))
            yield {**named, "way": way, "torch": wheel, "_asked": asked}


def check_model(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    """Ends the program for a model that cannot be measured, before anything is."""
    if asked.memory is None and asked.gpu:
        asked.memory = GPUS[asked.gpu].total_memory
        if asked.headroom >= asked.memory:
            parser.error(f"--headroom is not less than the memory of --gpu {asked.gpu}")
    if asked.gpu and torch.version.cuda is None:
        parser.error(
            f"torch {torch.__version__} was built without CUDA, which schedules for a "
            "GPU need; name a Python whose torch has it by --python, try "
            "TORCH_VERSION=2.15.0 scripts/what_fits.sh, or leave --gpu out"
        )
    try:
        net = page.net_of(next(tasks(vars(asked))))
        mode, module, inputs = net.fake()
        if asked.blocks is not None:
            ways.blocks_of(module, net.blocks)
        with mode:
            loss = module(*inputs)
        if not loss.requires_grad:
            raise ValueError("its loss depends on no parameter that is trained")
    except Exception as error:
        what = why(error)
        named = what if asked.model in what else f"{asked.model}: {what}"
        parser.error(named)


def why(error: BaseException) -> str:
    """What went wrong, and in which line of the model's."""
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        said = str(error)
        text = " ".join(said.strip().partition("\n")[0].split())
        # Dynamo tells the lines of what it traced in words.
        traced = re.findall(r'File "([^"]+)", line (\d+)', said)
        place = " ({}:{})".format(*traced[-1]) if traced else ""
        return f"{text}{place}"
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        _, _, place = catalogue.where(error).rpartition(" (")
        return f"it asks for the values of tensors, which fake tensors lack ({place}"
    return catalogue.where(error)


class Progress:
    """How far it is, and about how long the rest takes."""

    def __init__(self, total: int) -> None:
        self.done, self.total = 0, total
        self.start = self.told = time.monotonic()

    def tell(self, what: str) -> None:
        self.done += 1
        now = time.monotonic()
        left = (now - self.start) / self.done * (self.total - self.done)
        text = f"{what}: plan {self.done} of {self.total}, about {left:.0f} s left"
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif now - self.told >= SECONDS:
            self.told = now
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def measured(task: fresh.Task, progress: Progress) -> Row:
    """A row as `fresh.measured` has it, by this process."""
    if task["way"] == page.UPSTREAM:
        print(fresh.words(task), "...", file=sys.stderr, flush=True)
        return fresh.measured(page.__name__, task)
    name = " ".join(f"{k} {task[k]}" for k in ("batch", "length") if task[k])
    row: Row = {**fresh.public(task), "steps": []}
    try:
        for step in page.plans_of(task):
            row["steps"].append(step)
            progress.tell(name or task["_asked"]["model"])
    except Exception as error:
        row["error"] = why(error)
    return row


def main(words: Optional[list[str]] = None) -> int:
    asked = command.checked(words)
    # What the model imports only when it is made; never in place of a package.
    sys.path.append(os.getcwd())
    torch.set_num_threads(1)
    # What went wrong is in the answer, once.
    logging.disable()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        return answered(asked)


def answered(asked: argparse.Namespace) -> int:
    check_model(command.options(), asked)
    # Each plan collects garbage, which need not be looked for in all that was imported.
    gc.freeze()
    todo = [*tasks({**vars(asked), "json": None})]
    sizes = sum(task["way"] == page.OURS for task in todo)
    progress = Progress(sizes * (1 + len(page.SHARES) + (asked.memory is not None)))
    rows = [measured(task, progress) for task in todo]
    # Else libraries take what is frozen for leaks as the process ends, and say so.
    gc.unfreeze()
    progress.end()
    data = {"environment": environment(), "asked": todo[0]["_asked"], "measured": rows}
    show(page.page(data))
    if asked.json is not None:
        store(asked.json, data)
        picture.draw(data, asked.json.with_suffix(".svg"))
    return int(any("error" in row for row in rows))
