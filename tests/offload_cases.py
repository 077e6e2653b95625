"""A storage in Python, models whose tensors wait in storages, and what their training gives."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import torch
from oracle import assert_bitwise
from torch import Tensor, nn


class Shelf:
    """Keep the bits of tensors elsewhere in memory.

    Attributes:
        taken, given: how many.
        held: references to the handles.
    """

    def __init__(self) -> None:
        self.taken = self.given = 0
        self.held: list[Any] = []

    def save(self, tensor: Tensor) -> Any:
        assert not torch.is_grad_enabled()
        self.taken += 1
        handle = Handle(tensor.detach().clone())
        self.held.append(ref(handle))
        return handle

    def load(self, handle: Any) -> Tensor:
        self.given += 1
        return handle.copy.clone()

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.held)


class Handle:
    def __init__(self, copy: Tensor) -> None:
        self.copy = copy

    def held(self) -> list[Tensor]:
        return [self.copy]


def same(some: Any, others: Any) -> bool:
    for number, (one, other) in enumerate(zip(some, others, strict=True)):
        assert_bitwise(one, other, f"number {number} of what training gives")
    return True


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def grads(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def trained(model: nn.Module, steps: int = 3) -> list[Any]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    seen: list[Any] = []
    for _ in range(steps):
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        seen += [loss.detach().clone(), *(gradient.clone() for gradient in grads(model) if gradient is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen
