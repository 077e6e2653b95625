"""Slices of rows, each of which is computed, forward and backward, before the next one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ALIGNED = 16  # rows: kernels that read several numbers at once find each row where they find it in the whole


def rows_of(count: int, slices: int) -> int:
    """Return how many rows a slice has, of at most so many slices of `count` rows: a multiple of 16."""
    return max(1, -(-count // (slices * _ALIGNED))) * _ALIGNED


def ranges_of(count: int, rows: int) -> Iterator[slice]:
    """Yield the slices of `count` rows, `rows` at a time."""
    for begin in range(0, count, rows):
        yield slice(begin, min(count, begin + rows))


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context in which ops on the device of `tensor` have the dtypes that they are called with."""
    kind = tensor.device.type
    return torch.autocast(kind if torch.amp.is_autocast_available(kind) else "cpu", enabled=False)
