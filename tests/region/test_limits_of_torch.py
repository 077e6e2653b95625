"""Limits of other features of torch: transforms, CUDA graphs, nested tensors, and modes that count ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from count_ops import CountOps
from limit_cases import NEVER, gradients, is_right, leaf, ours, plain, shows, torchs
from torch import Tensor

import reactivate
from reactivate import policies
from reactivate.errors import RecomputeMismatchError, UnsupportedError


@shows("`torch.func`")
def test_torch_func() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin().exp()

    for wrap, error in ((torchs, RuntimeError), (ours(), UnsupportedError)):
        with pytest.raises(error):
            torch.func.grad(lambda x: wrap(fn)(x).sum())(leaf())
    with pytest.warns(UserWarning, match="keeps its activations"):
        out = torch.func.vmap(ours()(fn))(leaf())
    assert out.shape == (4, 4)


@pytest.mark.gpu
@shows("`torch.func.grad` inside of a region")
def test_a_derivative_inside_of_a_region() -> None:
    def of_torch_func(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: y.sin().sum())(x) * x

    def of_autograd(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0] * x

    plainly = gradients(plain, lambda: (of_torch_func,))
    assert gradients(torchs, lambda: (of_torch_func,)) == [RuntimeError] * 3
    for other in (ours(), ours(check="every"), ours(policy=policies.save_ops("sin"))):
        with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad\(.*outside of the region"):
            other(of_torch_func)(leaf())
        assert all(map(torch.equal, plainly, gradients(other, lambda: (of_autograd,))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: not run")
@shows("CUDA graphs")
def test_cuda_graphs() -> None:
    x = torch.randn(4, 4, device="cuda", requires_grad=True)
    reactivate.checkpoint(torch.sin)(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="captur"), torch.cuda.graph(graph):
        reactivate.checkpoint(torch.sin)(x)


@shows("Jagged nested tensors")
def test_jagged_nested_tensors() -> None:
    def fn(x: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = torch.nested.nested_tensor_from_jagged(x, offsets).sin().exp().values()
        return found

    def inside(x: Tensor) -> Tensor:
        return fn(x, torch.tensor([0, 2, 4]))

    for wrap, error in ((torchs, RuntimeError), (ours(), RecomputeMismatchError)):
        with pytest.raises(error):
            wrap(inside)(leaf()).sum().backward()
    assert is_right(ours(), lambda: (fn, torch.tensor([0, 2, 4]))) == [True] * 3


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
@shows("Dispatch modes that count the ops inside of a region")
def test_a_detach_of_autograds_own_is_not_made_in_a_region() -> None:
    def make() -> tuple[Any, ...]:
        mode = CountOps()

        def fn(x: Tensor) -> Tensor:
            with mode:
                y = x.sin().exp()  # which saves its result
            return (y * torch.full((4,), float(mode.ops["detach"]))).sin()

        return (fn,)

    for wrap in (torchs, ours(), ours(check="every"), ours(policy=policies.save_ops("sin"))):
        assert not any(found is True for found in is_right(wrap, make))
    assert is_right(ours(), make) == NEVER
