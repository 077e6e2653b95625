"""Rule 3: casts that autocast keeps are in a recomputation as in the forward, and are left as a plain step leaves them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from oracle import assert_bitwise, leaf
from several import each
from surroundings import autocast_dtype
from torch import Tensor, nn

import reactivate


def casts_by_hand(x: Tensor, linear: nn.Linear) -> Tensor:
    torch.set_autocast_enabled("cpu", True)  # without a context, so that nothing drops the cache of what is cast
    h = linear(x)
    return linear(h.sin()) * linear(h)


def casts_in_two_contexts(x: Tensor, linear: nn.Linear) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = linear(x).float()
    with torch.autocast("cpu", torch.float16):
        return h.sin() * linear(x).float().exp()


@pytest.mark.parametrize("fn", [casts_by_hand, casts_in_two_contexts])
@pytest.mark.parametrize("check", ["first", "every", "none"])
def test_the_cache_of_casts_is_as_in_the_forward(fn: Callable[..., Tensor], check: Any) -> None:
    """Also where a checksum is taken, and where another setting differs in the backward."""

    def once(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        linear, x = nn.Linear(16, 16), leaf(8, 16)
        try:
            out = wrap(fn)(x, linear).float().sum()
            with autocast_dtype(torch.float16):
                out.backward()
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.clear_autocast_cache()
        return [x.grad, linear.weight.grad, linear.bias.grad]

    for one, other in zip(once(lambda fn: fn), once(lambda fn: reactivate.checkpoint(fn, check=check))):
        assert_bitwise(one, other, "autocast")


def disabled() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=False)


def of_half() -> AbstractContextManager[Any]:
    return autocast_dtype(torch.float16)


@each("around", [nullcontext, disabled, of_half])
@each("around_backward", [nullcontext, disabled, of_half])
@each("batches", [1, 2])
def test_a_recomputation_leaves_no_casts_that_a_plain_step_would_not(
    around: Any, around_backward: Any, batches: int
) -> None:
    """Casts without a context outlive an optimizer's step: the plain model trains on those of its own."""

    def trained(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        linear, x, found = nn.Linear(8, 8), torch.randn(4, 8), []
        optimizer = torch.optim.SGD(linear.parameters(), 0.5)

        def fn(x: Tensor) -> Tensor:
            h = linear(x).tanh()
            torch.set_autocast_enabled("cpu", True)
            h = linear(h)
            torch.set_autocast_enabled("cpu", False)
            return h.float().cos()

        region = wrap(fn)
        try:
            for step in range(6):
                with around():
                    loss = region(x).sum()
                with around_backward():
                    loss.backward()
                found.append(loss.detach())
                if step % batches == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            torch.clear_autocast_cache()
        return [*found, *(parameter.detach() for parameter in linear.parameters())]

    for number, (one, other) in enumerate(zip(trained(lambda fn: fn), trained(reactivate.checkpoint))):
        assert_bitwise(one, other, f"step {number}")


def test_contexts_of_autocast_inside_of_one_without_a_cache() -> None:
    def once(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        linear, x = nn.Linear(16, 16), leaf(8, 16)
        region = wrap(casts_in_two_contexts)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out = region(x, linear)
        out.float().sum().backward()
        return [x.grad, linear.weight.grad, linear.bias.grad]

    for one, other in zip(once(lambda fn: fn), once(reactivate.checkpoint)):
        assert_bitwise(one, other, "autocast")
