"""The overlay's own test files, run as upstream would, by the checkout's torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patchset.patch import KNAPSACK
from patchset.series import SERIES
from patchset.upstream_checks import run_test


# run_tests.sh runs these tests by the patched checkout's torch.
CHECKOUT = Path(torch.__file__).parents[1]
TESTS = [path for patch in SERIES for path in patch.files if path.startswith("test/")]


@pytest.mark.parametrize("test", TESTS)
def test_in_the_patched_checkout(test):
    module = KNAPSACK.removesuffix(".py").replace("/", ".")
    done = run_test(["-X", "importtime", test], CHECKOUT)
    said = done.stdout.split("\n")
    words = [line for line in said if not line.startswith("import time:")]
    assert done.returncode == 0, "\n".join(words)[-4000:]
    ran = next(line for line in words if line.startswith("Ran "))
    assert int(ran.split()[1]) > 0
    assert any(line.endswith(module) for line in said)
    assert (CHECKOUT / test).read_text().startswith('# Owner(s): ["')


def test_it_is_the_checkouts_torch():
    code = f"import {KNAPSACK[:-3].replace('/', '.')} as m; print(m.__file__)"
    place = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert place == str(CHECKOUT / KNAPSACK)
    assert "KNAPSACK_SOLVERS" in Path(place).read_text()
    assert (CHECKOUT / "version.txt").is_file() and all(
        (CHECKOUT / test).is_file() for test in TESTS
    )
