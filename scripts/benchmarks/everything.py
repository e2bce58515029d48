"""Asks every question, one after the other, and stores results/NAME.json.

What the code as it is now has stored is not measured again, so that a call that was stopped
goes on where it was. Two tasks run at a time. The exit status is 1 where a count that must
hold does not, or a task failed, and 130 where it was stopped.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from patchset.patch import RELEASES, REPOSITORY

from benchmarks import provenance
from benchmarks.options import IN_SETS, SETS


NEWEST, DEFAULT = RELEASES[-1], ""
# Each with its torch: schedules for a GPU need one that was built with CUDA.
QUESTIONS = {
    "compare": DEFAULT,
    "solvers": DEFAULT,
    "saved": DEFAULT,
    "operators": DEFAULT,
    "kernels": NEWEST,
    "steps": NEWEST,
    "loops": DEFAULT,
    "cost": DEFAULT,
    "unasked": NEWEST,
    "chunks": NEWEST,
    "fits": NEWEST,
}
RESULTS = REPOSITORY / "results"
AT_A_TIME = 2
# What is left of a question that was stopped is ended after so many seconds.
PATIENCE = 30.0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark.sh all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--set", choices=SETS, default=SETS[0], help="of nets")
    add("--only", nargs="+", choices=QUESTIONS, metavar="NAME", help="these questions")
    return parser


def main(words: Optional[list[str]] = None) -> int:
    asked = options().parse_args(words)
    names = list(asked.only or QUESTIONS)
    if asked.set != SETS[0]:
        names = [name for name in names if name in IN_SETS]
    say(estimate(names, asked.set))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started, failed = time.monotonic(), []
    for at, name in enumerate(names):
        before = time.monotonic()
        say(f"question {at + 1} of {len(names)}: {name}")
        status = ask(name, asked.set)
        if status in (2, 130):
            return status
        if status:
            failed.append(name)
        say(f"{name}: done in {minutes(time.monotonic() - before)}")
    say(f"all: done in {minutes(time.monotonic() - started)}")
    if failed:
        say(f"something is wrong in {', '.join(failed)}; scripts/report.sh shows it")
    return int(bool(failed))


def ask(name: str, of: str) -> int:
    """Its exit status; a signal ends all that it started before this returns."""
    command = [str(REPOSITORY / "scripts" / "benchmark.sh"), name]
    command += ["--set", of] if name in IN_SETS else []
    command += ["--full"] if name == "compare" else []
    command += ["--json", str(RESULTS / f"{name}.json")]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    variables.pop("TORCH_VERSION", None)
    if QUESTIONS[name] != DEFAULT:
        variables["TORCH_VERSION"] = QUESTIONS[name]
    child = subprocess.Popen(
        command, env=variables, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return child.wait()
    except KeyboardInterrupt:
        stop(child)
        return 130


def stop(child: "subprocess.Popen[bytes]") -> None:
    """The shell ends at once; what it ran stores its rows and ends its own."""
    until = time.monotonic() + PATIENCE
    number: int = signal.SIGTERM
    with suppress(ProcessLookupError):
        while True:
            os.killpg(child.pid, number)
            child.poll()
            time.sleep(0.2)
            # 0 only asks whether there is something left.
            number = signal.SIGKILL if time.monotonic() > until else 0


def estimate(names: Iterable[str], of: str) -> str:
    """How long what has to be measured took last time."""
    total, unknown = 0.0, []
    for name in names:
        rows = stored(RESULTS / f"{name}.json")
        if name in IN_SETS:
            rows = [row for row in rows if row["set"] == of]
        if not rows:
            unknown.append(name)
        again = (r for r in rows if "error" in r or not provenance.is_of_now(r))
        total += sum(row["took"] for row in again)
    text = f"about {minutes(total / AT_A_TIME)} for nets that were measured before"
    if unknown:
        text += f"; nothing is known of {', '.join(unknown)}"
    return text


def stored(place: Path) -> list[dict[str, Any]]:
    """The rows of a file, none where nobody has made it."""
    rows: list[dict[str, Any]] = []
    if place.exists():
        rows = json.loads(place.read_text())["measured"]
    return rows


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
