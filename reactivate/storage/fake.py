"""Fake tensors: they have a place in memory, and nothing in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from reactivate.storage.moved import Piece
from reactivate.storage.placement import Extent, Memory


class FakePiece(Piece):
    """A run of elements of a fake tensor, which has none."""

    def __init__(self, memory: Memory, extent: Extent, run: Any) -> None:
        super().__init__(memory, extent)
        # What comes back is made of a fake tensor: what is made of none may be computed for real.
        self._like: Tensor = run.new_empty(0)
        self._elements = run.numel()

    def read(self) -> Tensor:
        return self._like.new_empty(self._elements)
