"""Buffers that lie another way, or are read another way, between a forward and its backward: `buffer.data = a view`."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from oracle import assert_bitwise, compare
from several import each
from state_programs import Wrap
from torch import Tensor, nn

import reactivate
from reactivate._snapshot.rewound_tensors import rewound_memory

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


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": torch._neg_view,
    "conjugated": Tensor.conj,
    "transposed": Tensor.t,
    "flipped_by_strides": lambda tensor: tensor.as_strided(tensor.shape, tensor.stride()[::-1]),
    "moved": lambda tensor: tensor * 2,
    "repeated": lambda tensor: tensor.as_strided(tensor.shape, [0] * tensor.ndim),
}


def form_of(tensor: Tensor) -> list[Any]:
    """The contents, and how they lie."""
    return [tensor.clone(), tensor.stride(), tensor.is_neg(), tensor.is_conj()]


CASES = [
    *((change, name, torch.float32) for change in ("negated", "moved", "repeated") for name in SHAPES),
    *((change, name, torch.float32) for change in ("transposed", "flipped_by_strides") for name in ("few", "matrix")),
    *((change, name, torch.complex64) for change in ("conjugated", "negated", "moved") for name in SHAPES),
]


@pytest.mark.parametrize("is_undone", [False, True])
@each(("change", "name", "kind"), CASES)
def test_a_buffer_that_is_read_another_way_between(change: str, name: str, kind: torch.dtype, is_undone: bool) -> None:
    def run(wrap: Callable[[nn.Module], Any]) -> list[Any]:
        module = Table(SHAPES[name], kind)
        fn = wrap(module)
        x = torch.randn(torch.Size(SHAPES[name]).numel(), requires_grad=True)
        found: list[Any] = []
        for number in range(4):
            before = module.table.data
            out = fn(x)
            if number == 2:
                module.table.data = WAYS[change](module.table.data)
            found += [out, *torch.autograd.grad(out.sum(), x), *form_of(module.table)]
            if is_undone:
                module.table.data = before
        return found

    assert compare(run).recomputations >= 4


@each(("change", "name", "kind"), CASES)
def test_a_forward_that_reads_its_buffer_another_way(change: str, name: str, kind: torch.dtype) -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        module = Table(SHAPES[name], kind)

        def turn(x: Tensor) -> Tensor:
            out = module(x)
            module.table.data = WAYS[change](module.table.data)
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


# -- small buffers that an earlier region has noted ---------------------------------------------------------------------


class Small(nn.Module):
    """Two buffers of a few bytes, one of which every call writes to."""

    table: Tensor
    mean: Tensor

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0).reshape(2, 2).to(kind) + (1j if kind.is_complex else 0))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
            self.table.mul_(1.5)
        table = torch.view_as_real(self.table.resolve_conj()).reshape(-1)[:4] if self.table.is_complex() else self.table
        return (x * self.mean + x * table.reshape(-1)).sin()  # which saves a view of the table


def transposed(module: Small) -> None:
    module.table.data = module.table.data.t()


def of_other_shape(module: Small) -> None:
    module.table.data = module.table.data.reshape(4, 1)


def negated(module: Small) -> None:
    module.table.data = torch._neg_view(module.table.data)


def conjugated(module: Small) -> None:
    module.table.data = module.table.data.conj()


def negated_and_doubled(module: Small) -> None:
    negated(module)
    module.table.data.mul_(2)


def conjugated_and_doubled(module: Small) -> None:
    conjugated(module)
    module.table.data.mul_(2)


def elsewhere(module: Small) -> None:
    module.table.data = module.table.data.clone() + 1


def elsewhere_and_back(module: Small) -> None:
    """Memory is used again for other elements, unless something holds it, as a saved view does."""
    address = module.table.data_ptr()
    module.table.data = torch.zeros(2, 2)
    found = [torch.full((2, 2), 7.0) for _ in range(1000)]
    module.table.data = next((tensor for tensor in found if tensor.data_ptr() == address), found[0])


def of_another_class(module: Small) -> None:
    module._buffers["table"] = module.table.as_subclass(Marked)


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


BETWEEN = [transposed, of_other_shape, negated, conjugated, elsewhere, of_another_class]
BEFORE = [*BETWEEN, negated_and_doubled, conjugated_and_doubled, elsewhere_and_back]


@each(("change", "is_between"), [*((item, True) for item in BETWEEN), *((item, False) for item in BEFORE)])
def test_a_small_buffer_that_changes_its_form(change: Callable[[Small], None], is_between: bool) -> None:
    def run(wrap: Callable[[nn.Module], Any]) -> list[Any]:
        module = Small(torch.complex64 if change in (conjugated, conjugated_and_doubled) else torch.float32)
        fn = wrap(module)
        x = torch.randn(3, 4, requires_grad=True)
        found: list[Any] = []
        for number in range(4):
            if number == 2 and is_between:
                change(module)
            out = fn(x)
            if number == 2 and not is_between:
                change(module)
            found += [out, *torch.autograd.grad(out.sum(), x), module.table.clone(), module.mean.clone()]
        return [*found, *(tensor.stride() for tensor in found)]

    compare(run)


@pytest.mark.parametrize("is_written", [False, True])
def test_memory_counts_as_rewound_only_where_it_is(is_written: bool) -> None:
    """A buffer that holds what it held, as most do, is saved as it is."""
    marked: SimpleQueue[bool] = SimpleQueue()  # which no recomputation rewinds

    def gradient(wrap: Wrap) -> Tensor:
        scale = torch.tensor([2.0, 3.0])

        def scaled(x: Tensor) -> Tensor:
            if reactivate.is_recomputing():
                marked.put(bool(rewound_memory))
            return (x * scale).sin() * scale

        x = torch.tensor([0.5, -1.5], requires_grad=True)
        out = wrap(scaled)(x)
        if is_written:
            scale.numpy()[0] = 7.0  # without a new version, so that autograd reads it
        (found,) = torch.autograd.grad(out.sum(), x)
        return found

    assert_bitwise(gradient(lambda fn: fn), gradient(reactivate.checkpoint), "gradient")
    assert marked.get() is is_written and marked.empty()
