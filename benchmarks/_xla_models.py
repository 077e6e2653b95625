"""The models of the benchmark on XLA: stacks of equal blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

HEADS = 4


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        blocks: how many there are.
        width: features between the blocks; inside of one there are four times as many.
        rows: how many rows of features go in: the batch, or batch and length.
    """

    blocks: int
    width: int
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.blocks} blocks of width {self.width}, {' x '.join(map(str, self.rows))} rows"


class Mlp(nn.Sequential):
    """Linear, ReLU, Linear."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class OpenEnded(Mlp):
    """Ends in ops that save nothing: nothing of the region waits for the gradient of what it returns."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return (input + super().forward(input) + 1.0).view(len(input), -1)


class Transformer(nn.Module):
    """LayerNorm, attention, LayerNorm, MLP, written out in products and softmax."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = Mlp(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.out(self.attention(self.norms[0](x))))
        return x + self.drop(self.mlp(self.norms[1](x)))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5, -1)
        return (self.drop(weights) @ v).transpose(1, 2).reshape(x.shape)


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        block: width -> a block.
        products: matrix products in a block's forward pass; its backward has twice as many.
        recomputed: how many of them a recomputation needs: not the last, of which no backward reads the result.
        target: what the temp may be at most, as a part of that without checkpointing.
    """

    name: str
    title: str
    block: Callable[[int], nn.Module]
    size: Size
    products: int
    recomputed: int
    target: float

    def resized(self, size: Size) -> Model:
        return replace(self, size=size)

    def make(self) -> tuple[nn.Sequential, Tensor]:
        """The model and its input, the same ones every time."""
        torch.manual_seed(0)
        blocks = nn.Sequential(*(self.block(self.size.width) for _ in range(self.size.blocks)))
        return blocks, torch.randn(*self.size.rows, self.size.width)


_MLP, _ROWS, _TRANSFORMER = Size(6, 768, (2048,)), Size(6, 512, (4096,)), Size(6, 256, (16, 128))
MODELS = {
    model.name: model
    for model in (
        Model("mlp", "An MLP", Mlp, _MLP, 2, 1, 0.35),
        Model("rows", "An MLP whose activations are larger than its weights", Mlp, _ROWS, 2, 1, 0.35),
        Model("open", "An MLP whose regions end in ops that save nothing", OpenEnded, _MLP, 2, 1, 0.5),
        Model("dropout", "A transformer, dropout 0.1", lambda n: Transformer(n, 0.1), _TRANSFORMER, 6, 5, 0.4),
        Model("transformer", "A transformer, dropout 0", lambda n: Transformer(n, 0.0), _TRANSFORMER, 6, 5, 0.4),
    )
}
