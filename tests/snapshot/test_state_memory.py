"""Buffers in memory of every kind, and in other memory when the backward comes: right, and not written to for nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from oracle import compare
from state_programs import Programs, Wrap, backward, curve, gradients, leaf
from torch import Tensor, nn

import reactivate

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right = PROGRAMS.right
STEPS = 7  # the first, second and fourth call are compared; what begins later is not


Op = Callable[[Tensor, Tensor], Tensor]


class WithBuffer(nn.Module):
    """Combines its input with a buffer."""

    def __init__(self, buffer: Tensor, op: Op) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("buffer", buffer)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.norm(self.linear(x)), self.buffer).sin()


def steps(
    wrap: Any, make: Callable[[], Tensor], op: Op, change: Callable[[WithBuffer], Any] | None = None
) -> list[Any]:
    """Three steps, the change between forward and backward of the third."""
    module = WithBuffer(make(), op)
    fn = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: list[Any] = []
    for number in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        out = fn(x)
        if number == 2 and change is not None:
            change(module)
        out.sum().backward()
        found += [out, x.grad, *(parameter.grad.clone() for parameter in module.parameters())]
        found += map(dense, module.buffers())
        optimizer.step()
        optimizer.zero_grad()
    return found


def dense(tensor: Tensor) -> Tensor:
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).clone()


def assert_right(*program: Any) -> None:
    compare(lambda wrap: steps(wrap, *program))


@pytest.mark.parametrize("size", [8, 5_000])
def test_memory_for_reading_only(size: int, tmp_path: Path) -> None:
    numpy.arange(size, dtype=numpy.float32).tofile(tmp_path / "file")

    def make() -> Tensor:
        return torch.from_numpy(numpy.memmap(tmp_path / "file", numpy.float32, "r", shape=(size,)))

    assert_right(make, lambda x, buffer: x * buffer[:8])


KINDS: dict[str, tuple[Callable[[], Tensor], Op]] = {
    "strided": (lambda: torch.arange(10_000.0)[::2], lambda x, buffer: x * buffer[:8]),
    "expanded": (lambda: torch.ones(1).expand(5_000), lambda x, buffer: x * buffer[:8]),
    "small and expanded": (lambda: torch.ones(1).expand(8), lambda x, buffer: x * buffer),
    "negated": (lambda: torch.randn(5_000, dtype=torch.cfloat).conj().imag, lambda x, buffer: x * buffer[:8]),
    "sparse": (lambda: torch.tensor([0.0, 1, 0, 2, 0, 3, 0, 4]).to_sparse(), lambda x, buffer: x * buffer.to_dense()),
    "sparse matrix": (lambda: torch.eye(8).to_sparse(), lambda x, buffer: torch.sparse.mm(buffer, x.t()).t()),
    "compressed": (lambda: torch.eye(8).to_sparse_csr(), lambda x, buffer: (buffer @ x.t()).t()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_every_kind(kind: str) -> None:
    assert_right(*KINDS[kind])


def give(make: Callable[[Tensor], Tensor]) -> Callable[[WithBuffer], None]:
    def change(module: WithBuffer) -> None:
        module.buffer.data = make(module.buffer.data)

    return change


CHANGES: dict[str, Callable[[WithBuffer], Any]] = {
    "strided": give(lambda _: torch.arange(16.0)[::2]),
    "other memory": give(lambda data: data + 1),
    "set": lambda module: module.buffer.set_(torch.arange(16.0)[::2]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_memory_before_the_backward(change: str) -> None:
    assert_right(lambda: torch.arange(8.0), torch.add, CHANGES[change])


@pytest.mark.parametrize("size", [8, 4_096])
def test_a_narrower_type_before_the_backward_breaks_no_memory(size: int) -> None:
    program = (lambda: torch.arange(float(size)), lambda x, buffer: x + buffer[:8], give(Tensor.half))
    with suppress(reactivate.errors.ReactivateError):
        assert_right(*program)


@pytest.mark.parametrize("size", [1, 8, 5_000])
def test_memory_that_was_given_back(size: int) -> None:
    torch.manual_seed(0)
    module = WithBuffer(
        torch.arange(float(size)), lambda x, buffer: (x * buffer.sum()).sin() if buffer.data_ptr() else x.sin()
    )
    out = reactivate.checkpoint(module)(torch.randn(4, 8, requires_grad=True))
    module.buffer.untyped_storage().resize_(0)
    with pytest.raises(reactivate.errors.ReactivateError):
        out.sum().backward()
    found, x = [], torch.randn(4, 8)
    for wrap in (lambda module: module, reactivate.checkpoint):
        given = x.clone().requires_grad_()
        wrap(module)(given).sum().backward()
        found.append(given.grad)
    assert torch.equal(*found)


def test_parameters_can_be_swapped_afterwards() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    for _ in range(2):
        reactivate.checkpoint(module)(torch.randn(4, 8, requires_grad=True)).sum().backward()
    module.zero_grad()
    torch.utils.swap_tensors(module[0].weight, nn.Parameter(torch.ones(8, 8)))
    assert torch.equal(module[0].weight, torch.ones(8, 8))


# -- data that other code writes to -----------------------------------------------------------------------------------


@right
def rows_of_a_bank_that_a_region_leaves_out(wrap: Wrap) -> Any:
    """They are written between forward and backward: in the first call, a comparison shows that this does not matter."""
    layer, bank, found = nn.Linear(80, 80), torch.randn(300, 80), []
    checkpointed = wrap(lambda x, length: (layer(x) @ torch.cat([bank[:length], x]).t()).softmax(-1).sin())
    for step in range(STEPS):
        x, length = leaf(3, 80), 10 + 3 * step
        out = checkpointed(x, length)
        with torch.no_grad():
            bank[length : length + 3] = x
        backward(out)
        found.append(x.grad)
    return found, gradients(layer), bank


@pytest.mark.parametrize("kind", ["saved", "computed, without a graph", "a number"])
def test_rows_of_a_bank_that_a_region_reads(kind: str) -> None:
    """In the first call there is no copy: an error. From the next one on there is, and the gradients are right."""
    bank = torch.randn(300, 80)

    def forward(x: Tensor) -> Tensor:
        if kind == "saved":
            return (x * bank[0]).sin()
        return x * (bank[0] * 2) if kind.startswith("computed") else (x * float(bank[0, 0])).sin()

    checkpointed, x = reactivate.checkpoint(forward), leaf(3, 80)
    out = checkpointed(x)
    bank[0] += 1
    with pytest.raises(reactivate.errors.MutationError):
        backward(out)
    for _ in range(3):
        x = leaf(3, 80)
        plain = x.detach().requires_grad_()
        backward(forward(plain))
        out = checkpointed(x)
        bank[0] += 1
        backward(out)
        assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]


# -- memory without contents ------------------------------------------------------------------------------------------


@right
def buffer_that_is_filled_in_part(wrap: Wrap) -> Any:
    """As of the tokens of an expert: the rows that hold anything are computed with, and count for nothing."""
    layer, found = nn.Linear(4, 4), []

    def forward(x: Tensor) -> Tensor:
        rows = x.new_empty(64, 4)
        rows[:3] = layer(x)
        return rows.sin()[:3]

    checkpointed = wrap(forward)
    for _ in range(STEPS):
        junk = [torch.rand(64, 4) for _ in range(9)]
        del junk
        x = leaf(3, 4)
        backward(checkpointed(x))
        found.append(x.grad)
    return found, gradients(layer)


def test_a_difference_beside_memory_without_contents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that do not depend on such memory are compared as always."""
    monkeypatch.setenv("CALLS", "1")

    def forward(x: Tensor) -> Tensor:
        rows = torch.empty(64, 4)
        rows[:3] = x
        os.environ["CALLS"] += "1"  # which no walk sees
        return rows.sin()[:3] + curve(x, int(os.environ["CALLS"]))

    with pytest.raises(reactivate.errors.RecomputeMismatchError):
        backward(reactivate.checkpoint(forward)(leaf(3, 4)))
