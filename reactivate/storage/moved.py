"""Tensors that are kept elsewhere: the part that all storages which move bytes have in common.

A subclass says where a run of elements goes (`put`) and how it comes back. What is decided here: which tensors move,
that views of one memory are moved once and come back as views of one, and what is counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from reactivate.storage.placement import Extent, Memory, Placement, owner_of, placement_of, run_of
from reactivate.storage.wrapped import Wrapped, parts_of

WRITTEN = "a tensor that a storage took in has been modified by an inplace operation before it was copied"
_LEAF = "parameters and other leaves are there anyway"


class Piece:
    """A run of elements that is kept elsewhere, as long as somebody has the piece.

    Attributes:
        memory: whose contents these are.
        extent: which elements of that memory.
        number: its place in a series.
    """

    number = 0

    def __init__(self, memory: Memory, extent: Extent) -> None:
        self.memory = memory
        self.extent = extent
        self._loaded: tuple[ref[Tensor], int] | None = None

    def load(self) -> Tensor:
        """Return the elements where they were; those that are there already, if nobody has written to them."""
        run = self.loaded()
        if run is None:
            run = self.read()
            self.has_loaded(run)
        return run

    def loaded(self) -> Tensor | None:
        """Return the elements that are there already, None if there are none or somebody has written to them."""
        reference, version = self._loaded or (_nowhere, 0)
        run = reference()
        return run if run is not None and run._version == version else None

    def has_loaded(self, run: Tensor) -> None:
        """Note that the elements are there, for as long as anybody has them."""
        self._loaded = ref(run), run._version

    def read(self) -> Tensor:
        """Bring the elements back."""
        raise NotImplementedError

    def held(self) -> list[Tensor]:
        """Return the memory that the elements are in now, for reports."""
        return []


def _nowhere() -> None:
    """Return what a reference to nothing does."""


@dataclass(frozen=True, eq=False)
class Moved:
    """The handle of a tensor that was moved: a piece of memory, and how the tensor lies in it."""

    piece: Piece
    placement: Placement


@dataclass(eq=False)
class Traffic:
    """Counts of a storage.

    Attributes:
        moved: tensors that were taken in, among them the last ones, which wait where they are.
        moved_bytes: bytes of these. Of views of one memory these count once.
        loaded_bytes: bytes that were brought back.
        stayed: {reason: number} of the tensors that were not moved.
    """

    moved: int = 0
    moved_bytes: int = 0
    loaded_bytes: int = 0
    stayed: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.moved:,} tensors moved, {self.moved_bytes:,} bytes; {self.loaded_bytes:,} bytes brought back."]
        lines += [f"  {number:,} stayed: {reason}" for reason, number in self.stayed.most_common()]
        return "\n".join(lines)


class Mover:
    """The part of a storage that moves runs of elements.

    Args:
        least_bytes: smaller tensors stay.
    """

    def __init__(self, least_bytes: int) -> None:
        self.least_bytes = least_bytes
        self.traffic = Traffic()
        self._pieces: WeakValueDictionary[tuple[int, int, torch.dtype], Piece] = WeakValueDictionary()

    def save(self, tensor: Tensor) -> Any:
        """Take `tensor` in: a handle for it, or the tensor itself if it stays."""
        is_leaf = tensor.requires_grad and tensor.is_leaf
        wrapped = None if is_leaf else parts_of(tensor)
        if wrapped is not None:
            return wrapped.each(self.save)
        reason = _LEAF if is_leaf else self.reason_to_stay(tensor)
        handle = None if reason else self._moved(tensor)
        if handle is None:
            self.traffic.stayed[reason or self.is_full] += 1
            return tensor
        self.traffic.moved += 1
        return handle

    def load(self, handle: Any) -> Tensor:
        """Return the tensor that `handle` stands for, where it was."""
        if isinstance(handle, Moved):
            return handle.placement.view_of(handle.piece.load())
        if isinstance(handle, Wrapped):
            return handle.rebuilt(self.load)
        return handle  # type: ignore[no-any-return]

    is_full = "there is no room for them"

    def reason_to_stay(self, tensor: Tensor) -> str | None:
        """Return why a tensor is not moved, None if it is."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_inference():
            return "sparse, nested, quantized and inference tensors stay where they are"
        if tensor.numel() * tensor.element_size() < self.least_bytes:
            return f"smaller than {self.least_bytes:,} bytes"
        return None

    def _moved(self, tensor: Tensor) -> Moved | None:
        placement, extent = placement_of(tensor)
        if tensor.is_neg():  # a lazy bit, for which there is no public function: its run has the values instead
            tensor = run_of(tensor, extent).resolve_neg()
            extent = Extent(0, tensor.numel())
        owner = owner_of(tensor)
        key = id(owner), owner._version, tensor.dtype
        piece = self._pieces.get(key)
        if piece is None or not piece.memory.is_of(tensor) or not piece.extent.holds(extent):
            run = run_of(tensor, extent)
            piece = self.put(run, Memory(tensor), extent)
            if piece is None:
                return None
            self.traffic.moved_bytes += run.numel() * run.element_size()
            self._pieces[key] = piece
        return Moved(piece, placement.moved_by(extent.start - piece.extent.start))

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece | None:
        """Take a run of elements away, None if there is no room for it."""
        raise NotImplementedError
