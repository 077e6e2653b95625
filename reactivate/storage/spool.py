"""The order in which tensors go to a disk and come back.

The last tensors taken in wait in memory. A tensor that others have come after is written by a thread of its own, and its
memory is let go when it is written and the storage is used next: by the thread that took it in, since only there no op can be
in the middle of modifying it. In the backward, reading a tensor starts to read those that were taken in before it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from reactivate.errors import StorageError
from reactivate.storage.areas import Area
from reactivate.storage.disk_file import DiskFile
from reactivate.storage.moved import Mover
from reactivate.storage.pieces import WRITTEN, Piece
from reactivate.storage.placement import Extent, Memory
from reactivate.storage.series import Series

Reading = tuple[Tensor, Future[None]]
"""A run that is being read, and the future of its end."""

_THREADS = 2
WRITING = 2  # tensors that are being written, at most: a disk that is slower than the model must not fill the memory


class Write:
    """A tensor on its way to the file.

    Attributes:
        run: its elements, on the host.
        area: where to.
        done: the future of its end.
        error: why it failed, if it did; without its traceback, which would hold the tensor.
    """

    done: Future[None]
    error: BaseException | None = None

    def __init__(self, file: DiskFile, area: Area, run: Tensor) -> None:
        self.file = file
        self.area: Area | None = area
        self.run: Tensor | None = run

    def __call__(self) -> None:
        # Nothing of the thread's has the memory once it is written: the code that waits for that counts on it.
        run, self.run = self.run, None
        assert self.area is not None
        assert run is not None
        try:
            self.file.write(self.area, run)
        except Exception as error:  # on the thread that writes: it is raised where the tensor is read
            self.error = error.with_traceback(None)

    def drop(self) -> None:
        """Let go of everything, if it was not begun yet. It is not needed any more."""
        if not self.file.is_lost and self.done.cancel():
            self.area = self.run = None


class DiskPiece(Piece):
    """A run of elements that is in memory, on its way, or in a file."""

    waits = True

    def __init__(self, memory: Memory, extent: Extent, run: Tensor, series: Series[DiskPiece], spool: Spool) -> None:
        super().__init__(memory, extent)
        self._run: Tensor | None = run  # in memory that others may write to
        self._copy: Tensor | None = None  # on the host, in memory that nothing else writes to
        self._size, self._device = (run.numel(), run.dtype), run.device
        self._series = series
        self._spool = spool
        self._write: Write | None = None
        self._area: Area | None = None
        self._file: DiskFile | None = None
        self._coming: Reading | None = None

    def start(self) -> bool:
        """Start to write the elements to the file; return whether there was room."""
        run = self._run
        if run is None or self._look_for_write(run):
            return True
        begun = self._spool.write(run)
        if begun is None:
            self._spool.count(self, "there is no room for them")
            return False
        self._spool.count(self, None)
        self._write, on_host = begun
        if on_host is not run:
            self._run, self._copy = None, on_host
            self.memory.let_go()
        return True

    def is_writing(self) -> bool:
        """Return whether the elements are being written."""
        return self._write is not None and not self._write.done.done()

    def wait(self) -> None:
        """Wait until the elements are written."""
        if self._write is not None and not self._write.file.is_lost:
            self._write.done.result()

    def settle(self) -> None:
        """Let go of the memory, now that the elements are in the file."""
        write, self._write = self._write, None
        if write is None or write.file.is_lost:
            return
        if write.error is not None:
            self._spool.count(self, "they could not be written")
            self._spool.warn_of_no_room(f"a tensor could not be written ({write.error})")
            return
        if self._run is not None:
            self._look_for_write(self._run)
            self.memory.let_go()
        self._area, self._file = write.area, write.file
        self._run = self._copy = None

    def start_back(self) -> None:
        if self._area is not None and self._file is not None and self._coming is None and not self._file.is_lost:
            elements, dtype = self._size
            self._coming = self._spool.read(self._file, self._area, torch.empty(elements, dtype=dtype, device="cpu"))

    @property
    def stored_bytes(self) -> int:
        return self.memory.nbytes

    def load(self) -> Tensor:
        with self._spool.lock:
            run = self.loaded()
            if run is None:
                run = self._in_memory()
            coming = self._start() if run is None else None
            self._series.bring_back_before(self.number, self._spool.ahead)
            if run is not None:
                return self.note_loaded(run)
        assert coming is not None
        return self._arrived(*coming)

    def _in_memory(self) -> Tensor | None:
        if self._run is not None:
            self._look_for_write(self._run)
        if self._is_written:
            raise RuntimeError(WRITTEN)
        return self._run if self._copy is None else self._copy.to(self._device)

    def _start(self) -> Reading:
        assert self._file is not None
        if self._file.is_lost:
            raise StorageError(
                f"A tensor is in a file in {self._file.path} of the process from which this one was forked. Run the "
                "backward in the process that ran the forward."
            )
        self.start_back()
        assert self._coming is not None
        return self._coming

    def _arrived(self, run: Tensor, coming: Future[None]) -> Tensor:
        """Wait for a read, while other threads start theirs."""
        assert self._file is not None
        error = coming.exception()
        there = None if error else run.to(self._device)
        with self._spool.lock:
            if self._coming is not None and self._coming[0] is run:
                self._coming = None
                self._spool.traffic.loaded_bytes += run.nbytes
            if there is not None:
                return self.note_loaded(there)
        raise StorageError(
            f"A tensor of {run.nbytes:,} bytes could not be read from the file in {self._file.path}: "
            f"{error}. The disk may have failed."
        ) from error

    def __del__(self) -> None:
        if self._write is not None:
            self._write.drop()


class Spool(Mover):
    """The tensors of one storage that are in its file, or on their way.

    Args:
        path: where the file is made.
        limit: of the file, in bytes.
        least_bytes, last, ahead: as of any mover.
    """

    rests_in_memory = False

    def __init__(self, path: str, limit: int | None, least_bytes: int, last: int, ahead: int) -> None:
        self.file: DiskFile | None = None
        self.name = f"reactivate.storage.Disk({path!r})"
        self._path = path
        self.limit = limit
        super().__init__(least_bytes, last, ahead)
        _SPOOLS.add(self)

    def begin(self) -> None:
        super().begin()  # what the parent has in memory is not this process's to count on
        if self.file is not None:
            self.file.leave_to_parent()
        self.file = None
        self._threads: ThreadPoolExecutor | None = None

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        series = self.order.series(run.device)
        piece = DiskPiece(memory, extent, run, series, self)
        series.add(piece)
        for first in series.begin_to_go(self.last):
            if first.start():
                series.going.append(ref(first))
        return piece

    def settle(self) -> None:
        """Let go of what is written, of all that this thread took in, and wait for the first if too many are not."""
        for series in self.order.of_this_thread():
            while series.going:
                first = series.going[0]()
                if first is not None:
                    if first.is_writing() and len(series.going) <= WRITING:
                        break
                    first.wait()  # without the lock: other threads read meanwhile
                    with self.lock:
                        first.settle()
                series.going.popleft()

    def prefetch_last(self, key: Any) -> None:
        self.settle()
        super().prefetch_last(key)

    def write(self, run: Tensor) -> tuple[Write, Tensor] | None:
        """Start to write a run to the file: that, and the run on the host; None if there is no room for it."""
        nbytes = run.nbytes
        try:
            if self.file is None:
                self.file = DiskFile(self._path, self.limit, os.getpid())
            area = self.file.take(nbytes)
        except OSError as error:
            self.warn_of_no_room(f"there is no file of {nbytes:,} bytes more ({error})")
            return None
        if area is None:
            self.warn_of_no_room(f"the limit of {self.limit:,} bytes is reached")
            return None
        on_host = run.to("cpu")
        write = Write(self.file, area, on_host)
        write.done = self._pool().submit(write)
        return write, on_host

    def read(self, file: DiskFile, area: Area, run: Tensor) -> Reading:
        """Start to read a run from the file: the run, and the future of its end."""
        return run, self._pool().submit(file.read, area, run)

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="reactivate-disk")
        return self._threads

    def warn_of_no_room(self, reason: str) -> None:
        """Warn that tensors stay in memory, once."""
        self.warn_once(f"{reason}, and tensors stay in memory. Give it a path with more room, or raise its limit.")


_SPOOLS: WeakSet[Spool] = WeakSet()


def _begin_in_child() -> None:
    for spool in list(_SPOOLS):
        spool.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
