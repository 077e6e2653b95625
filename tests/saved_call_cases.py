"""Cases of saved calls: a function of a call, a tensor and a weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from journal import Journal
from oracle import Case, Watched, assert_same, run
from torch import Tensor

import reactivate
from reactivate import policies

SAVED = policies.save_names("saved")
Fn = Callable[..., Any]


class Reasons(Watched):
    """Takes down what was called as a saved call, and why it runs again, if it does."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str] = []
        self.found: list[str | None] = []

    def forward_done(self, record: Any) -> None:
        super().forward_done(record)
        self.labels += [call.label for call in record.saved_calls]
        self.found += [call.reason for call in record.saved_calls]


class Square(torch.autograd.Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


def saved(fn: Fn) -> Fn:
    return reactivate.site(fn, name="saved")


def counting(calls: Journal, fn: Fn) -> Fn:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return fn(*args, **kwargs)

    return counted


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 4)), requires_grad=True)


def once(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
    sum(output.float().square().sum() for output in outputs).backward()  # type: ignore[union-attr]


def several(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
    for output in outputs:
        output.float().square().sum().backward(retain_graph=True)
    sum(output.float().sum() for output in outputs).backward()  # type: ignore[union-attr]


def weighted(fn: Fn) -> Callable[[], Case]:
    """A case of `fn(x, w=w)`."""

    def make() -> Case:
        w = leaf()
        return Case(partial(fn, w=w), (leaf(),), leaves={"w": w})

    return make


def compare_call(fn: Fn, call: Fn, runs: int, policy: Any = SAVED, **options: Any) -> None:
    """`fn(saved call, x, w)` is bitwise the plain function, once and twice; the call runs so often in all."""
    for backwards in (1, 2):

        def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
            for number in range(backwards):
                sum(out.square().sum() for out in outputs).backward(retain_graph=number < backwards - 1)  # type: ignore[union-attr]

        calls = Journal()
        plain = run(weighted(partial(fn, saved(call))), None, backward)
        ours = run(
            weighted(partial(fn, saved(counting(calls, call)))),
            partial(reactivate.checkpoint, policy=policy, **options),
            backward,
        )
        assert_same(plain, ours)
        assert ours.regions >= 1, "there was a region"
        assert len(calls) == (1 if runs == 1 else 1 + backwards)
