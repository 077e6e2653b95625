"""The order in which tensors go to the host and come back.

The last tensors taken in wait on the device. A tensor that others have come after goes; as soon as the next one goes, the
stream that computes waits for its copy, and its memory on the device is let go. In the backward, reading a tensor starts
the copy of those that were taken in before it. The rules cited are those of `streams.py`.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from reactivate._torch.modes import FakeTensor
from reactivate.storage.moved import Mover
from reactivate.storage.pieces import WRITTEN, Piece
from reactivate.storage.placement import Extent, Memory
from reactivate.storage.series import Series
from reactivate.storage.slabs import Slab, Slabs, half_of_memory
from reactivate.storage.streams import CopyStreams, has_streams, works_in_host_memory


class HostPiece(Piece):
    """A run of elements that is on the device, on its way, or in a slab."""

    waits = True

    def __init__(
        self,
        memory: Memory,
        extent: Extent,
        run: Tensor,
        series: Series[HostPiece],
        streams: CopyStreams,
        staging: Staging,
        slabs: Slabs,
    ) -> None:
        super().__init__(memory, extent)
        self._run: Tensor | None = run
        self._size = run.numel(), run.dtype
        self._series = series
        self._streams = streams
        self._staging = staging
        self._slabs = slabs
        self._slab: Slab | None = None
        self._gone: Any = None  # the event of the copy from the device, until the stream that computes waits for it
        self._coming: tuple[Tensor, Any] | None = None
        self._computing = series.stream  # in whose order the memory on the device comes

    def start(self) -> bool:
        """Start the copy from the device; return whether there was room for it."""
        run = self._run
        if run is None or self._slab is not None or self._look_for_write(run):
            return False
        slab = self._slabs.take(run.nbytes)
        if slab is None:
            return False
        self._slab = slab
        self._gone = slab.last = self._streams.take_out(run, slab.run_of(*self._size), slab.last, self._computing)
        return True

    def let_go(self) -> None:
        """Let go of the memory on the device (rule 2)."""
        if self._gone is not None and self._run is not None:
            self._computing.wait_event(self._gone)
            self._look_for_write(self._run)  # from here on, whatever writes comes after the copy
            self._run = self._gone = None
            self.memory.let_go()

    def start_back(self) -> None:
        """Start the copy to the device, if that is where it is not."""
        if self._run is None and self._coming is None and self._slab is not None and not self._is_written:
            self._coming = self._streams.bring_back(self._slab.run_of(*self._size), self._computing)
            self._slab.last = self._coming[1]

    def read(self) -> Tensor:
        if self._run is not None:
            if self._look_for_write(self._run):
                raise RuntimeError(WRITTEN)
            return self._run
        if self._is_written:
            raise RuntimeError(WRITTEN)
        self.start_back()
        assert self._coming is not None
        run, arrived = self._coming
        self._streams.wait(run, arrived, self._computing)
        self._coming = None
        self._staging.traffic.loaded_bytes += run.nbytes
        return run

    def held(self) -> list[Tensor]:
        if self._run is not None:
            return [self._run]
        return [] if self._slab is None else [self._slab.run_of(*self._size)]

    def load(self) -> Tensor:
        with self._staging.lock:
            run = super().load()
            wanted = self._series.bring_back_before(self.number, self._staging.ahead)
            for gone in self._series.have_gone_but([*wanted, self]):
                gone.let_go()
            return run

    def __del__(self) -> None:
        if sys.is_finalizing():  # the device's module may be gone
            return
        if self._gone is not None:
            self._computing.wait_event(self._gone)  # rule 2
        if self._coming is not None:
            self._computing.wait_event(self._coming[1])  # rule 4
        if self._slab is not None:
            self._slabs.give_back(self._slab)


class PlainPiece(Piece):
    """A run of elements on the host, copied in order with what computes: on a device that has no streams."""

    def __init__(self, memory: Memory, extent: Extent, run: Tensor) -> None:
        super().__init__(memory, extent)
        self._device = run.device
        self._run = run.to("cpu")

    def read(self) -> Tensor:
        return self._run.to(self._device)

    def held(self) -> list[Tensor]:
        return [self._run]


class Staging(Mover):
    """The tensors of one storage that are on their way.

    Args:
        limit: of locked bytes; None for half of the host's memory.
        least_bytes, last, ahead: as of any mover.

    Attributes:
        slabs: {type of a device: the memory of the host that such devices read and write}.
    """

    name = "reactivate.storage.Host"

    def __init__(self, limit: int | None, least_bytes: int, last: int, ahead: int) -> None:
        super().__init__(least_bytes, last, ahead)
        self.limit = half_of_memory() if limit is None else limit
        self.slabs: dict[str, Slabs] = {}
        self._streams: dict[torch.device, CopyStreams] = {}

    def reason_to_stay(self, tensor: Tensor) -> str | None:
        device = tensor.device
        if device.type == "cpu":
            return "they are on the host already"
        if not tensor.is_meta and not isinstance(tensor, FakeTensor) and works_in_host_memory(device):
            return "the device works in the host's memory"
        return super().reason_to_stay(tensor)

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        device = run.device
        if not has_streams(device):
            return PlainPiece(memory, extent, run)
        if device not in self._streams:
            self._streams[device] = CopyStreams(device)
        if device.type not in self.slabs:
            self.slabs[device.type] = Slabs(device.type, self.limit)
        series = self.order.series(device)
        piece = HostPiece(memory, extent, run, series, self._streams[device], self, self.slabs[device.type])
        series.add(piece)
        for first in series.begin_to_go(self.last):
            self._send(series, first)
        return piece

    def _send(self, series: Series[HostPiece], piece: HostPiece) -> None:
        if piece.start():
            self.count(piece, None)
            series.going.append(ref(piece))
            for gone in series.have_gone(1):
                gone.let_go()
        elif not piece._is_written:
            reason = f"the limit of {self.limit:,} locked bytes is reached"
            self.count(piece, reason)
            self.warn_once(
                f"{reason}, and tensors stay on the device. Raise it with Host(limit=...), if the machine has more memory."
            )
