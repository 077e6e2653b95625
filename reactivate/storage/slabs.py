"""Locked memory of the host, which a device reads and writes beside the processor.

A slab is memory of exactly the size that was asked for, locked where it is: torch's own allocator of such memory rounds up
to the next power of two.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from reactivate.storage.areas import in_pages

_SLACK = 8  # a slab may be larger than what it holds by an eighth


class Slab:
    """Locked memory.

    Attributes:
        memory: bytes.
        last: the event of the last copy from or to it; None before the first.
    """

    __slots__ = ("_unlock", "last", "memory")

    def __init__(self, nbytes: int, lock: Callable[[Tensor], Callable[[], None]]) -> None:
        # Of its own pages: locking is by pages, and two slabs on one would be locked and unlocked together.
        area = mmap.mmap(-1, nbytes)
        self.memory = torch.frombuffer(area, dtype=torch.uint8)
        self.last: Any = None
        self._unlock: Callable[[], None] | None = None  # also where it cannot be locked
        self._unlock = lock(self.memory)

    def release(self) -> None:
        """Unlock the memory, once the last copy is done (rule 6)."""
        unlock, self._unlock = self._unlock, None
        if unlock is None:
            return
        if self.last is not None:
            self.last.synchronize()
        unlock()

    def __del__(self) -> None:
        """Unlock it before the system has it back: what is mapped at its address next could not be locked."""
        if not sys.is_finalizing():  # the system unlocks what a process has
            self.release()

    def run_of(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the memory as elements of a dtype."""
        nbytes = elements * dtype.itemsize
        return self.memory[:nbytes].view(dtype)


class Slabs:
    """All slabs for one kind of device, in use and free ones.

    Args:
        device_type: which devices are to read and write them.
        limit: the most bytes to lock.
    """

    def __init__(self, device_type: str, limit: int) -> None:
        self._lock_memory = _locker(device_type)
        self._guard = RLock()  # a slab comes back when a graph is let go: on any thread, and at any place
        self._limit = limit
        self._free: list[Slab] = []  # the one that was used last is last
        self._most = 0
        self.locked_bytes = 0
        self.used_bytes = 0

    def take(self, nbytes: int) -> Slab | None:
        """Return a slab of at least `nbytes`, None if that would be over the limit."""
        nbytes = in_pages(nbytes)
        with self._guard:
            slab = self._fitting(nbytes) or self._new(nbytes)
            if slab is not None:
                self.used_bytes += slab.memory.nbytes
                self._most = max(self._most, self.used_bytes)
            return slab

    def give_back(self, slab: Slab) -> None:
        """Take back a slab that is not needed any more."""
        with self._guard:
            self.used_bytes -= slab.memory.nbytes
            self._free.append(slab)

    def _fitting(self, nbytes: int) -> Slab | None:
        fitting = [slab for slab in self._free if nbytes <= slab.memory.nbytes <= nbytes + nbytes // _SLACK]
        if not fitting:
            return None
        best = min(fitting, key=lambda slab: slab.memory.nbytes)
        self._free.remove(best)
        return best

    def _new(self, nbytes: int) -> Slab | None:
        if self.used_bytes + nbytes > self._limit:
            return None
        # Free slabs of other sizes are kept up to a quarter of what was in use at most: shapes may change every step.
        most = min(self._limit, max(self._most, self.used_bytes + nbytes) * 5 // 4)
        while self._free and self.locked_bytes + nbytes > most:
            self._drop(self._free.pop(0))
        self.locked_bytes += nbytes
        return Slab(nbytes, self._lock_memory)

    def _drop(self, slab: Slab) -> None:
        self.locked_bytes -= slab.memory.nbytes
        slab.release()

    def clear(self) -> None:
        """Let go of all free slabs."""
        with self._guard:
            while self._free:
                self._drop(self._free.pop())


def half_of_memory() -> int:
    """Return half of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _locker(device_type: str) -> Callable[[Tensor], Callable[[], None]]:
    """Return what locks memory for a kind of device, and returns what unlocks it."""
    module: Any = torch.get_device_module(device_type)
    if not hasattr(module, "cudart"):
        return _left_unlocked
    runtime = module.cudart()

    def lock(memory: Tensor) -> Callable[[], None]:
        address = memory.data_ptr()
        _check(runtime.cudaHostRegister(address, memory.nbytes, 0), "lock", memory.nbytes)

        def unlock() -> None:
            _check(runtime.cudaHostUnregister(address), "unlock", memory.nbytes)

        return unlock

    return lock


def _check(code: Any, verb: str, nbytes: int) -> None:
    if int(code) != 0:
        raise RuntimeError(f"CUDA could not {verb} {nbytes:,} bytes of the host's memory: error {int(code)}.")


def _left_unlocked(memory: Tensor) -> Callable[[], None]:
    return lambda: None
