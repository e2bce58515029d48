"""What can be asked of a benchmark. Nothing of torch's is needed to tell, or to refuse it.

``python -m benchmarks.options NAME OPTIONS`` ends with 2 where these are wrong, and tells
of ``--help``.
"""

import argparse
import ast
import sys
from pathlib import Path
from typing import Any


SETS = ("project", "held-out")
# Whose nets are in two sets.
IN_SETS = (
    *("saved", "operators", "kernels", "steps", "loops", "cost", "unasked"),
    *("chunks", "fits"),
)
# As `replay.GPUS` has them.
GPUS = ("h100", "rtx4090")


def device(*choices: str, **more: Any) -> dict[str, Any]:
    return {"device": {"choices": choices, "help": "by its schedule", **more}}


OWN: dict[str, dict[str, dict[str, Any]]] = {
    "kernels": device(*GPUS, "cpu"),
    "steps": device(*GPUS, "operators", help="for your own; the others have theirs"),
    "unasked": device(*GPUS, "cpu", "operators"),
    "gpu": device("cuda", "inductor", help="what runs them", default="cuda"),
}


def in_a_folder(text: str) -> Path:
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(text).parent}")
    return Path(text)


def parser(name: str) -> argparse.ArgumentParser:
    module = Path(__file__).with_name(f"{name}.py")
    found = argparse.ArgumentParser(
        prog=f"benchmark.sh {name}",
        description=ast.get_docstring(ast.parse(module.read_text())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--check", action="store_true", help="only the few cases that CI runs")
    if name == "compare":
        text = "the README's nets and ways"
        add("--full", dest="set", action="store_const", const="full", help=text)
        found.set_defaults(set="quick")
    elif name in IN_SETS:
        add("--set", choices=SETS, default=SETS[0], help="of nets")
    else:
        found.set_defaults(set=SETS[0])
    if name != "solvers":
        text = "these alone, or your own as module:function; others stay in FILE"
        add("--net", "--model", dest="nets", nargs="+", help=text)
    add("--kind", nargs="+", help="only these kinds")
    for option, described in OWN.get(name, {}).items():
        add(f"--{option}", **described)
    text = "store what is measured, and skip what the same code has stored"
    add("--json", type=in_a_folder, metavar="FILE", help=text)
    return found


if __name__ == "__main__":
    parser(sys.argv[1]).parse_args(sys.argv[2:])
