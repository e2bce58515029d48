"""Upstream's own test files without the set and with it: moved to the CPU, run, compared."""

import sys
from pathlib import Path

import torch
from upkeep import upstream_tests
from upkeep.upstream_tests import compared, FAILED, moved, outcomes, PASSED, SKIPPED


FILE = "test/dynamo/test_some.py"
TEXT = """
import unittest
import torch
from beside import NUMBER

class Tests(unittest.TestCase):
    @unittest.skipIf(not torch.cuda.is_available(), "needs CUDA")
    def test_on_the_cpu(self):
        x = torch.ones(3, device="cuda").cuda()
        self.assertEqual(x.device.type, 'cuda')

    def test_wrong(self):
        self.assertEqual(NUMBER, 2)

    @unittest.skip("for another reason")
    def test_skipped(self):
        pass

    def test_OpInfo(self):
        pass

class TestByTheSet(unittest.TestCase):
    def test_it_is_there(self):
        from torch._functorch._activation_checkpointing import knapsack_exact
"""


def test_files_are_moved_and_run(tmp_path):
    tree = tmp_path / "pytorch"
    (tree / FILE).parent.mkdir(parents=True)
    (tree / FILE).write_text(TEXT)
    (tree / FILE).with_name("beside.py").write_text("NUMBER = 1\n")
    source = moved(tree, tmp_path / "moved", [FILE])
    assert (tree / FILE).read_text() == TEXT
    found = outcomes(sys.executable, Path(torch.__file__).parents[1], source / FILE)
    assert found == {
        "test_some.Tests.test_on_the_cpu": PASSED,
        "test_some.Tests.test_wrong": FAILED,
        "test_some.Tests.test_skipped": SKIPPED,
        "test_some.TestByTheSet.test_it_is_there": PASSED,
    }


def test_sides_are_compared_test_by_test():
    before = {"a": PASSED, "b": PASSED, "c": FAILED, "d": FAILED, "e": PASSED}
    after = {"a": PASSED, "b": FAILED, "c": FAILED, "d": PASSED, "f": FAILED}
    row = compared(before, after)
    assert row == {
        "tests": 6,
        PASSED: 1,
        FAILED: 1,
        SKIPPED: 0,
        "only_with": ["b", "e", "f"],
        "only_without": ["d"],
    }
    page = upstream_tests.page({"torch": "2.6.0", "files": {FILE: row}})
    assert "| dynamo/test_some.py | 6 | 1 | 1 | 0 | b, e, f | d |" in page
