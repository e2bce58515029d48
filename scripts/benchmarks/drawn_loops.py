"""Training loops, described: what `fuzz_loops` runs, and a test draws at random.

A `Loop` is a description: it can be printed in one line of JSON and read again. Blocks
take and return (rows, length, `WIDTH`); the sizes are such that what blocks save for
the backward is most of what a step holds.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import nn, Tensor


WIDTH = 32
CLASSES = 10
CODES = 16


# -------------------------------------------------------------------- blocks


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.gelu(self.up(x)))
        return x + found


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(found.transpose(1, 2).flatten(2)))
        result: Tensor = self.dropout(self.mlp(x))
        return result


class Convolution(nn.Module):
    """Its batch norm overwrites buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).unflatten(2, (-1, 8))
        found: Tensor = self.norm(self.conv(image)).relu()
        return x + found.flatten(2).transpose(1, 2)


class Lstm(nn.Module):
    """A cell that takes the quarters of a text one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        quarters = x.unflatten(1, (4, -1)).unbind(1)
        h = c = torch.zeros_like(quarters[0]).flatten(0, 1)
        found = []
        for quarter in quarters:
            h, c = self.cell(quarter.flatten(0, 1), (h, c))
            found.append(h.view_as(quarter))
        return x + torch.cat(found, 1)


class GraphAttention(nn.Module):
    """Every token has edges from four others."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        nodes = self.values(x.flatten(0, 1))
        count = nodes.shape[0]
        target = torch.arange(count, device=x.device).repeat(4)
        source = (torch.arange(4 * count, device=x.device) * 5 + 3) % count
        ends = self.scores(nodes)
        weights = F.leaky_relu(ends[source, 0] + ends[target, 1], 0.2).exp()
        total = torch.zeros_like(ends[:, 0]).index_add(0, target, weights)
        messages = nodes[source] * (weights / total[target])[:, None]
        found = torch.zeros_like(nodes).index_add(0, target, messages)
        return x + F.elu(found).view_as(x)


class Codebook(nn.Module):
    """A buffer that is read and then overwritten; gradients pass straight through."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(CODES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x)).flatten(0, 1)
        chosen = self.codes[torch.cdist(h, self.codes).argmin(-1)]
        # Its gradient reads the codes that were there.
        near = (h * chosen).sum(-1, keepdim=True).tanh()
        with torch.no_grad():
            self.codes.copy_(self.codes * 0.9 + h[:CODES] * 0.1)
        return x + (near * h + (chosen - h).detach()).view_as(x)


class Experts(nn.Module):
    """Each of two experts takes the half of the tokens that it scores highest."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares = self.gate(tokens).softmax(-1)
        weights, chosen = shares.topk(tokens.shape[0] // 2, dim=0)
        found = torch.zeros_like(tokens)
        for at, expert in enumerate(self.experts):
            own = chosen[:, at]
            found = found.index_add(0, own, expert(tokens[own]) * weights[:, at, None])
        return x + found.view_as(x)


class Lora(nn.Module):
    """Frozen weights beside trained ones of a low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = Mlp().requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.frozen(x) + self.up(self.down(x))
        return found.tanh()


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def other(x: Tensor) -> Tensor:
            found: Tensor = self.other(x)
            return x + found.sin()

        found: Tensor = torch.cond(x.sum() > 0, self.one.forward, other, (x,))
        return found


BLOCKS: dict[str, Callable[[float], nn.Module]] = {
    "mlp": lambda _: Mlp(),
    "transformer": Transformer,
    "convolution": lambda _: Convolution(),
    "lstm": lambda _: Lstm(),
    "graph": lambda _: GraphAttention(),
    "codebook": lambda _: Codebook(),
    "experts": lambda _: Experts(),
    "lora": lambda _: Lora(),
    "cond": lambda _: Cond(),
}


# ------------------------------------------------------------------ described


@dataclass(frozen=True)
class Program:
    """Models, each the names of its blocks; what one returns is the next one's input.

    The last has a head, and returns the loss alone, or logits as well: those are
    "dropped" before the backward, as they are or "flat", or "held" to the step's end, or
    "kept" until others take their place. Compiled are ``whole`` models, or their blocks.
    """

    models: tuple[tuple[str, ...], ...]
    whole: bool = True
    checkpoints: bool = False
    outputs: str = "loss"


@dataclass(frozen=True)
class Turn:
    """A step of a program: ``batches`` of rows and a length.

    ``what`` it does instead of training, one of `KINDS_OF_TURNS`.
    """

    size: tuple[int, int]
    program: int = 0
    batches: int = 1
    what: str = ""


# A forward without a backward, one without gradients, nothing at all, and exceptions
# before the first backward and after the last.
KINDS_OF_TURNS = ("skipped", "no_grad", "empty", "raises early", "raises late")


@dataclass(frozen=True)
class Loop:
    """A training loop. ``dynamic`` is torch.compile's, and ``zero_grad`` where in a step.

    If it ``changes`` them, what each block returns is changed in place.

    ``share`` is a StepBudget's; without it, ``part`` is that of the highest peak without
    a budget, which is given as ``peak_bytes``.
    """

    programs: tuple[Program, ...]
    turns: tuple[Turn, ...]
    share: Optional[float] = None
    part: float = 1.0
    dynamic: Optional[bool] = False
    zero_grad: str = "last"
    optimizer: str = "sgd"
    dropout: float = 0.0
    changes: bool = False

    def __str__(self) -> str:
        """One line of JSON, without what is as usual."""
        return json.dumps(_unusual(self))


def _unusual(of: Any) -> Any:
    if isinstance(of, tuple):
        return [*map(_unusual, of)]
    if not isinstance(of, (Loop, Program, Turn)):
        return of
    values = ((each, getattr(of, each.name)) for each in fields(of))
    return {each.name: _unusual(v) for each, v in values if v != each.default}


def read(text: str) -> Loop:
    """What `Loop` prints."""
    found = json.loads(text)
    programs = (
        Program(**{**each, "models": tuple(map(tuple, each["models"]))})
        for each in found["programs"]
    )
    turns = (Turn(**{**each, "size": tuple(each["size"])}) for each in found["turns"])
    return Loop(**{**found, "programs": tuple(programs), "turns": tuple(turns)})
