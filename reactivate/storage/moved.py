"""Tensors that are kept elsewhere: the part that all storages which move bytes have in common.

A subclass says where a run of elements goes (`put`) and how it comes back. What is decided here: which tensors move,
that views of one memory are moved once and come back as views of one, and what is counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from reactivate._text.warnings import warn
from reactivate._torch.modes import FakeTensor
from reactivate.errors import UnsupportedError
from reactivate.storage.pieces import FakePiece, Piece
from reactivate.storage.placement import Extent, Memory, Placement, owner_of, placement_of, run_of
from reactivate.storage.series import Order
from reactivate.storage.streams import current_stream, is_capturing
from reactivate.storage.wrapped import Wrapped, parts_of

M = TypeVar("M", bound="Mover")

_LEAF = "parameters and other leaves are there anyway"


_movers: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Moved:
    """The handle of a tensor that was moved: a piece of memory, and how the tensor lies in it."""

    piece: Piece
    placement: Placement


@dataclass(eq=False)
class Traffic:
    """Counts of a storage.

    Attributes:
        moved: tensors that went, or are on their way.
        moved_bytes: bytes of these. Of views of one memory these count once.
        loaded_bytes: bytes that were brought back.
        stayed: {reason: number} of the tensors that did not move, among them the last ones, which wait where they are.
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
        last: how many tensors wait where they are.
        ahead: how many come back before they are read.

    Attributes:
        name: of the storage, for warnings.
        rests_in_memory: whether what was moved is in the host's memory.
        order: the series of what was taken in.
        lock: for whatever changes these.
    """

    name = "reactivate.storage"
    rests_in_memory = True

    def __init__(self, least_bytes: int, last: int = 1, ahead: int = 1) -> None:
        self.least_bytes = least_bytes
        self.last = last
        self.ahead = ahead
        self.traffic = Traffic()
        self._has_warned = False
        self.begin()

    @classmethod
    def of(cls: type[M], *settings: Any) -> M:
        """Return the one for these settings: a policy may make a storage for each call, and copies of a model have others."""
        key = cls, *settings
        found: M | None = _movers.get(key)
        if found is None:
            found = _movers[key] = cls(*settings)
        return found

    def begin(self) -> None:
        """Begin in a process: with nothing under way."""
        self.lock = RLock()
        self.order: Order[Any] = Order()
        self._pieces: WeakValueDictionary[tuple[Any, ...], Piece] = WeakValueDictionary()

    def save(self, tensor: Tensor, wrappers: tuple[Tensor, ...] = ()) -> Any:
        """Take `tensor` in: a handle for it, or the tensor itself if it stays.

        Args:
            wrappers: those that it is a part of.

        Raises:
            UnsupportedError: it is on XLA.
        """
        is_leaf = tensor.requires_grad and tensor.is_leaf
        wrapped = None if is_leaf else parts_of(tensor)
        if wrapped is not None:
            return wrapped.each(functools.partial(self.save, wrappers=(*wrappers, tensor)))
        if not is_leaf:
            self._refuse_lazy(tensor)
        reason = _LEAF if is_leaf else self.reason_to_stay(tensor)
        if reason is not None:
            self.traffic.stayed[reason] += 1
            return tensor
        return self._moved(tensor, wrappers)

    def load(self, handle: Any) -> Tensor:
        """Return the tensor that `handle` stands for, where it was."""
        if isinstance(handle, Moved):
            return handle.placement.view_of(handle.piece.load())
        if isinstance(handle, Wrapped):
            return handle.rebuilt(self.load)
        return handle  # type: ignore[no-any-return]

    def reason_to_stay(self, tensor: Tensor) -> str | None:
        """Return why a tensor is not moved, None if it is."""
        if tensor.is_meta:
            return "meta tensors stay where they are"
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_inference():
            return "sparse, nested, quantized and inference tensors stay where they are"
        if tensor.nbytes < self.least_bytes:
            return f"smaller than {self.least_bytes:,} bytes"
        if not isinstance(tensor, FakeTensor) and is_capturing(tensor.device):
            return "a graph of the device is being captured"
        return None

    def _refuse_lazy(self, tensor: Tensor) -> None:
        if tensor.device.type == "xla":
            raise UnsupportedError(
                f"A policy's storage was given a tensor of shape {list(tensor.shape)} on {tensor.device}. XLA compiles a "
                "step as one program, and to move a tensor while it is recorded would end that program there. Leave out "
                "storage= and inputs= on XLA: what the policy saves stays on the device, and the rest is recomputed."
            )

    def _moved(self, tensor: Tensor, wrappers: tuple[Tensor, ...]) -> Moved:
        placement, extent = placement_of(tensor)
        if tensor.is_neg():  # a lazy bit, for which there is no public function: its run has the values instead
            tensor = run_of(tensor, extent).resolve_neg()
            extent = Extent(0, tensor.numel())
        owner = owner_of(tensor)
        stream = None if isinstance(tensor, FakeTensor) else current_stream(tensor.device)
        key = id(owner), owner._version, tensor.dtype, stream  # what one stream brings back no other one has waited for
        piece = self._pieces.get(key)
        if piece is None or not piece.holds(tensor, extent):
            run = run_of(tensor, extent)
            memory = Memory(tensor, run, wrappers)
            with self.lock:
                piece = (self.put_fake if isinstance(run, FakeTensor) else self.put)(run, memory, extent)
            if not piece.waits:
                memory.let_go()
                self.count(piece, None)
            self.settle()
            self._pieces[key] = piece
        self.count(piece, piece.stays, 1)
        return Moved(piece, placement.moved_by(extent.start - piece.extent.start))

    def count(self, piece: Piece, stays: str | None, more: int = 0) -> None:
        """Count the tensors of a piece as moved, or as staying for a reason.

        Args:
            stays: the reason; None if they move.
            more: how many tensors the piece has now that it had not.
        """
        with self.lock:
            traffic, before = self.traffic, (piece.stays, -piece.tensors)
            traffic.moved_bytes += piece.memory.nbytes * ((stays is None) - (piece.stays is None))
            piece.stays, piece.tensors = stays, piece.tensors + more
            for reason, number in (before, (stays, piece.tensors)):
                if reason is None:
                    traffic.moved += number
                else:
                    traffic.stayed[reason] += number
                    if not traffic.stayed[reason]:
                        del traffic.stayed[reason]

    def put_fake(self, run: Any, memory: Memory, extent: Extent) -> Piece:
        """Take a run of a fake tensor away, which has no elements."""
        return FakePiece(memory, extent, run, self.rests_in_memory)

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        """Take a run of elements away."""
        raise NotImplementedError

    def settle(self) -> None:
        """Let go of what has arrived, for storages in which that does not happen by itself. Called without the lock."""

    def prefetch_last(self, key: Any) -> None:
        """Start to bring back what was taken in last in a group."""
        with self.lock:
            for series in self.order.of_group(key):
                series.bring_back_before(len(series.pieces), self.ahead)

    def warn_once(self, text: str) -> None:
        """Warn that tensors stay where they are, if that was not said before."""
        if not self._has_warned:
            self._has_warned = True
            warn(f"{self.name}: {text}")
