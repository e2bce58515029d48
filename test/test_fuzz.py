"""Some of the programs of scripts/benchmark.sh fuzz, and what it says of a fault."""

import sys

import pytest
import torch._functorch.config as fconfig
from benchmarks import fuzz
from benchmarks.fuzz import fault, plans_of, Program, program_of


pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("seed", range(30))
def test_a_program(seed):
    peak, *others = plans_of(seed)
    for plan in (peak, *(others if seed == 0 else ())):
        assert fault(program_of(seed), plan) == ""


@pytest.mark.parametrize("width", [16, 64])
def test_a_small_program(width):
    """Its peak was once a tenth above what was predicted."""
    names = ("linear", "transpose", "sum", "sort", "in place of views")
    program = Program(tuple((name, 0, 0) for name in names), width=width)
    assert fault(program, {"budget": 0.7, "budget_target": "peak"}) == ""


def test_what_differs_is_told(monkeypatch, capsys):
    """An operator that does something else with another budget."""
    operator = "budget", lambda x, y, w: x * fconfig.activation_memory_budget
    monkeypatch.setitem(fuzz.OPERATORS, *operator)
    program = Program((("linear", 0, 0), ("budget", 0, 0)))
    monkeypatch.setattr(fuzz, "program_of", lambda seed: program)
    monkeypatch.setattr(sys, "argv", ["fuzz", "3", "1"])
    assert fuzz.main() == 1
    printed = capsys.readouterr().out
    assert "seed 3: outputs are not those of budget 1\n  {'budget': " in printed
    assert "1 programs, 2 faults" in printed
