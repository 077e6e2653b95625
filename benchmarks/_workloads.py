"""The workloads: small on purpose, so that what a region costs stands out from what it computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _measure import Step
from _subjects import Function
from torch import Tensor, nn


def wave(x: Tensor) -> Tensor:
    """Two ops and one saved tensor: hardly more than the cost of a region."""
    return (x * 2).sin()


def chain(saved_tensors: int) -> Function:
    """One op for each saved tensor."""

    def run(x: Tensor) -> Tensor:
        for _ in range(saved_tensors):
            x = x.sin()
        return x

    return run


def vector(device: torch.device) -> Tensor:
    """The argument of the functions."""
    return torch.randn(16, device=device, requires_grad=True)


def ten_modules(device: torch.device) -> tuple[nn.Module, Tensor]:
    """A block with buffers (batch norm's statistics) and dropout, and its argument."""
    block = nn.Sequential(
        nn.Linear(32, 64),
        nn.BatchNorm1d(64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 32),
        nn.LayerNorm(32),
    )
    return block.to(device), torch.randn(8, 32, device=device, requires_grad=True)


class TransformerBlock(nn.Module):
    """Explicit attention and a gated feed-forward: about 50 ops in the forward pass and 30 saved tensors."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        hidden = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))

    def attention(self, x: Tensor) -> Tensor:
        mixed = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()
        scores = (query @ key.transpose(-2, -1) * query.size(-1) ** -0.5).softmax(-1)
        return self.out((scores @ value).transpose(1, 2).flatten(2))


def transformer_block(device: torch.device) -> tuple[nn.Module, Tensor]:
    """The block and its argument."""
    return TransformerBlock().to(device), torch.randn(2, 8, 32, device=device, requires_grad=True)


def training_step(fn: Function, x: Tensor) -> Step:
    """A forward and a backward pass."""
    gradient = torch.ones_like(fn(x))

    def step() -> None:
        fn(x).backward(gradient)

    return step


def forward_pass(fn: Function, x: Tensor) -> Step:
    """A forward pass with nothing to differentiate."""

    def step() -> None:
        with torch.no_grad():
            fn(x)

    return step


def many_regions(wrap: Callable[[Function], Function], regions: int, x: Tensor) -> Step:
    """A forward pass through as many regions, all of them alive before one backward pass."""
    region = wrap(wave)

    def forward(x: Tensor) -> Tensor:
        for _ in range(regions):
            x = region(x)
        return x

    return training_step(forward, x)
