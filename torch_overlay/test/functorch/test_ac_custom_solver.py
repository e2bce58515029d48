# Owner(s): ["module: functorch"]
"""What a custom knapsack solver is given, and what it may answer."""

import torch
from torch._functorch import config
from torch._functorch._activation_checkpointing.custom_solver import ask_custom_solver
from torch._functorch.partitioners import estimate_runtime
from torch._inductor.custom_graph_pass import CustomKnapsackSolver
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


ROWS = 50
WIDTHS = (40, 96, 24, 64, 16, 80, 48, 104, 32)
LOG = "torch._functorch._activation_checkpointing.custom_solver"


class Solver(CustomKnapsackSolver):
    """Gives one answer to every question, and remembers the last one."""

    def __init__(self, *answer):
        self.answer = answer

    def __call__(self, memory, joint_graph, max_memory, node_info, nodes):
        self.asked = memory, nodes, max_memory
        return self.answer

    def uuid(self):
        return None


class AtTheEnd(Solver):
    def __call__(self, memory, joint_graph, max_memory, node_info, nodes, runtimes):
        self.runtimes = runtimes
        return super().__call__(memory, joint_graph, max_memory, node_info, nodes)


class KeywordOnly(Solver):
    def __call__(self, *others, runtimes):
        self.runtimes = runtimes
        return super().__call__(*others)


class SaveDearest(AtTheEnd):
    """Saves the item that costs most to recompute, and no other."""

    def __call__(self, memory, joint_graph, max_memory, node_info, nodes, runtimes):
        first = runtimes.index(max(runtimes))
        self.answer = [first], [i for i in range(len(memory)) if i != first]
        return super().__call__(
            memory, joint_graph, max_memory, node_info, nodes, runtimes
        )


def ask(solver, memory=(0.25, 0.5, 0.125), runtimes=(1.0, 2.0, 4.0), max_memory=0.5):
    nodes = [object() for _ in memory]
    return ask_custom_solver(
        solver, list(memory), list(runtimes), max_memory, None, None, nodes
    )


def chain(x, *weights):
    for weight in weights:
        x = x @ weight
    return x


@instantiate_parametrized_tests
class TestCustomSolver(TestCase):
    def saved_widths(self, solver):
        """Widths of the products that the compiled chain saves."""
        torch._dynamo.reset()
        x = torch.ones(ROWS, WIDTHS[0], requires_grad=True)
        weights = [
            torch.ones(rows, columns, requires_grad=True)
            for rows, columns in zip(WIDTHS, WIDTHS[1:])
        ]
        saved = []

        def pack(tensor):
            if ROWS in tensor.shape:
                saved.append(tensor.numel() // ROWS)
            return tensor

        with (
            config.patch(
                activation_memory_budget=0.3, activation_memory_budget_solver=solver
            ),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            torch.compile(chain, backend="aot_eager_decomp_partition")(x, *weights)
        return sorted(saved)

    @parametrize("kind", [AtTheEnd, KeywordOnly])
    def test_a_parameter_gets_the_runtimes(self, kind):
        solver = kind([], range(7))
        self.saved_widths(solver)
        memory, nodes, max_memory = solver.asked
        self.assertEqual(max_memory, 0.3)
        self.assertEqual(len(memory), 7)
        self.assertEqual(solver.runtimes, [estimate_runtime(node) for node in nodes])
        products = {
            2.0 * ROWS * inner * outer for inner, outer in zip(WIDTHS, WIDTHS[1:-1])
        }
        self.assertEqual(set(solver.runtimes), products)

    def test_the_answer_is_the_plan(self):
        solver = SaveDearest()
        # Items come largest first, and the widest is the dearest: 48 x 104 per row.
        # The input is saved as well.
        self.assertEqual(self.saved_widths(solver), [40, 104])
        self.assertEqual(solver.answer[0], [0])
        without_runtimes = Solver([0], range(1, 7))
        self.assertEqual(self.saved_widths(without_runtimes), [40, 104])

    def test_bad_answer_stops_the_compilation(self):
        with self.assertRaisesRegex(Exception, r"Solver: saved\[0\] is 7, but"):
            self.saved_widths(Solver([7], range(7)))

    def test_lists_are_sorted_and_the_runtime_is_summed(self):
        self.assertEqual(ask(Solver((2, 0), {1})), (5.0, [0, 2], [1]))
        self.assertEqual(ask(AtTheEnd([], [2, 1, 0])), (0.0, [], [0, 1, 2]))
        self.assertEqual(ask(Solver([], []), (), ()), (0.0, [], []))
        places = torch.tensor([1, 0, 2])
        self.assertEqual(ask(Solver(places[:0], places)), (0.0, [], [0, 1, 2]))

    @parametrize("kind", [Solver, AtTheEnd])
    def test_bad_answers(self, kind):
        for error, message, answer in (
            (ValueError, r"saved\[1\] is 3, but there are 3 items", ([0, 3], [1, 2])),
            (ValueError, r"recomputable\[0\] is -1, but there", ([0, 1], [-1])),
            (ValueError, r"saved\[2\] is 0, which is saved\[0\]", ([0, 1, 0], [2])),
            (ValueError, r"recomputable\[1\] is 1, which is saved", ([0, 1], [2, 1])),
            (ValueError, r"item 1 is neither saved nor", ([0], [2])),
            (TypeError, r"saved\[0\] is 0.0, not an int", ([0.0], [1, 2])),
            (TypeError, r"saved\[0\] is True; .* not a mask", ([True] * 3, [])),
            (TypeError, r"recomputable is None, not a list", ([0, 1, 2], None)),
            (TypeError, r"must return two lists", ([0], [1], [2])),
        ):
            with (
                self.subTest(message),
                self.assertRaisesRegex(error, f"^{kind.__name__}:? {message}"),
            ):
                ask(kind(*answer))

    def test_more_than_the_budget_is_told(self):
        with self.assertLogs(LOG, "WARNING") as logs:
            self.assertEqual(ask(Solver([0, 1], [2])), (3.0, [0, 1], [2]))
        (message,) = logs.output
        self.assertIn("Solver saves 0.75 of the activations", message)
        self.assertIn("the budget of 0.5", message)

    def test_the_budget_to_the_last_bit_is_no_news(self):
        # Ten tenths are 1, but a solver that adds them one by one gets less.
        with self.assertNoLogs(LOG, "WARNING"):
            ask(Solver(range(10), []), [0.1] * 10, [1.0] * 10, sum([0.1] * 10))
            ask(Solver([1], [0, 2]))


if __name__ == "__main__":
    run_tests()
