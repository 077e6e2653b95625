"""Pieces: runs of elements that a storage keeps elsewhere."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from reactivate.storage.placement import Extent, Memory, run_of

LAST = "taken in last, so the backward needs them first (last=)"
WRITTEN = "a tensor that a storage took in has been modified by an inplace operation before it was copied"


class Piece:
    """A run of elements that is kept elsewhere, as long as the piece lives.

    Attributes:
        memory: whose contents these are.
        extent: which elements of that memory.
        number: its place in a series.
        waits: whether its elements may wait where they are, where others can write to them.
        tensors: how many tensors are in it.
        stays: why its elements are where they were; None if they went.
    """

    number = 0
    waits = False
    tensors = 0
    stays: str | None = LAST
    _is_written = False

    def __init__(self, memory: Memory, extent: Extent) -> None:
        self.memory = memory
        self.extent = extent
        self._loaded: tuple[ref[Tensor], int] | None = None

    def holds(self, tensor: Tensor, extent: Extent) -> bool:
        """Return whether it has what `tensor` has in `extent` now."""
        if not (self.memory.is_of(tensor) and self.extent.holds(extent) and self.extent.is_in(tensor)):
            return False
        return self.memory.has_bits_of(run_of(tensor, self.extent))

    def _look_for_write(self, run: Tensor) -> bool:
        """Return whether the elements were written to while they waited."""
        self._is_written = self._is_written or self.memory.is_written(run)
        return self._is_written

    def load(self) -> Tensor:
        """Return the elements where they were; those that are there already, if they were not written to."""
        run = self.loaded()
        return self.note_loaded(self.read()) if run is None else run

    def loaded(self) -> Tensor | None:
        """Return what the last `load` returned, if it still lives, and was not written to."""
        if self._loaded is None:
            return None
        reference, version = self._loaded
        run = reference()
        return None if run is None or run._version != version else run

    def note_loaded(self, run: Tensor) -> Tensor:
        """Note what a `load` returns."""
        self._loaded = ref(run), run._version
        return run

    def read(self) -> Tensor:
        """Bring the elements back."""
        raise NotImplementedError

    def held(self) -> list[Tensor]:
        """Return the memory that the elements are in now, for reports."""
        return []

    @property
    def stored_bytes(self) -> int:
        """Bytes that it keeps beside those of `held`, for reports."""
        return 0

    def start_back(self) -> None:
        """Start to bring the elements back."""


class FakePiece(Piece):
    """A run of elements of a fake tensor, which has a place in memory and nothing in it."""

    def __init__(self, memory: Memory, extent: Extent, run: Any, rests_in_memory: bool) -> None:
        super().__init__(memory, extent)
        # What comes back is made of a fake tensor: what is made of none may be computed for real.
        self._like: Tensor = run.new_empty(0)
        self._elements = run.numel()
        self._held = [run.new_empty(self._elements, device="cpu")] if rests_in_memory else []

    def read(self) -> Tensor:
        return self._like.new_empty(self._elements)

    def held(self) -> list[Tensor]:
        return self._held

    @property
    def stored_bytes(self) -> int:
        return 0 if self._held else self.memory.nbytes
