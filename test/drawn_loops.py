"""Training loops, described, and what each step of one computes and holds.

Their small nets are trained on a CPU, operator by operator. Blocks take and return (rows,
length, `WIDTH`); the sizes are such that what blocks save for the backward is most of what
a step holds.
"""

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from benchmarks.meters import allocations, digest
from benchmarks.plans import warnings_noted
from benchmarks.ways import OPERATORS
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint


WIDTH = 32
CLASSES = 10
CODES = 16


# -------------------------------------------------------------------- blocks


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(found.transpose(1, 2).flatten(2)))
        return self.dropout(self.mlp(x))


class Convolution(nn.Module):
    """Its batch norm overwrites buffers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, x):
        image = x.transpose(1, 2).unflatten(2, (-1, 8))
        found = self.norm(self.conv(image)).relu()
        return x + found.flatten(2).transpose(1, 2)


class Lstm(nn.Module):
    """A cell that takes the quarters of a text one after the other."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        quarters = x.unflatten(1, (4, -1)).unbind(1)
        h = c = torch.zeros_like(quarters[0]).flatten(0, 1)
        found = []
        for quarter in quarters:
            h, c = self.cell(quarter.flatten(0, 1), (h, c))
            found.append(h.view_as(quarter))
        return x + torch.cat(found, 1)


class GraphAttention(nn.Module):
    """Every token has edges from four others."""

    def __init__(self):
        super().__init__()
        self.values, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
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

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(CODES, WIDTH))

    def forward(self, x):
        h = F.gelu(self.up(x)).flatten(0, 1)
        chosen = self.codes[torch.cdist(h, self.codes).argmin(-1)]
        # Its gradient reads the codes that were there.
        near = (h * chosen).sum(-1, keepdim=True).tanh()
        with torch.no_grad():
            self.codes.copy_(self.codes * 0.9 + h[:CODES] * 0.1)
        return x + (near * h + (chosen - h).detach()).view_as(x)


class Experts(nn.Module):
    """Each of two experts takes the half of the tokens that it scores highest."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x):
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

    def __init__(self):
        super().__init__()
        self.frozen = Mlp().requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return (self.frozen(x) + self.up(self.down(x))).tanh()


class SpectralNorm(nn.Module):
    """Computes a weight from a parameter, and overwrites buffers."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = spectral_norm(nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Cond(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = Mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def other(x):
            return x + self.other(x).sin()

        return torch.cond(x.sum() > 0, self.one.forward, other, (x,))


BLOCKS = {
    "mlp": lambda _: Mlp(),
    "transformer": Transformer,
    "convolution": lambda _: Convolution(),
    "lstm": lambda _: Lstm(),
    "graph": lambda _: GraphAttention(),
    "codebook": lambda _: Codebook(),
    "experts": lambda _: Experts(),
    "lora": lambda _: Lora(),
    "spectral": lambda _: SpectralNorm(),
    "cond": lambda _: Cond(),
}


# ------------------------------------------------------------------ described


@dataclass(frozen=True)
class Program:
    """Models, each the names of its blocks; what one returns is the next one's input.

    The last has a head, and returns the loss alone, or logits as well: those are
    "dropped" before the backward, as they are or "flat", or "held" to the step's end, or
    "kept" until others take their place. Compiled are ``whole`` models, or their blocks.
    There may be ``checkpoints`` around so many blocks each.
    """

    models: tuple[tuple[str, ...], ...]
    whole: bool = True
    checkpoints: int = 0
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


# ----------------------------------------------------------------------- run


class Planned(Exception):
    """What a loop raises by itself, catches, and goes on after."""


class Model(nn.Module):
    """Blocks, and in a program's last model, a head."""

    def __init__(self, blocks, program, loop):
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[name](loop.dropout) for name in blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.outputs = program.outputs
        self.checkpoints = program.checkpoints
        self.keeps_state = loop.dropout > 0
        self.changes = loop.changes

    def forward(self, x, wanted=None):
        together = self.checkpoints or 1
        for first in range(0, len(self.blocks), together):
            blocks = nn.Sequential(*self.blocks[first : first + together])
            if self.checkpoints:
                x = checkpoint(
                    blocks, x, use_reentrant=False, preserve_rng_state=self.keeps_state
                )
            else:
                x = blocks(x)
            if self.changes:
                x.mul_(0.9)
        if wanted is None:
            return x
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        if self.outputs == "loss":
            return loss
        return loss, logits.flatten(0, 1) if self.outputs == "flat" else logits


class Trained:
    """A program, compiled, with its optimizer."""

    def __init__(self, program, loop):
        self.outputs = program.outputs
        models = [Model(blocks, program, loop) for blocks in program.models]
        for model in models[:-1]:
            del model.head
        self.parameters = [p for m in models for p in m.parameters() if p.requires_grad]
        optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[loop.optimizer]
        self.optimizer = optimizer(self.parameters, lr=0.01)
        blocks = [block for model in models for block in model.blocks]
        for part in models if program.whole else blocks:
            part.compile(backend=OPERATORS, dynamic=loop.dynamic)
        self.models = models
        self.kept = None

    def forward(self, x, wanted):
        for model in self.models[:-1]:
            x = model(x)
        return self.models[-1](x, wanted)

    def take(self, batches, turn, zero_grad):
        """What a step computes, without keeping it: losses, then its gradients."""
        if zero_grad == "first":
            self.optimizer.zero_grad()
        for x, wanted in batches:
            logits = None
            if self.outputs == "loss":
                loss = self.forward(x, wanted)
            elif self.outputs in ("held", "kept"):
                loss, logits = self.forward(x, wanted)
            else:
                loss = self.forward(x, wanted)[0]
            if self.outputs == "kept":
                self.kept = logits
            yield loss.item()
            if turn.what == "raises early":
                raise Planned
            if turn.what in ("skipped", "no_grad"):
                continue
            (loss / len(batches)).backward()
        yield digest(each.grad for each in self.parameters)
        if turn.what == "raises late":
            raise Planned
        if turn.what not in ("skipped", "no_grad"):
            self.optimizer.step()
        if zero_grad == "last":
            self.optimizer.zero_grad()


def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*size, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, size, generator=generator)


def run(loop, budget=None):
    """What each step computes, the most that it holds, and what it warns of."""
    torch._dynamo.reset()
    gc.collect()
    # The collections between steps need not look at what is there by now.
    gc.freeze()
    torch.manual_seed(0)
    programs = [Trained(program, loop) for program in loop.programs]
    for at, turn in enumerate(loop.turns):
        computed = []
        step = _step(loop, turn, at, programs[turn.program], budget, computed)
        gc.collect()
        with warnings_noted() as said:
            # The first steps too: the profiler tells only of those frees whose memory it
            # has seen allocated, as gradients that a later step gives up.
            peak = allocations(step, scratch=False)[1]
        yield computed, peak, said


def _step(loop, turn, at, program, budget, computed):
    count = 0 if turn.what == "empty" else turn.batches
    batches = [batch(turn.size, 16 * at + index) for index in range(count)]
    if loop.zero_grad == "outside":
        program.optimizer.zero_grad()

    def step():
        torch.manual_seed(at)
        try:
            with (
                budget or nullcontext(),
                torch.set_grad_enabled(turn.what != "no_grad"),
            ):
                if batches:
                    computed.extend(program.take(batches, turn, loop.zero_grad))
        except Planned:
            computed.append("raised")

    return step
