"""Functions and modules to checkpoint with `dropin.torch`, and a comparison with the plain ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Case, assert_same, run
from torch import Tensor, nn

from reactivate.dropin import torch as ours

Wrap = Callable[[Any], Any]
VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True])


def wrapped(engine: Any = ours, **options: Any) -> Wrap:
    """Return a way to checkpoint with `options`."""
    return lambda fn: functools.partial(engine.checkpoint, fn, **{"use_reentrant": False, **options})


def check(make: Callable[[], Case], wrap: Wrap, regions: int = 1) -> None:
    plain, checkpointed = run(make), run(make, wrap)
    assert_same(plain, checkpointed)
    assert (checkpointed.regions, checkpointed.recomputations) == (regions, regions)
    assert checkpointed.kept_bytes < plain.kept_bytes


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.3), nn.Linear(48, 16))


def one_block() -> Case:
    return Case(block(), (leaf(8, 16),))


def chain() -> Case:
    return Case(nn.Sequential(*[block() for _ in range(5)]), (leaf(8, 16),))
