"""Fixtures that every test on XLA starts from."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")

import oracle
import torch_xla


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    oracle.seed_everything()
    torch_xla.manual_seed(7)
    torch_xla.sync()
    yield
    torch_xla.sync()


@pytest.fixture
def op_by_op() -> Iterator[None]:
    """Every op is a program of its own: no compiler rounds otherwise because it has fused others."""
    from torch_xla.experimental import eager_mode

    eager_mode(True)
    yield
    eager_mode(False)
