"""The file of a disk storage: it has no name, so it is gone however the process ends, and no other process sees it.

A file without a name lives as long as a process has it open. So there is nothing to remove in a directory of the user's, and
nothing to tell from what a process left that was killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable
from io import FileIO

from torch import Tensor

from reactivate.errors import UnsupportedError, UsageError
from reactivate.storage.areas import Area, Areas


def check_system() -> None:
    """Raise an error where a file cannot be without a name, or be read at a place.

    Raises:
        UnsupportedError: on such a system.
    """
    if not hasattr(os, "preadv"):
        raise UnsupportedError("reactivate.storage.Disk needs a POSIX system: use reactivate.storage.Host here.")


def free_bytes(path: str) -> int:
    """Return how many bytes there is room for in a directory, or where it would be."""
    place = os.path.abspath(path)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    return shutil.disk_usage(place).free


def check_directory(path: str) -> None:
    """Raise an error if there is no such directory.

    Raises:
        UsageError: there is none.
    """
    if not os.path.isdir(path):
        raise UsageError(
            f"Disk({path!r}) keeps its file in a directory that is there, and there is none at {os.path.abspath(path)}. Make "
            "it, or correct the path."
        )


class DiskFile:
    """A file for tensors, which is gone when it is let go, and when the process ends.

    Args:
        path: of the directory that it is in.
        limit: the most bytes of the file; None for as many as there is room for.
        process: which one uses it.

    Raises:
        UsageError: there is no such directory.
        OSError: no file can be made in it.
    """

    def __init__(self, path: str, limit: int | None, process: int) -> None:
        check_directory(path)
        self.path = path
        self._file: FileIO = tempfile.TemporaryFile(buffering=0, dir=path)  # noqa: SIM115
        self._areas = Areas(limit)
        self._reserved = 0
        self._process = process
        weakref.finalize(self, self._file.close)

    @property
    def is_lost(self) -> bool:
        """Return whether it is another process's: that of the parent, from which this one was forked."""
        return self._file.closed or os.getpid() != self._process

    @property
    def used_bytes(self) -> int:
        """Bytes of the file in which there are tensors now."""
        return self._areas.used_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._file.fileno()).st_size

    def leave_to_parent(self) -> None:
        """Close the file in a process that was forked: it stays open in the parent."""
        self._file.close()

    def take(self, nbytes: int) -> Area | None:
        """Return an area of the file, None if that would be over the limit.

        Raises:
            OSError: the disk is full.
        """
        area = self._areas.take(nbytes)
        if area is not None and area.stop > self._reserved:
            # A file system may say so late, or never, that there is no room for what was written. Now it says so.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), self._reserved, area.stop - self._reserved)
            self._reserved = area.stop
        return area

    def write(self, area: Area, run: Tensor) -> None:
        """Write the elements of `run`, which is dense and on the host.

        Raises:
            OSError: not all of them could be written.
        """
        memory = _bytes_of(run)
        _whole(lambda done: os.pwrite(self._file.fileno(), memory[done:], area.start + done), memory.nbytes)
        area.checksum = zlib.crc32(memory)

    def read(self, area: Area, run: Tensor) -> None:
        """Read the elements of `run`, which is dense and on the host.

        Raises:
            OSError: not all of them could be read, or they are not what was written.
        """
        memory = _bytes_of(run)
        _whole(lambda done: os.preadv(self._file.fileno(), [memory[done:]], area.start + done), memory.nbytes)
        if zlib.crc32(memory) != area.checksum:
            raise OSError(errno.EIO, "other bytes were read than had been written")


def _bytes_of(run: Tensor) -> memoryview:
    nbytes = run.nbytes
    return memoryview((ctypes.c_ubyte * nbytes).from_address(run.data_ptr())).cast("B") if nbytes else memoryview(b"")


def _whole(transfer: Callable[[int], int], nbytes: int) -> None:
    done = 0
    while done < nbytes:  # the kernel moves 2 GiB at most at once
        moved = transfer(done)
        if moved <= 0:
            raise OSError(errno.EIO, f"{done:,} of {nbytes:,} bytes were moved, and then no more")
        done += moved
