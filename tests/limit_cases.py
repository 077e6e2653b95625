"""Programs at the limits of docs/limits.md, plain, with torch's checkpoint and ours; and which test shows which entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import reactivate

shown: dict[str, Any] = {"XLA": "tests_xla"}

Fn = Callable[..., Any]


def shows(entry: str) -> Callable[[Fn], Fn]:
    """The test shows the entry of docs/limits.md with this heading."""

    def note(test: Fn) -> Fn:
        shown[entry] = test
        return test

    return note


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 4)), requires_grad=True)


def plain(fn: Fn) -> Fn:
    return fn


def torchs(fn: Fn) -> Fn:
    return lambda *args: torchs_checkpoint(fn, *args, use_reentrant=False)


def ours(**options: Any) -> Callable[[Fn], Fn]:
    return lambda fn: reactivate.checkpoint(fn, **options)


def gradients(wrap: Callable[[Fn], Fn], make: Callable[[], tuple[Any, ...]], steps: int = 3) -> list[Any]:
    """Return the gradient in each of some calls of what `make` returns with its arguments, or the kind of its error."""
    torch.manual_seed(0)
    fn, *args = make()
    call = wrap(fn)
    found: list[Any] = []
    for _ in range(steps):
        x = leaf()
        try:
            call(x, *args).sum().backward()
            found.append(x.grad)
        except (RuntimeError, NotImplementedError) as error:
            found.append(type(error))
    return found


def is_right(wrap: Callable[[Fn], Fn], make: Callable[[], tuple[Any, ...]]) -> list[Any]:
    """Return for each call whether its gradient is that of the plain function, or the kind of its error."""
    pairs = zip(gradients(plain, make), gradients(wrap, make))
    return [torch.equal(expected, got) if isinstance(got, Tensor) else got for expected, got in pairs]


NEVER = [False] * 3
