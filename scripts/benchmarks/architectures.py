"""Real architectures, written in code: modules from inputs to a scalar loss.

``module(*inputs).backward()`` is a training step's forward and backward.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn, Tensor


# ------------------------------------------------------------- transformers


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only transformer and of one batch of tokens."""

    width: int = 96
    heads: int = 4
    key_value_heads: int = 2
    mlp: int = 256
    layers: int = 4
    vocabulary: int = 512
    batch: int = 4
    tokens: int = 128
    rotary: bool = False
    # More than one: the MLP of each layer is a mixture, with this many per token.
    experts: int = 1
    experts_per_token: int = 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of ``x`` [batch, heads, tokens, head width]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.groups = shape.heads // shape.key_value_heads
        narrow = shape.key_value_heads * self.head_width
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, narrow, bias=False)
        self.value = nn.Linear(shape.width, narrow, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        def by_head(projected: Tensor) -> Tensor:
            batch, tokens, _ = projected.shape
            return projected.view(batch, tokens, -1, self.head_width).transpose(1, 2)

        query, key = by_head(self.query(x)), by_head(self.key(x))
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        value = by_head(self.value(x))
        if self.groups > 1:
            key = key.repeat_interleave(self.groups, dim=1)
            value = value.repeat_interleave(self.groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class GatedMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Mixture(nn.Module):
    """Top-k mixture of gated MLPs; each expert takes up to its capacity of tokens.

    Tokens are dispatched by index into [experts, capacity, width], so that all shapes
    are static; what overflows an expert passes by on the residual stream alone.
    """

    CAPACITY = 1.25  # of an even share

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.experts, self.chosen = shape.experts, shape.experts_per_token
        self.router = nn.Linear(shape.width, self.experts, bias=False)

        def expert_weights(rows: int, columns: int) -> nn.Parameter:
            weights = torch.empty(self.experts, rows, columns)
            return nn.Parameter(weights.normal_(std=rows**-0.5))

        self.gate = expert_weights(shape.width, shape.mlp)
        self.up = expert_weights(shape.width, shape.mlp)
        self.down = expert_weights(shape.mlp, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        capacity = int(self.CAPACITY * len(tokens) * self.chosen / self.experts)
        weights, expert = self.router(tokens).softmax(-1).topk(self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        expert = expert.flatten()
        place_of_each = F.one_hot(expert, self.experts).cumsum(0) - 1
        place = place_of_each.gather(1, expert.unsqueeze(1)).squeeze(1)
        kept = place < capacity
        slot = torch.where(kept, expert * capacity + place, self.experts * capacity)
        repeated = tokens.repeat_interleave(self.chosen, dim=0)
        # One row more than there are slots takes what overflows.
        queue = tokens.new_zeros(self.experts * capacity + 1, tokens.shape[1])
        queue = queue.index_copy(0, slot, repeated)
        queued = queue[:-1].view(self.experts, capacity, -1)
        hidden = F.silu(queued @ self.gate) * (queued @ self.up)
        done = F.pad((hidden @ self.down).flatten(0, 1), (0, 0, 0, 1))
        taken = done[slot] * (weights * kept).unsqueeze(1)
        result: Tensor = taken.view(len(tokens), self.chosen, -1).sum(1).view_as(x)
        return result


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = Mixture(shape) if shape.experts > 1 else GatedMLP(shape)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Transformer(nn.Module):
    """Llama-like; maps token ids [batch, tokens] and their successors to the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def rotary(self, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
        half = self.shape.width // self.shape.heads // 2
        exponents = torch.arange(half, device=like.device, dtype=torch.float32) / half
        positions = torch.arange(tokens, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, 10_000**-exponents).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotary = self.rotary(tokens.shape[1], x) if self.shape.rotary else None
        for block in self.blocks:
            x = block(x, rotary)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class ClassicShape(Shape):
    """Of a transformer with biases, LayerNorm and a GELU MLP."""

    width: int = 256
    mlp: int = 1024
    layers: int = 8
    batch: int = 8
    tokens: int = 512
    dropout: float = 0.0
    causal: bool = False
    norm_first: bool = True
    # Attention as two products with a softmax between them, as before fused kernels.
    written_out: bool = False
    # One projection to query, key and value (GPT-2), or three (BERT, ViT).
    joined: bool = False
    gelu: str = "none"


class ClassicBlock(nn.Module):
    def __init__(self, shape: ClassicShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        if shape.joined:
            self.projections = nn.ModuleList([nn.Linear(width, 3 * width)])
        else:
            self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, shape.mlp)
        self.down = nn.Linear(shape.mlp, width)
        self.attention_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(shape.dropout)

    def attention(self, x: Tensor) -> Tensor:
        shape = self.shape
        projected = [projection(x) for projection in self.projections]
        if shape.joined:
            projected = list(projected[0].split(shape.width, dim=-1))
        query, key, value = (
            part.view(*part.shape[:-1], shape.heads, -1).transpose(1, 2)
            for part in projected
        )
        dropout = shape.dropout if self.training else 0.0
        if shape.written_out:
            scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            shares = F.dropout(scores.softmax(-1), dropout)
            mixed = shares @ value
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=shape.causal
            )
        result: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return result

    def mlp(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x), approximate=self.shape.gelu)
        result: Tensor = self.dropout(self.down(hidden))
        return result

    def forward(self, x: Tensor) -> Tensor:
        if self.shape.norm_first:
            x = x + self.attention(self.attention_norm(x))
            x = x + self.mlp(self.mlp_norm(x))
        else:
            x = self.attention_norm(x + self.attention(x))
            x = self.mlp_norm(x + self.mlp(x))
        return x


class Language(nn.Module):
    """Maps token ids [batch, tokens] and those to predict to the mean loss.

    With its norms first it is GPT-2, and with its norms behind BERT.
    """

    def __init__(self, shape: ClassicShape) -> None:
        super().__init__()
        width = shape.width
        self.embedding = nn.Embedding(shape.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Embedding(shape.tokens, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(*(ClassicBlock(shape) for _ in range(shape.layers)))
        self.head = nn.Linear(width, shape.vocabulary, bias=not shape.causal)
        self.head.weight = self.embedding.weight
        self.dense: nn.Module | None = None
        if not shape.norm_first:
            dense = nn.Linear(width, width)
            self.dense = nn.Sequential(dense, nn.GELU(), nn.LayerNorm(width))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(place)
        if self.dense is None:
            x = self.norm(self.blocks(self.dropout(x)))
        else:
            x = self.dense(self.blocks(self.dropout(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """Maps images [batch, 3, side, side] and their classes to the mean loss."""

    def __init__(self, shape: ClassicShape, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, patch, stride=patch)
        self.summary = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.positions = nn.Parameter(torch.zeros(1, shape.tokens + 1, shape.width))
        self.blocks = nn.Sequential(*(ClassicBlock(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.summary.expand(len(x), -1, -1), x), dim=1)
        x = self.norm(self.blocks(x + self.positions))
        return F.cross_entropy(self.head(x[:, 0]), targets)


# ------------------------------------------------------------- convolutions


def normed(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(
        inputs, outputs, size, stride=stride, padding=size // 2, bias=False
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow = normed(inputs, width, 1)
        self.middle = normed(width, width, 3, stride)
        self.widen = normed(width, outputs, 1)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            self.shortcut = normed(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.narrow(x))
        h = F.relu(self.middle(h))
        return F.relu(self.widen(h) + self.shortcut(x))


class ResNet(nn.Module):
    """Maps images [batch, 3, side, side] and their classes to the mean loss."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = normed(3, width, 7, 2)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(depths):
            inner = width << stage
            for index in range(depth):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(inputs, inner, stride))
                inputs = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.stem(images))))
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


def two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    first, second = normed(inputs, outputs, 3), normed(outputs, outputs, 3)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


class UNet(nn.Module):
    """Maps images [batch, 3, side, side] and a class per pixel to the mean loss."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(
            two_convolutions(i, o) for i, o in itertools.pairwise([3, *widths])
        )
        pairs = list(itertools.pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, n, 2, stride=2) for n, w in pairs)
        self.merge = nn.ModuleList(two_convolutions(2 * n, n) for n, _ in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = images
        skips: list[Tensor] = []
        for stage in self.down:
            x = stage(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat((skips.pop(), up(x)), dim=1))
        return F.cross_entropy(self.head(x), targets)


# -------------------------------------------------------------- other kinds


class Towers(nn.Module):
    """Two encoders of the pairs [batch, width] in a batch; finds each one's partner.

    Its scores are [batch, batch]: as large for many pairs as a large vocabulary's.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()

        def tower() -> nn.Module:
            up, down = nn.Linear(width, inner), nn.Linear(inner, width)
            return nn.Sequential(up, nn.GELU(), down, nn.LayerNorm(width))

        self.query, self.passage = tower(), tower()

    def forward(self, queries: Tensor, passages: Tensor) -> Tensor:
        scores = self.query(queries) @ self.passage(passages).t()
        pairs = torch.arange(len(queries), device=queries.device)
        return F.cross_entropy(scores.float(), pairs)


class MLP(nn.Module):
    """Maps features [batch, widths[0]] and their classes to the mean loss."""

    def __init__(self, widths: Sequence[int], classes: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(F.gelu(layer(x)))
        return F.cross_entropy(self.head(x), targets)


class LSTM(nn.Module):
    """Stacked LSTM cells, unrolled over the steps of x [steps, batch, width]."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        states = [(torch.zeros_like(x[0]), torch.zeros_like(x[0]))] * len(self.cells)
        for h in x.unbind():
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(h, states[layer])
                h = states[layer][0]
        return F.cross_entropy(self.head(h), targets)
