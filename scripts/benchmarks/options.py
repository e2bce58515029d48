"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Container
from pathlib import Path
from typing import Optional

import torch

from benchmarks.nets import find


def parser(
    description: Optional[str], check: Optional[str] = None
) -> argparse.ArgumentParser:
    """Where to write to, and ``--check`` where the benchmark has something to check."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if check:
        result.add_argument("--check", action="store_true", help=check)
    result.add_argument(
        "--json",
        type=in_a_folder,
        metavar="FILE",
        help="write what was measured here, and a figure (.svg), if any, beside it",
    )
    return result


def need_cuda(command: argparse.ArgumentParser) -> None:
    """End a command that compiles for GPUs where torch was built without CUDA."""
    if torch.version.cuda is None:
        command.error(
            f"torch {torch.__version__} was built without CUDA, which schedules for a "
            f"GPU need; try TORCH_VERSION=2.15.0 scripts/{command.prog}"
        )


def net(text: str, own: Container[str] = ()) -> str:
    """The name of a net: one of a benchmark's ``own``, or as `nets.find` knows it."""
    if text in own:
        return text
    try:
        return find(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def in_a_folder(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path
