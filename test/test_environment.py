"""What the scripts set up: the checkout that every test runs on."""

from pathlib import Path

import torch
from patchset.patch import KNAPSACK, REPOSITORY
from patchset.series import SERIES
from upkeep.upstream_checks import run_test


CHECKOUT = Path(torch.__file__).parents[1]
OVERLAY = REPOSITORY / "torch_overlay"


def test_tests_run_by_the_checkouts_torch():
    assert CHECKOUT.is_relative_to(REPOSITORY / "build")
    for path in {KNAPSACK, *(path for patch in SERIES for path in patch.files)}:
        assert (CHECKOUT / path).read_bytes() == (OVERLAY / path).read_bytes(), path


def test_overlay_tests_run_as_upstreams_do():
    done = run_test(["test/functorch/test_ac_config_solver_name.py"], CHECKOUT)
    assert done.returncode == 0 and "Ran 1 test" in done.stdout, done.stdout
