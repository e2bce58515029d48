"""Which topics have landed in a checkout: what their own tests say of it as it is."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from patchset.images import ABSENT, APPLIES, Survey, survey
from patchset.patch import OVERLAY, Patch, RELEASES
from patchset.series import exported, FORMS, stack
from patchset.target import BadCall, Conflict, import_fault, Target
from patchset.transaction import read_journal

from .releases import of_its_minor
from .upstream_checks import run_test


LANDED, OPEN, NOT_RUN = "landed", "open", "not run"
# Of an error that is quoted.
WIDTH = 120


def report(target: Target, topics: Sequence[str]) -> None:
    """Print how each stands; Conflict where a test could not be run."""
    if read_journal(target) is not None:
        raise Conflict(
            f"the set is applied to {target.root}, where its tests pass: take it off "
            f"with scripts/apply_patch.sh --reverse {target.root}"
        )
    check_runnable(target)
    counts: Counter[str] = Counter()
    for topic in topics:
        patch = FORMS[exported(topic)]
        top = fitted(target, stack(patch)).patches[-1]
        # It lies here: nothing is written into the checkout.
        test = str(OVERLAY / patch.test)
        state, why = outcome(run_test([test, "--failfast"], target.root))
        words = [why] * bool(why)
        if state == OPEN:
            words.append("its edits fit" if top.state == APPLIES else top.state)
            words += [top.detail] * bool(top.detail)
        print(f"{topic:<24} {state:<8} {'; '.join(words)}".rstrip(), flush=True)
        counts[state] += 1
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if counts[NOT_RUN]:
        raise Conflict(f"{counts[NOT_RUN]} tests could not be run")


def fitted(target: Target, series: Sequence[Patch]) -> Survey:
    """The patches against the tree. What conflicts by the release next to an unknown
    tree, and is not for an older one, conflicts."""
    result = survey(target, read_journal(target), series=series)
    if result.in_manifest or all(step.state != ABSENT for step in result.patches):
        return result
    release = of_its_minor(target.version) or RELEASES[-1]
    return survey(target, read_journal(target), series=series, release=release)


def check_runnable(target: Target) -> None:
    """BadCall, with what to type, where this Python cannot run the checkout."""
    fault = import_fault(sys.executable, target.root)
    if fault is None:
        return
    again = f"scripts/export_pr.sh --status {target.root}"
    release = of_its_minor(target.version)
    if release:
        torch = f"TORCH_VERSION={release}"
        way = f"{torch} scripts/link_build.sh {target.root}\n    {torch} {again}"
    else:
        way = f"TORCH_VERSION=installed APPLY_PYTHON=PYTHON {again}"
        way += "\nonce it is built, with the PYTHON that it was built for"
    raise BadCall(f"{target.root} cannot be run: {fault}. Type\n    {way}")


def outcome(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """What a test's run says of its topic, and why."""
    errors = re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception)\b.*", done.stdout, re.M)
    last = errors[-1] if errors else (done.stdout.strip() or "?").splitlines()[-1]
    last = last if len(last) <= WIDTH else f"{last[:WIDTH]}..."
    if done.returncode < 0:
        return NOT_RUN, f"killed by signal {-done.returncode}"
    lacks = re.match(r"ModuleNotFoundError: No module named '(\w+)", last)
    if done.returncode and lacks and lacks[1] != "torch":
        return NOT_RUN, last
    if done.returncode:
        return OPEN, last
    ran = re.search(r"^Ran (\d+) test", done.stdout, re.M)
    skipped = re.search(r"\bskipped=(\d+)", done.stdout)
    if ran is None or int(ran[1]) <= int(skipped[1] if skipped else 0):
        return NOT_RUN, "all of its tests are skipped here"
    return LANDED, ""
