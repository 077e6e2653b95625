"""Fake tensors: they have a place in memory, and nothing in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reactivate.storage.moved import Piece
from reactivate.storage.placement import Extent, Memory


class FakePiece(Piece):
    """A run of elements of a fake tensor, which has none."""

    def __init__(self, memory: Memory, extent: Extent, run: Any) -> None:
        super().__init__(memory, extent)
        self._mode = run.fake_mode
        self._like = run.numel(), run.dtype, run.device

    def read(self) -> Tensor:
        elements, dtype, device = self._like
        with self._mode:
            return torch.empty(elements, dtype=dtype, device=device)
