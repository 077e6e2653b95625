"""Rule 5: transforms of functions and exports of models are right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import assert_bitwise, leaf
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.errors import UnsupportedError


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x), "torch.func.grad or vjp"),
        (lambda fn, x: torch.func.vjp(fn, x), "torch.func.grad or vjp"),
        (lambda fn, x: torch.func.hessian(lambda x: fn(x).sum())(x), "torch.func"),
    ],
    ids=["grad", "vjp", "hessian"],
)
def test_transforms_are_refused_by_name(transform: Callable[[Any, Tensor], Any], name: str) -> None:
    fn = reactivate.checkpoint(lambda x: x.sin().exp())
    with pytest.raises(UnsupportedError, match=rf"{name}.*without checkpointing|{name}.*around"):
        transform(fn, torch.randn(4, 3))
    x = leaf(4, 3)  # and nothing is left behind
    fn(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize(
    "transform",
    [
        lambda fn, x: torch.func.vmap(fn)(x),
        lambda fn, x: torch.autograd.grad(torch.func.vmap(fn)(x).sum(), x)[0],
        lambda fn, x: torch.func.jvp(fn, (x,), (x,))[1],
        lambda fn, x: torch.func.jacfwd(fn)(x),
        lambda fn, x: torch.autograd.grad(torch.func.jvp(fn, (x,), (x,))[1].sum(), x)[0],
    ],
    ids=["vmap", "backward of vmap", "jvp", "jacfwd", "backward of jvp"],
)
def test_transforms_that_save_nothing_are_right(transform: Callable[[Any, Tensor], Any]) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin().exp()

    x = leaf(4, 3)
    with pytest.warns(UserWarning, match=r"torch\.func\.(vmap|jvp) keeps its activations"):
        ours = transform(reactivate.checkpoint(fn), x)
    assert torch.equal(transform(fn, x), ours)


def test_forward_mode_inside_and_around_is_right() -> None:
    import torch.autograd.forward_ad as forward_ad

    x, tangent = torch.randn(4, 3), torch.randn(4, 3)
    with forward_ad.dual_level():
        results = [
            forward_ad.unpack_dual(fn(forward_ad.make_dual(x, tangent))).tangent
            for fn in (lambda x: x.sin().exp(), reactivate.checkpoint(lambda x: x.sin().exp()))
        ]
    assert torch.equal(*results)


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = reactivate.checkpoint(self.block)(x).sin()
        return out


# Strict export fails on the operator that compilers recompute: with torch's own checkpoint as well.
EXPORTS_REGIONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_an_exported_model_is_right(strict: bool) -> None:
    """Strict, the region is in the graph as the operator that compilers recompute; otherwise it is traced through."""
    model, x = Exported(), torch.randn(4, 3)
    if strict and not EXPORTS_REGIONS:
        with pytest.raises(Exception, match="not an allowed operator|tag_activation_checkpoint"):
            torch.export.export(model, (x,), strict=True)
        return
    with pytest.warns(UserWarning, match="keeps its activations") if strict else nullcontext():
        exported = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(exported.module()(x), model(x))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert ("tag_activation_checkpoint" in targets) == strict
    module = exported.module()
    module(x).sum().backward()
    expected = torch.autograd.grad(model.block(x).sin().sum(), list(model.parameters()))
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@each(
    "policy",
    [
        policies.full(),
        policies.full(save=["linear"]),
        policies.recompute_modules("[0:2]"),
        lambda site: reactivate.Recompute() if site.module is not None and site.path == "" else None,
    ],
)
def test_an_exported_root_is_right(policy: Any) -> None:
    """Also where the model itself is a region, or spans of it are: not strict, what a graph is made of is read from it."""

    def results(policy: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))), torch.randn(2, 8)
        if policy is not None:
            reactivate.apply(model, policy)
        module = torch.export.export(model, (x,), strict=False).module()
        result = module(x)
        return [result.detach(), *torch.autograd.grad(result.sum(), list(module.parameters()))]

    for expected, found in zip(results(None), results(policy), strict=True):
        assert_bitwise(expected, found, "result or gradient")
