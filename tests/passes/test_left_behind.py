"""Streams and settings that a recomputation leaves behind where a guard does not put them back: each is named."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from mechanisms import MECHANISMS
from torch import Tensor

import reactivate
from reactivate.errors import RecomputeMismatchError
from reactivate.guards.ambient import Ambient


def other_dtype() -> None:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)


DRAWS = {"torch's random": lambda: torch.rand(1), "Python's random": random.random, "NumPy's random": np.random.rand}
SETTINGS: dict[str, Callable[[], None]] = {
    "the default dtype": other_dtype,
    "the choice of deterministic algorithms": lambda: torch.use_deterministic_algorithms(
        not torch.are_deterministic_algorithms_enabled()
    ),
}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("reactivate._region.region.is_due", lambda fn, determinism, choice: True)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever other tests have left running
    dtype, is_deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(is_deterministic)


def train(does: Callable[[], object], **options: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        does()
        return x.exp()

    reactivate.checkpoint(fn, **options)(torch.ones(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("what", DRAWS)
def test_a_stream_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(DRAWS[what])
    for change in MECHANISMS["streams"]:
        monkeypatch.setattr(*change)
    with pytest.raises(RecomputeMismatchError, match=what):
        train(DRAWS[what])


class Lax(Ambient):
    """Puts no setting back."""

    def recompute(self, snapshot: Any) -> AbstractContextManager[Any]:
        return nullcontext()


@pytest.mark.parametrize("what", SETTINGS)
def test_a_setting_is_named(what: str) -> None:
    default = reactivate.guards.DEFAULT
    train(SETTINGS[what])
    with pytest.raises(RecomputeMismatchError, match=what):
        train(SETTINGS[what], guards=default.without("ambient").adding(Lax()))
    train(SETTINGS[what], guards=default.without("ambient"))
