"""Slices of rows, each of which is computed, forward and backward, before the next one."""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNED = 16  # rows: kernels that read several numbers at once find each row where they find it in the whole


def slices_of(count: int, most: int) -> list[slice]:
    """Return slices of `count` rows, at most so many: each but the last of a multiple of 16 rows. There is at least one."""
    rows = max(1, -(-count // (most * _ALIGNED))) * _ALIGNED
    return [slice(begin, min(count, begin + rows)) for begin in range(0, max(count, 1), rows)]


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context in which ops on the device of `tensor` have the dtypes that they are called with."""
    kind = tensor.device.type
    return torch.autocast(kind if torch.amp.is_autocast_available(kind) else "cpu", enabled=False)
