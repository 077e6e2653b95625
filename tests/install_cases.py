"""Functions that `dropin.install` is tested with, and which engine they run on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from oracle import Case, assert_bitwise, assert_same, run
from torch import nn

Get = Callable[[], Any]  # asks a place what it refers to


def block(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width)
    )


def one_block() -> Case:
    return Case(block(), (torch.randn(8, 16, requires_grad=True),))


def check_runs_here(wrap: Callable[[Any], Any], make: Callable[[], Case] = one_block, regions: int = 1) -> None:
    """A function that `wrap` makes runs on this engine, and does what the original does."""
    plain, ours = run(make), run(make, wrap)
    assert_same(plain, ours)
    assert (ours.regions, ours.recomputations) == (regions, regions)
    assert ours.kept_bytes < plain.kept_bytes


def check_runs_on_torch(wrap: Callable[[Any], Any], make: Callable[[], Case] = one_block) -> None:
    plain, theirs = run(make), run(make, wrap)
    assert_bitwise(plain.outputs[0], theirs.outputs[0], "output")
    assert (theirs.regions, theirs.recomputations) == (0, 0)
    assert theirs.kept_bytes < plain.kept_bytes


def with_checkpoint(get: Get) -> Callable[[Any], Any]:
    return lambda fn: functools.partial(get(), fn, use_reentrant=False)
