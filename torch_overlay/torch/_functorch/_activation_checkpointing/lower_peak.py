"""Prefers, of plans that recompute about as much, the one with the lower peak.

Saving what is live at a few narrow points cuts a long recomputation into short ones.
"""

import operator
from typing import Any

import torch
from torch._inductor.fx_utils import get_node_storage
from torch.fx import Graph, Node

Nodes = list[Node]


def with_lower_peak(
    graph: Graph, info: Any, saved: Nodes, must_save: Nodes, runtimes: dict[Node, float]
) -> Nodes:
    """``saved``, or what keeps no more and has the least product of peak and time."""
    for node in info.inputs:
        overwritten = any(u.target is torch.ops.aten.copy_.default for u in node.users)
        overwritten |= "aot_runtime_epilogue_input_mutation" in node.meta
        if overwritten and node.dist_from_bw < int(1e9):
            return saved  # The backward would not find what the forward read.
    model = _Model(graph, info)
    always = [part for node in must_save for part in _tensors(node)]
    parts = {node: _tensors(node) for node in runtimes}
    density = {n: runtimes[n] / max(model.kept(parts[n]), 1) for n in runtimes}
    time = 3 * sum(runtimes.values())  # A backward takes about twice its forward.

    def evaluate(plan: Nodes) -> tuple[float, float, Nodes]:
        peak, run = model.evaluate(plan)
        again = [node for node in run if node in runtimes]
        longer = time + sum(map(runtimes.__getitem__, again))
        return peak * longer, longer, again

    allowed = model.kept(saved)
    least, usual, _ = evaluate(saved)
    for cuts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        plan = always + model.handed_on(cuts)
        for node in sorted(evaluate(plan)[2], key=density.__getitem__, reverse=True):
            if model.kept(plan + parts[node]) <= allowed:
                plan += parts[node]
        product, longer, _ = evaluate(plan)
        fits = model.kept(plan) <= allowed and longer <= 1.05 * usual
        if fits and product < least:
            least, saved = product, info.inputs + [*dict.fromkeys(plan)]
    return saved


def _tensors(node: Node) -> Nodes:
    """The node, or the elements taken out of it if it is a tuple."""
    return [u for u in node.users if u.target is operator.getitem] or [node]


class _Model:
    """A joint graph whose halves run one operator after the other."""

    def __init__(self, graph: Graph, info: Any) -> None:
        from torch._functorch.partitioners import _size_of, must_recompute

        self.info, self.order = info, {n: i for i, n in enumerate(graph.nodes)}
        self.storage = {node: get_node_storage(node) for node in self.order}
        self.nbytes: dict[Any, int] = {}
        for node, s in self.storage.items():
            size = 0 if s is None else _size_of(node)
            self.nbytes[s] = max(size, self.nbytes.get(s, 0))
        self.nbytes.update((self.storage[node], 0) for node in info.inputs)
        self.redone = set(filter(must_recompute, self.order))
        returned = {self.storage[node] for node in graph.output_node().all_input_nodes}
        self.gradients = returned & {self.storage[x] for x in info.tangents_closure}

    def kept(self, saved: Nodes) -> int:
        return sum(self.nbytes[s] for s in {self.storage[node] for node in saved})

    def evaluate(self, saved: Nodes) -> tuple[int, Nodes]:
        """The backward's peak, and what it runs, each just before its first use."""
        have, run = {*saved, *self.info.inputs}, []
        for node in self.order:
            wanted, pending = [], [node] * (node in self.info.tangents_closure)
            while pending:
                each = pending.pop()
                if each.op == "call_function" and each not in have:
                    have.add(each)
                    wanted.append(each)
                    pending += each.all_input_nodes
            run += sorted(wanted, key=self.order.__getitem__)
        uses = [{self.storage[x] for x in (n, *n.all_input_nodes)} for n in run]
        last = {s: i for i, used in enumerate(uses) for s in used}
        live = {self.storage[node] for node in saved} & last.keys()
        peak = size = sum(self.nbytes[s] for s in live)
        for i, used in enumerate(uses):
            size += sum(self.nbytes[s] for s in used - live)
            peak = max(peak, size)
            ended = {s for s in used - self.gradients if last[s] == i}
            size -= sum(self.nbytes[s] for s in ended)
            live = (live | used) - ended
        return peak, run

    def handed_on(self, cuts: int) -> Nodes:
        """What the forward has live where that is least, near evenly spaced cuts."""
        forward = [n for n in self.info.required_fw_nodes if n.dist_from_bw < int(1e9)]
        last = {self.storage[x]: n for n in forward for x in n.all_input_nodes}
        live, states = dict[Any, Node](), list[Nodes]()
        for node in forward:
            live.setdefault(self.storage[node], node)
            live = {s: n for s, n in live.items() if last.get(s, node) is not node}
            states.append([n for s, n in live.items() if self.nbytes[s]])
        step = len(states) / (cuts + 1)
        spans = (states[round((i + 0.5) * step) :][: round(step)] for i in range(cuts))
        narrow = (min(w, key=self.kept, default=[]) for w in spans)
        return [*dict.fromkeys(n for w in narrow for n in w if n not in self.redone)]
