"""Rule 14: threads in lock step, under other settings each, see no state of each other's, and fail and recompute alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from journal import Journal
from meeting_threads import (
    SETTINGS,
    Meet,
    alone,
    assert_equal,
    setting,
    together,
)
from oracle import Ran, assert_bitwise
from surroundings import Failure, Kept, assert_unchanged, surroundings
from torch import Tensor

import reactivate
from reactivate._passes.observing import observed_by, without_regions


def step(name: str, seed: int, meet: Meet, wrap: Callable[..., Any], where: str) -> tuple[Ran, int, list[Tensor]]:
    """Forward and backward of two regions, with meetings before, inside of and after each pass."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(8, 8, generator=generator).requires_grad_() for _ in range(2)]
    x = torch.randn(4, 8, generator=generator).requires_grad_()
    ran = Ran()

    def part(index: int) -> Callable[[Tensor], Tensor]:
        def run(h: Tensor) -> Tensor:
            meet()
            h = (h @ weights[index]).sin() * setting.get()
            with torch.set_grad_enabled(name != "no grad in a part"):
                more = (h @ weights[index]).cos()
            h = h + more
            meet()
            return h.float().exp().tanh() * torch.ones(8)

        return wrap(run)

    settings = SETTINGS[name]
    with observed_by(ran):
        with settings() if where != "backward" else nullcontext(), Kept() as kept:
            meet()
            out = part(1)(part(0)(x))
            meet()
        out = out.float().sum()
        with settings() if where != "forward" else nullcontext():
            meet()
            before = surroundings()
            out.backward()
            assert_unchanged(before, surroundings())
            meet()
    return ran, kept.kept_bytes, [out.detach(), x.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    "names",
    [
        ("none", "bfloat16"),
        ("bfloat16", "float16"),
        ("function mode", "default device"),
        ("context variable", "none"),
        ("no grad in a part", "function mode"),
        ("none", "none"),
    ],
    ids=" and ".join,
)
def test_in_lock_step(names: tuple[str, str], where: str, early_stop: bool) -> None:
    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        return reactivate.checkpoint(fn, early_stop=early_stop)

    expected = [step(name, seed, alone, lambda fn: fn, where) for seed, name in enumerate(names)]
    first, second = names
    found = together(
        lambda meet: step(first, 0, meet, wrap, where),
        lambda meet: step(second, 1, meet, wrap, where),
    )
    for name, (_, kept_plain, plain), (ran, kept, ours) in zip(names, expected, found):
        assert_equal(plain, ours, name)
        assert (ran.regions, ran.recomputations) == (2, 2)
        assert kept < kept_plain


def test_one_recomputes_while_the_other_does_not() -> None:
    """Only the thread that recomputes says so, though both are inside of a region."""
    seen = {"forward": Journal(), "recomputation": Journal()}

    def recomputes(meet: Meet) -> list[Tensor]:
        x = torch.linspace(0, 1, 4, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            if reactivate.is_recomputing():
                meet()
                seen["recomputation"].append(reactivate.is_recomputing())
                meet()
            return x.sin().exp()

        out = reactivate.checkpoint(fn)(x)
        out.sum().backward()
        assert not reactivate.is_recomputing()
        return [out.detach(), x.grad]

    def runs_forward(meet: Meet) -> list[Tensor]:
        x = torch.linspace(1, 2, 4, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            if not reactivate.is_recomputing():
                meet()
                seen["forward"].append(reactivate.is_recomputing())
                meet()
            return x.sin().exp()

        out = reactivate.checkpoint(fn)(x)
        out.sum().backward()
        return [out.detach(), x.grad]

    for found, first in zip(together(recomputes, runs_forward), (0, 1)):
        x = torch.linspace(first, first + 1, 4, requires_grad=True)
        out = x.sin().exp()
        assert_equal([out.detach(), torch.autograd.grad(out.sum(), x)[0]], found, "alone")
    assert seen == {"forward": [False], "recomputation": [True]}


def test_a_thread_that_the_function_starts_does_not_recompute() -> None:
    """`is_recomputing` speaks of the thread that asks."""
    seen = Journal()

    def fn(x: Tensor) -> Tensor:
        here = reactivate.is_recomputing()
        (there,) = together(lambda meet: reactivate.is_recomputing())
        seen.append((here, there))
        return x.sin().exp()

    reactivate.checkpoint(fn)(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [(False, False), (True, False)]


def test_one_fails_while_the_other_recomputes() -> None:
    """An exception in one thread's recomputation is nothing to the other."""

    def job(fails: bool) -> Callable[[Meet], Any]:
        def run(meet: Meet) -> Any:
            x = torch.linspace(0, 1, 4, requires_grad=True)

            def fn(x: Tensor) -> Tensor:
                h = x.sin()
                if reactivate.is_recomputing():
                    meet()
                    if fails and not errors:
                        errors.append(Failure())
                        raise errors[0]
                return h.exp()

            errors = Journal()
            out = reactivate.checkpoint(fn)(x)
            before = surroundings()
            if fails:
                with pytest.raises(Failure):
                    torch.autograd.grad(out.sum(), x)
            else:
                torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert_unchanged(before, surroundings())
            return torch.autograd.grad(out.sum(), x)[0]

        return run

    x = torch.linspace(0, 1, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    for grad in together(job(True), job(False)):
        assert_bitwise(expected, grad, "gradient")


def test_contexts_of_ours_end_at_the_thread() -> None:
    """`shared_recompute` and the plain runs of `verify` are nothing to another thread."""

    def job(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Meet], Any]:
        def run(meet: Meet) -> Any:
            ran = Ran()
            x = torch.linspace(0, 1, 4, requires_grad=True)
            with observed_by(ran), context():
                meet()
                first, second = reactivate.checkpoint(lambda x: (x.sin().exp(), x.cos().tanh()), early_stop=False)(x)
                first.sum().backward(retain_graph=True)
                meet()
                second.sum().backward(retain_graph=True)
                meet()
            return ran.regions, ran.recomputations, x.grad

        return run

    contexts = nullcontext, reactivate.shared_recompute, without_regions
    expected = torch.linspace(0, 1, 4, requires_grad=True)
    (expected.sin().exp().sum()).backward()
    (expected.cos().tanh().sum()).backward()
    counts = []
    for regions, recomputations, grad in together(*map(job, contexts)):
        counts.append((regions, recomputations))
        assert_bitwise(expected.grad, grad, "gradient")
    assert counts == [(1, 2), (1, 1), (0, 0)]
