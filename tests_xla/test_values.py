"""`check="every"` on XLA, the one way to have recomputations compared there; and numbers that follow no seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from lazy import DEVICE, MLP, XLA, Wrap, ours, plain
from torch import Tensor, nn
from torch.nn import functional as F
from torch_xla.experimental.scan import scan

import reactivate
from reactivate import policies
from reactivate.errors import RecomputeMismatchError, UnsupportedError


def values(fn: Any, **options: Any) -> Any:
    return reactivate.checkpoint(fn, check="every", **options)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape, dtype=dtype).to(DEVICE).requires_grad_()


# -- what is wrong ----------------------------------------------------------------------------------------------------


def reader(path: Path) -> Callable[[Tensor], Tensor]:
    """Return a function that reads a file, which grows with each call."""
    path.write_text("a")

    def read(x: Tensor) -> Tensor:
        count = len(path.read_text())
        path.write_text("a" * (count + 1))
        return (x * count).sin().exp()

    return read


def test_a_growing_file(tmp_path: Path) -> None:
    for _ in range(4):
        with pytest.raises(RecomputeMismatchError, match=r"(?s)Op 1 is the first that differs.*aten.mul.*in read"):
            values(reader(tmp_path / "file"))(leaf(4)).sum().backward()


def test_by_default_nothing_is_compared(tmp_path: Path) -> None:
    """To compare, both passes have to run op by op, which rounds otherwise than the plain program: see docs/xla.md."""
    x = leaf(4)
    ours(reader(tmp_path / "file"))(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


# -- what is right ----------------------------------------------------------------------------------------------------


def trained(wrap: Wrap) -> tuple[list[Tensor], list[int]]:
    """Return losses, gradients and buffers of three steps, and the seeds behind them."""
    torch.manual_seed(0)
    model = MLP(blocks=1, dropout=0.3, norm=True).to(DEVICE)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), leaf(8, 16)
    torch_xla.manual_seed(5)
    torch_xla.sync()
    found, seeds = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(F.dropout(x, 0.1), wrap).square().mean()
        loss.backward()
        found += [loss.detach().cpu(), *(item.grad.cpu() for item in model.parameters())]
        optimizer.step()
        torch_xla.sync()
        seeds.append(XLA._xla_get_rng_seed(""))
    return [*found, *(item.cpu() for item in model.buffers())], seeds


def test_steps_op_by_op(op_by_op: None) -> None:
    (expected, seeds), (found, seeds_after) = trained(plain), trained(values)
    assert seeds == seeds_after
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


def test_steps() -> None:
    """Masks and seeds are the plain ones. The regions run op by op, and round otherwise than the plain step, one program."""
    (expected, seeds), (found, seeds_after) = trained(plain), trained(values)
    assert seeds == seeds_after
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_an_input_that_has_not_been_computed() -> None:
    """The input is computed before the first op: in one program with that op it would be rounded otherwise."""
    torch.manual_seed(0)
    norm, block, x = nn.LayerNorm(64).to(DEVICE), nn.Linear(64, 64).to(DEVICE), leaf(32, 64)
    torch_xla.sync()
    for _ in range(3):
        recorded = F.softmax(F.gelu(norm(x) * 3), -1).cumsum(-1)
        values(lambda x: block(x.exp().mean(0) / x.std(0)).tanh())(recorded).sum().backward()


def test_a_parameter_that_regions_without_a_comparison_have_read() -> None:
    """They leave it with a memory that XLA reads through a view, and computes again once the optimizer has written to it."""
    block, x = nn.Linear(16, 16).to(DEVICE), leaf(8, 16)
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    for wrap in (ours, values, values, ours, values):
        wrap(nn.Sequential(block, nn.ReLU(), block))(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = leaf(3, 5, dtype=dtype)

    def block(x: Tensor) -> Tensor:
        chosen = torch.where(x.real > 0.5, x.sin(), x)
        return (chosen[:0].sum() + chosen.real.long() + chosen.exp()).real

    values(block)(x).sum().backward()
    grad, x.grad = x.grad, None
    block(x).sum().backward()
    assert torch.allclose(grad.cpu(), x.grad.cpu(), rtol=0.02)


@pytest.mark.parametrize("inner", [plain, ours, values])
def test_a_backward_inside(inner: Wrap) -> None:
    """The backward runs on a thread without a frame of Python's, and brings seeds back that the region's ops come after."""

    def block(x: Tensor) -> Tensor:
        y = x * 2
        (slope,) = torch.autograd.grad(inner(lambda y: F.dropout(y.sin(), 0.5).exp())(y).sum(), y)
        return F.dropout((x * slope).tanh().exp(), 0.3)

    found = []
    for wrap in (plain, values):
        torch_xla.manual_seed(5)
        x = leaf(8, 16)
        wrap(block)(x).sum().backward()
        torch_xla.sync()
        found.append((x.grad.cpu(), XLA._xla_get_rng_seed("")))
    assert torch.allclose(found[0][0], found[1][0]) and found[0][1] == found[1][1]


# -- where nothing may run --------------------------------------------------------------------------------------------


def test_around_a_scan_it_is_refused() -> None:
    """A scan traces with tensors that have no values: to run them would end the process."""
    with pytest.raises(UnsupportedError, match="around torch_xla's scan"):
        values(lambda x: scan(lambda carry, row: (carry + row, carry * row), x[0], x)[0])(leaf(4, 8))


def test_in_a_whole_graph_it_is_refused() -> None:
    @torch_xla.compile(full_graph=True)
    def step(x: Tensor) -> None:
        with pytest.raises(UnsupportedError, match="full_graph=True"):
            values(lambda x: x.sin().exp())(x)

    step(leaf(4))


# -- numbers that follow no seed --------------------------------------------------------------------------------------


def shuffled(x: Tensor, draw: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    order = draw(len(x))
    return (x[order] * torch.arange(float(len(x)), device=DEVICE)).sin(), order


def assert_is_shuffled_once(wrap: Wrap, draw: Callable[[int], Tensor]) -> None:
    """The gradient is that of the permutation which the forward has drawn."""
    x = leaf(64)
    out, order = wrap(shuffled)(x, draw)
    out.sum().backward()
    torch_xla.sync()  # a permutation that is drawn in two programs is two
    again = x.detach().clone().requires_grad_()
    shuffled(again, lambda _: order)[0].sum().backward()
    assert torch.allclose(x.grad.cpu(), again.grad.cpu(), rtol=1e-4, atol=1e-4)


def on_xla(count: int) -> Tensor:
    return torch.randperm(count, device=DEVICE)


@pytest.mark.parametrize("wrap", [ours, values])
def test_randperm_is_refused(wrap: Wrap) -> None:
    with pytest.raises(UnsupportedError, match=r'torch.randperm\(n, device="xla"\), which follows no seed'):
        wrap(shuffled)(leaf(64), on_xla)[0].sum().backward()


@pytest.mark.parametrize("wrap", [ours, values])
def test_randperm_that_is_kept(wrap: Wrap) -> None:
    assert_is_shuffled_once(lambda fn: wrap(fn, policy=policies.save_ops("randperm")), on_xla)


@pytest.mark.parametrize("wrap", [ours, values])
def test_randperm_of_the_cpu(wrap: Wrap) -> None:
    assert_is_shuffled_once(wrap, lambda count: torch.randperm(count).to(DEVICE))
    assert_is_shuffled_once(wrap, lambda count: torch.randperm(count, device=DEVICE, dtype=torch.int32))
