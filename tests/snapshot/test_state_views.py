"""Buffers that lie another way, or are read another way, between a forward and its backward: `buffer.data = a view`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import compare
from torch import Tensor, nn

import reactivate

SHAPES = {"few": (2, 2), "vector": (64,), "long vector": (5_000,), "matrix": (80, 80), "huge vector": (70_000,)}
"""For each way in which the engine keeps track of a tensor, one."""


class Table(nn.Module):
    """A function of a buffer that nobody writes to; what is saved depends on how the buffer is read."""

    table: Tensor

    def __init__(self, shape: tuple[int, ...], kind: torch.dtype) -> None:
        super().__init__()
        size = torch.Size(shape).numel()
        table = torch.linspace(0.1, 1, size).to(kind) * (1 + 0.5j if kind.is_complex else 1)
        self.register_buffer("table", table.reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.reshape(-1)
        if table.is_complex():
            table = table.real + 2 * table.imag
        return (x * table).sin().exp()


def negated(tensor: Tensor) -> Tensor:
    return torch._neg_view(tensor)


def conjugated(tensor: Tensor) -> Tensor:
    return tensor.conj()


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def flipped_by_strides(tensor: Tensor) -> Tensor:
    return tensor.as_strided(tensor.shape, tensor.stride()[::-1])


def moved(tensor: Tensor) -> Tensor:
    return tensor * 2


def repeated(tensor: Tensor) -> Tensor:
    return tensor.as_strided(tensor.shape, [0] * tensor.ndim)


def form_of(tensor: Tensor) -> list[Any]:
    """The contents, and how they lie."""
    return [tensor.clone(), tensor.stride(), tensor.is_neg(), tensor.is_conj()]


CASES = [
    *((change, name, torch.float32) for change in (negated, moved, repeated) for name in SHAPES),
    *((change, name, torch.float32) for change in (transposed, flipped_by_strides) for name in ("few", "matrix")),
    *((change, name, torch.complex64) for change in (conjugated, negated, moved) for name in SHAPES),
]


@pytest.mark.parametrize("is_undone", [False, True])
@pytest.mark.parametrize(("change", "name", "kind"), CASES)
def test_a_buffer_that_is_read_another_way_between(
    change: Callable[[Tensor], Tensor], name: str, kind: torch.dtype, is_undone: bool
) -> None:
    def run(wrap: Callable[[nn.Module], Any]) -> list[Any]:
        module = Table(SHAPES[name], kind)
        fn = wrap(module)
        x = torch.randn(torch.Size(SHAPES[name]).numel(), requires_grad=True)
        found: list[Any] = []
        for number in range(4):
            before = module.table.data
            out = fn(x)
            if number == 2:
                module.table.data = change(module.table.data)
            found += [out, *torch.autograd.grad(out.sum(), x), *form_of(module.table)]
            if is_undone:
                module.table.data = before
        return found

    assert compare(run).recomputations >= 4


@pytest.mark.parametrize(("change", "name", "kind"), CASES)
def test_a_forward_that_reads_its_buffer_another_way(
    change: Callable[[Tensor], Tensor], name: str, kind: torch.dtype
) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        module = Table(SHAPES[name], kind)

        def turn(x: Tensor) -> Tensor:
            out = module(x)
            module.table.data = change(module.table.data)
            return out

        fn = wrap(turn)
        x = torch.randn(torch.Size(SHAPES[name]).numel(), requires_grad=True)
        found: list[Any] = []
        for _ in range(4):
            out = fn(x)
            found += [out, *torch.autograd.grad(out.sum(), x), *form_of(module.table)]
        return found

    compare(run)


@pytest.mark.parametrize("size", [2, 80])
def test_a_symmetric_buffer_that_is_transposed_between(size: int) -> None:
    module = nn.Module()
    module.register_buffer("table", torch.arange(1.0, size * size + 1).reshape(size, size))
    module.table += module.table.t().clone()

    def scaled(x: Tensor) -> Tensor:
        return (x * module.table.stride(0)).sin()

    checkpointed = reactivate.checkpoint(scaled)
    for _ in range(4):
        x = torch.randn(3, requires_grad=True)
        (expected,) = torch.autograd.grad(scaled(x).sum(), x)
        out = checkpointed(x).sum()
        module.table.data = module.table.data.t()
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_a_module_with_a_view_whose_base_was_written_to() -> None:
    """Autograd cannot differentiate one of several views any more: to ask for its graph is an error."""

    def gradients(wrap: Callable[[nn.Module], Any]) -> list[Tensor | None]:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        base = module[0].weight * 1
        module[0].rows = base.unbind()[0]
        with torch.no_grad():
            base.mul_(2)
        with pytest.raises(RuntimeError, match="multiple views"):
            _ = module[0].rows.grad_fn
        for _ in range(3):
            wrap(module)(torch.randn(2, 4)).sin().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    ran = compare(gradients)
    assert ran.regions == ran.recomputations == 3
