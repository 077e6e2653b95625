"""Limits of recomputations and hooks: early stop, saved calls, discarded outputs, and hooks on saved tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from journal import Journal
from limit_cases import Fn, is_right, leaf, ours, plain, shows, torchs
from memory import allocated_by
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef

import reactivate
from reactivate import policies
from reactivate.dropin.megatron import CheckpointWithoutOutput
from reactivate.errors import RecomputeMismatchError
from reactivate.guards import DEFAULT, ContextPair


@shows("A function that swallows exceptions")
def test_a_function_that_swallows_exceptions() -> None:
    seen = Journal()

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        try:
            y = y.cos()
        except:  # noqa: E722
            seen.append("swallowed")
        return y * 2

    assert is_right(ours(), lambda: (fn,)) == [True] * 3
    assert len(seen) == 3
    seen.clear()
    assert is_right(ours(early_stop=False), lambda: (fn,)) == [True] * 3
    assert not len(seen)


@shows("Recomputations that save more tensors")
def test_more_tensors_than_before() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        return y.cos() if reactivate.is_recomputing() else y

    x = leaf()
    reactivate.checkpoint(fn, check="metadata")(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    with pytest.raises(RecomputeMismatchError, match="more"):
        reactivate.checkpoint(fn, check="metadata", early_stop=False)(leaf()).sum().backward()


@shows("Saved calls")
def test_saved_calls() -> None:
    entered = Journal()

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *details: object) -> None:
            pass

    inner = ours(guards=DEFAULT.adding(ContextPair(lambda: (Context("forward"), Context("recomputation")))))(torch.sin)

    def fn(x: Tensor) -> Tensor:
        out: Tensor = reactivate.site(inner, name="saved")(x.cos()).exp()
        return out

    reactivate.checkpoint(fn, policy=policies.save_names("saved"))(leaf()).sum().backward()
    assert entered == ["forward", "recomputation"], "for the backward of the saved call, and for no recomputation of fn"


@shows("Pack hooks that return their tensor")
def test_hooks_that_keep_a_tensor_as_it_is() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        with save_on_cpu():
            y = y.tanh().exp()
        return y.cos().sin()

    def leaked(wrap: Callable[[Fn], Fn]) -> int:
        def step() -> None:
            x = leaf(64, 64)
            torch.autograd.grad(wrap(fn)(x).sum(), x)

        step()
        gc.collect()
        gc.disable()
        try:
            return allocated_by(step).left_bytes
        finally:
            gc.enable()

    assert leaked(plain) == 0
    assert 0 < leaked(ours()) <= leaked(torchs)


@shows("Hooks that turn the version check off")
def test_hooks_that_turn_the_version_check_off() -> None:
    def gradient(wrap: Callable[[Fn], Fn]) -> Tensor:
        torch.manual_seed(0)
        x = leaf()
        with save_on_cpu():
            y = wrap(lambda x: x.sin().exp())(x)
        with torch.no_grad():
            y.mul_(2)
        return torch.autograd.grad(y, x, torch.ones(4, 4))[0]

    expected, found = gradient(plain), gradient(ours())
    assert torch.equal(expected, 2 * found), "the plain model reads the result that was written to"
    assert torch.equal(found, gradient(torchs))


class DifferentiatesInside(torch.autograd.Function):
    """Differentiates in its backward what its forward recorded."""

    ended: Journal

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.inference_mode(False):
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.sin()
        DifferentiatesInside.ended.append("forward")
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.autograd.grad(ctx.y, ctx.x, gradient)


@shows("`torch.inference_mode(False)` inside the forward of a custom Function")
def test_inference_mode_inside_the_forward_of_a_custom_function() -> None:
    for early_stop, count in ((True, 1), (False, 2)):
        DifferentiatesInside.ended = Journal()
        x = leaf()
        wrap = reactivate.checkpoint(check="metadata", early_stop=early_stop)
        wrap(lambda x: DifferentiatesInside.apply(x))(x).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
        assert len(DifferentiatesInside.ended) == count


@shows("Hooks that change values")
@pytest.mark.parametrize("changes", [False, True])
def test_hooks_that_change_values(changes: bool) -> None:
    dtype = torch.bfloat16 if changes else torch.float64
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.to(dtype), lambda x: x.float()):
        out = reactivate.checkpoint(lambda x: (x * 3).exp().sin())(leaf(4).tanh())
    with pytest.raises(RecomputeMismatchError, match="return the bits") if changes else nullcontext():
        out.sum().backward()


@shows("Discarded outputs")
@pytest.mark.parametrize("is_region", [False, True])
def test_discarded_outputs(is_region: bool) -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(norm, leaf(4, 8))
    out = (reactivate.checkpoint(linear) if is_region else linear)(hidden)
    memory = StorageWeakRef(hidden.untyped_storage())
    checkpoint.discard_output_and_register_recompute(out)
    del hidden
    assert memory.expired() is not is_region
