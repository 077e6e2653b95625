"""A storage in rehearsal: on fake tensors, which have no contents, it lets go and brings back as the real one does.

The memory that a storage leaves in use is not only what it keeps: the last tensors wait, some are on their way, some are
back before they are read. A rehearsal keeps the same order as `staging` and `spool`, with the memory as long in use as
it ever can be there, and tells of each transfer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor

from reactivate.storage.areas import in_pages as in_pages
from reactivate.storage.disk import Disk
from reactivate.storage.host import Host
from reactivate.storage.moved import Mover
from reactivate.storage.pieces import Piece
from reactivate.storage.placement import Extent, Memory
from reactivate.storage.series import Series
from reactivate.storage.spool import WRITING

MoveKind = Literal["taken", "sent", "settled", "fetched", "read"]


@dataclass(frozen=True)
class Residence:
    """The time for which a storage leaves tensors in memory.

    Attributes:
        least_bytes: smaller tensors stay.
        last: how many tensors, of those taken in last, stay.
        in_flight: how many of those that are on their way have their memory still, at most; 0 where the program waits for
            each copy.
        ahead: how many are back before they are read.
        limit: the most bytes that it may keep, in whole pages; None for any number.
        slack: the part by which the memory for a tensor may be larger than the tensor.
        lingers: whether a copy that is not needed any more may have its memory until it ends.
        settles_on_read: whether reading lets go of what is still on its way.
    """

    least_bytes: int
    last: int
    in_flight: int
    ahead: int
    limit: int | None
    slack: float = 0.0
    lingers: bool = False
    settles_on_read: bool = False

    def at_once(self) -> Residence:
        """Return that of a storage that lets go at once, and brings back when it is asked."""
        return replace(self, last=0, in_flight=0, ahead=0, limit=None, lingers=False, settles_on_read=False)


def residence_of(storage: Any, *, on_host: bool) -> Residence | None:
    """Return how long a storage leaves tensors in memory; None for one whose ways are its own.

    Args:
        on_host: whether the tensors are in the memory of the host.
    """
    if not isinstance(storage, (Host, Disk)):
        return None
    mover, limit = storage._mover, storage.allowed_bytes
    if isinstance(storage, Host):
        return Residence(mover.least_bytes, mover.last, 1, mover.ahead, limit, 1 / 8, settles_on_read=True)
    if on_host:
        return Residence(mover.least_bytes, mover.last, WRITING, mover.ahead, limit, lingers=True)
    return Residence(mover.least_bytes, mover.last, 0, 0, limit)


class RehearsedPiece(Piece):
    """A run of elements of a fake tensor: in memory, on its way, or away."""

    waits = True

    def __init__(self, memory: Memory, extent: Extent, run: Any, rehearsal: Rehearsal) -> None:
        super().__init__(memory, extent)
        self.nbytes = run.nbytes
        self._run: Tensor | None = run
        self._elements, self._like = run.numel(), rehearsal.like(run)
        self._rehearsal = rehearsal
        self._key = next(rehearsal.keys)
        self._coming: Tensor | None = None
        self._is_sent = False

    def tell(self, what: MoveKind) -> None:
        """Tell of a transfer."""
        self._rehearsal.tell(what, self._key, self.nbytes)

    def send(self) -> bool:
        """Begin to copy; return whether there is room."""
        if self._run is None or self._is_sent or not self._rehearsal.reserve(self.nbytes):
            return False
        self._is_sent = True
        self._tell_of_write()
        self.tell("sent")
        return True

    def let_go(self) -> None:
        """Let go of the memory, now that it is copied."""
        if self._is_sent and self._run is not None:
            self._tell_of_write()
            self._run = None
            self.memory.let_go()
            self.tell("settled")

    def _tell_of_write(self) -> None:
        if self._run is not None and self.memory.is_written(self._run):
            self._rehearsal.fail("a tensor is modified in place before it is copied")

    def start_back(self) -> None:
        if self._run is None and self._coming is None:
            self._coming = self._like.new_empty(self._elements)
            self.tell("fetched")

    def read(self) -> Tensor:
        if self._run is not None:
            self._tell_of_write()
            return self._run
        self.start_back()
        run, self._coming = self._coming, None
        assert run is not None
        self.tell("read")
        return run

    def load(self) -> Tensor:
        run = super().load()
        self._rehearsal.is_read(self)
        return run

    def __del__(self) -> None:
        if self._is_sent:
            self._rehearsal.free(self.nbytes)
        for run in (self._run if self._is_sent else None, self._coming):
            if run is not None:
                self._rehearsal.linger(run)


class Rehearsal(Mover):
    """A storage that only rehearses: it leaves tensors in memory for as long as `residence` says.

    Attributes:
        tell: is called with each transfer: what it is, the number of the tensor, bytes.
        keys: numbers of tensors.
        stored_bytes, most_stored_bytes: in whole pages, now and at most.
        failures: why the real storage could not do the same.
    """

    shares_views = True
    is_rehearsal = True  # what a candidate of a plan moves was not asked for

    def __init__(self, residence: Residence) -> None:
        super().__init__(residence.least_bytes)
        self.tell: Callable[[MoveKind, int, int], None] = lambda what, key, nbytes: None
        self.stored_bytes = self.most_stored_bytes = 0
        self.failures: list[str] = []
        self._residence = residence
        self._series: Series[RehearsedPiece] = Series()
        self._lingering: list[Tensor] = []
        self.keys = itertools.count(1)
        self._kinds: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, run: Tensor) -> Tensor:
        """Return an empty tensor of the same kind, of which others can be made: each costs a step an op."""
        key = run.dtype, run.device
        if key not in self._kinds:
            self._kinds[key] = run.new_empty(0)
        return self._kinds[key]

    def fail(self, reason: str) -> None:
        """Note why the real storage could not do this."""
        if reason not in self.failures:
            self.failures.append(reason)

    def put_fake(self, run: Any, memory: Memory, extent: Extent) -> Piece:
        piece = RehearsedPiece(memory, extent, run, self)
        piece.tell("taken")
        series = self._series
        series.add(piece)
        for first in series.begin_to_go(self._residence.last):
            if first.send():
                series.going.append(ref(first))
                for gone in series.have_gone(self._residence.in_flight):
                    gone.let_go()
        return piece

    def is_read(self, piece: RehearsedPiece) -> None:
        """A tensor was read: begin to bring back those before it."""
        wanted = self._series.bring_back_before(piece.number, self._residence.ahead)
        if self._residence.settles_on_read:
            for gone in self._series.have_gone_but([*wanted, piece]):
                gone.let_go()

    def reserve(self, nbytes: int) -> bool:
        """Take room in the storage, if there is any."""
        limit = self._residence.limit
        if limit is not None and self.stored_bytes + in_pages(nbytes) > limit:
            self.fail(f"the limit of {limit:,} bytes is reached")
            return False
        self.stored_bytes += in_pages(nbytes)
        self.most_stored_bytes = max(self.most_stored_bytes, self.stored_bytes)
        return True

    def free(self, nbytes: int) -> None:
        """Give room back."""
        self.stored_bytes -= in_pages(nbytes)

    def linger(self, run: Tensor) -> None:
        """Keep the memory of a copy that is not waited for, as long as threads may be at it."""
        if self._residence.lingers:
            self._lingering.append(run)
            self._lingering.sort(key=lambda kept: -kept.nbytes)
            del self._lingering[self._residence.in_flight :]
