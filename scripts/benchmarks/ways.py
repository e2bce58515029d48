"""Ways to train a net, and `Training`, which takes its steps in one of them.

A way makes another forward of a forward, of a whole net or of each of its blocks:

    Training(net)                                               eager mode
    Training(net, whole=compiled(OPERATORS))                    one graph
    Training(net, blocks=compiled("inductor"))                  a graph for each block
    Training(net, blocks=(checkpointed(), compiled("inductor")))    a checkpoint in each
"""

import functools
import re
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Optional, Self, Union

import torch
import torch._functorch.config as config
from torch import nn, Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.meters import cpu_seconds, gradients, record_step, Step
from benchmarks.nets import BLOCKS, LossOf, Net, SEED


OPERATORS = "aot_eager_decomp_partition"
Forward = Callable[..., Any]
Way = Callable[[Forward], Forward]
Ways = Union[Way, Sequence[Way]]


def compiled(backend: Any, **options: Any) -> Way:
    return functools.partial(torch.compile, backend=backend, **options)


def checkpointed(**options: Any) -> Way:
    def way(forward: Forward) -> Forward:
        def again(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

        return again

    return way


def blocks_of(module: nn.Module, pattern: str = BLOCKS) -> list[nn.Module]:
    """Submodules whose whole name the pattern matches, none inside another."""
    inner = module.module if isinstance(module, LossOf) else module
    names = [name for name, _ in inner.named_modules() if name]
    chosen: list[str] = []
    for name in names:
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if re.fullmatch(pattern, name) and not inside:
            chosen.append(name)
    if not chosen:
        outermost = [name for name in names if name.count(".") < 2]
        raise ValueError(
            f"no submodule's name is matched by {pattern!r}; there are "
            f"{', '.join(outermost[:12])}, ..."
        )
    return [inner.get_submodule(name) for name in chosen]


@contextmanager
def budgeted(budget: float, target: str = "saved") -> Iterator[None]:
    """A budget of the config's, also for the wheel, which has no other target."""
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if target != "saved":
        settings["activation_memory_budget_target"] = target
    with config.patch(settings):
        yield


class Training:
    """A net that is trained in some ways; ``fake`` with tensors that are none.

    A step runs ``within`` a context, a StepBudget for example. What was compiled before
    is forgotten, unless this one is to run ``beside`` it.
    """

    def __init__(
        self,
        net: Net,
        whole: Ways = (),
        blocks: Ways = (),
        fake: bool = False,
        beside: bool = False,
        device: str = "cpu",
    ) -> None:
        if not beside:
            torch._dynamo.reset()
        self.mode: AbstractContextManager[Any] = nullcontext()
        if fake:
            self.mode, self.module, self.inputs = net.fake()
        else:
            self.module, self.inputs = net.make(device)
        self.parameters: list[Tensor] = list(self.module.parameters())
        self.parameters += [each for each in self.inputs if each.requires_grad]
        self.blocks = blocks_of(self.module, net.blocks) if blocks else []
        for block in self.blocks:
            block.forward = put_to_work(block.forward, blocks)
        self.forward = put_to_work(self.module, whole)
        self.optimizer: Optional[torch.optim.Optimizer] = None
        self.within: AbstractContextManager[Any] = nullcontext()

    def loss(self) -> Tensor:
        found: Tensor = self.forward(*self.inputs)
        return found

    def step(self) -> None:
        """One step, as a user writes it; gradients are not kept."""
        torch.manual_seed(SEED)
        with self.mode, self.within:
            self.loss().backward()
            if self.optimizer is not None:
                self.optimizer.step()
            gradients(self.parameters)

    def warmed(self, steps: int = 1) -> Self:
        """After steps in which everything is compiled."""
        for _ in range(steps):
            self.step()
        return self

    def measured(self) -> Step:
        """One more step."""
        torch.manual_seed(SEED)
        there = [*self.inputs, *self.module.buffers()]
        with self.mode, self.within:
            # Inductor's kernels make their buffers out of the dispatcher's sight.
            return record_step(self.loss, self.parameters, there, self.optimizer)

    def seconds(self, device: str = "cpu") -> float:
        """Of a step: a GPU's, or CPU seconds of one thread."""
        if device == "cpu":
            return cpu_seconds(self.step)

        def step() -> None:
            self.step()
            torch.cuda.synchronize()

        torch.cuda.synchronize()
        return timeit.timeit(step, number=1)


def put_to_work(forward: Forward, ways: Ways) -> Forward:
    for way in (ways,) if callable(ways) else ways:
        forward = way(forward)
    return forward
