"""The way to a storage and back: how fast it is in each direction, measured here or as a description says."""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from reactivate.errors import UsageError
from reactivate.storage.disk import Disk
from reactivate.storage.disk_file import DiskFile
from reactivate.storage.host import Host
from reactivate.storage.slabs import Slabs
from reactivate.storage.streams import CopyStreams, current_stream, has_streams

_PROBE_BYTES = 32 * 2**20
_ROUNDS = 5
_TENSORS = 32  # small ones, for what each costs the program


@dataclass(frozen=True)
class Link:
    """The way between a device and a storage.

    Attributes:
        out_bytes_per_second: to the storage.
        back_bytes_per_second: from it.
        tensor_seconds: what a tensor costs the program itself, to hand it over and to ask for it, however small it is.

    Raises:
        UsageError: a value is none that a way can have.
    """

    out_bytes_per_second: float
    back_bytes_per_second: float
    tensor_seconds: float = 5e-5

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_second", "back_bytes_per_second", "tensor_seconds"):
            value = getattr(self, name)
            is_number = type(value) in (int, float) and math.isfinite(value) and value >= 0
            if not is_number or (value == 0 and name != "tensor_seconds"):
                raise UsageError(f"a link: {name}={value!r} is not allowed. It takes a number above 0.")

    def out_seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy to the storage."""
        return nbytes / self.out_bytes_per_second

    def back_seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy from the storage."""
        return nbytes / self.back_bytes_per_second


def link_between(storage: Any, device: torch.device) -> Link:
    """Measure the way between a device that is here and a storage; once in a process.

    Args:
        storage: a `Host` or a `Disk`.
        device: where the tensors are.
    """
    return _measured(os.path.abspath(storage.path) if isinstance(storage, Disk) else None, device)


@functools.cache
def _measured(path: str | None, device: torch.device) -> Link:
    with _host_copies(device) if path is None else _disk_copies(path, device) as copies:
        out, back = _of_several(*copies)
    storage: Any = Host(least_bytes=0) if path is None else Disk(path, least_bytes=0)
    return Link(_PROBE_BYTES / out, _PROBE_BYTES / back, _tensor_seconds(storage, device))


def _of_several(out: Callable[[], object], back: Callable[[], object]) -> tuple[float, float]:
    """Return the median times of two calls that take turns, so that what slows the machine slows both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(_ROUNDS + 1):
        for call, times in zip((out, back), seconds):
            began = perf_counter()
            call()
            if number:  # the first is to warm up
                times.append(perf_counter() - began)
    return max(statistics.median(seconds[0]), 1e-9), max(statistics.median(seconds[1]), 1e-9)


Copies = tuple[Callable[[], object], Callable[[], object]]


@contextmanager
def _host_copies(device: torch.device) -> Iterator[Copies]:
    """Yield functions that copy to the host, and back."""
    run = torch.ones(_PROBE_BYTES, dtype=torch.uint8, device=device)
    if not has_streams(device):
        there = run.to("cpu")
        yield functools.partial(run.to, "cpu"), functools.partial(there.to, device)
        return
    streams, slabs = CopyStreams(device), Slabs(device.type, _PROBE_BYTES)
    slab = slabs.take(_PROBE_BYTES)
    assert slab is not None
    memory = slab.run_of(_PROBE_BYTES, torch.uint8)

    def out() -> None:
        slab.last = streams.take_out(run, memory, slab.last, current_stream(device))
        slab.last.synchronize()

    def back() -> None:
        _, slab.last = streams.bring_back(memory, current_stream(device))
        slab.last.synchronize()

    try:
        yield out, back
    finally:
        slabs.give_back(slab)
        slabs.clear()


@contextmanager
def _disk_copies(path: str, device: torch.device) -> Iterator[Copies]:
    """Yield functions that write to the disk, and read from it, with the way from the device to the host."""
    run = torch.ones(_PROBE_BYTES, dtype=torch.uint8, device=device)
    file = DiskFile(path, None, os.getpid())
    area = file.take(_PROBE_BYTES)
    assert area is not None
    there = torch.empty(_PROBE_BYTES, dtype=torch.uint8)

    def out() -> None:
        file.write(area, run.to("cpu"))

    def back() -> None:
        file.read(area, there)
        there.to(device)

    yield out, back  # the file goes when these are let go


def _tensor_seconds(storage: Any, device: torch.device) -> float:
    """Return the seconds that a small tensor takes of the program, to hand it over or to ask for it."""
    tensors = [torch.ones(16, device=device) for _ in range(_TENSORS)]

    def once() -> float:
        began = perf_counter()
        for handle in [storage.save(tensor) for tensor in tensors]:
            storage.load(handle)
        return (perf_counter() - began) / _TENSORS / 2

    return statistics.median(once() for _ in range(_ROUNDS))
