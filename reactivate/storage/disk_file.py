"""The file of a disk storage: a directory of its own for each storage and process, locked as long as the process lives.

The lock is the kernel's, on the file itself, and ends with the process however that ends. So whoever starts next on the
same path tells the directories of the dead by it, and removes these. Process ids would not do: they are given again. A
directory whose file is not locked yet may be taken for a dead one's: whoever has just made it sees that, and makes another.
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

from reactivate.errors import UnsupportedError
from reactivate.storage.areas import Area, Areas

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX = "reactivate-"
_FILE = "tensors"


def check_system() -> None:
    """Raise an error where files cannot be locked, or read at a place.

    Raises:
        UnsupportedError: on such a system.
    """
    if fcntl is None or not hasattr(os, "preadv"):
        raise UnsupportedError("reactivate.storage.Disk needs a POSIX system: use reactivate.storage.Host here.")


def free_bytes(path: str) -> int:
    """Return how many bytes there is room for in a directory, or where it would be made."""
    place = os.path.abspath(path)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    return shutil.disk_usage(place).free


class DiskFile:
    """A file for tensors, removed with its directory when it is let go, and at exit.

    Args:
        path: of the directory in which its own directory is made.
        limit: the most bytes of the file; None for as many as there is room for.
        process: which one uses it.

    Attributes:
        directory: its own.
    """

    def __init__(self, path: str, limit: int | None, process: int) -> None:
        os.makedirs(path, exist_ok=True)
        remove_of_the_dead(path)
        self.directory, self._file = _started(path, process)
        self._areas = Areas(limit)
        self._reserved = 0
        self._process = process
        self._remove = weakref.finalize(self, _remove, self.directory, self._file, process)

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
        """Close the file in a process that was forked: it stays open, locked and in place in the parent."""
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
    nbytes = run.numel() * run.element_size()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(run.data_ptr())).cast("B") if nbytes else memoryview(b"")


def _whole(transfer: Callable[[int], int], nbytes: int) -> None:
    done = 0
    while done < nbytes:  # the kernel moves 2 GiB at most at once
        moved = transfer(done)
        if moved <= 0:
            raise OSError(errno.EIO, f"{done:,} of {nbytes:,} bytes were moved, and then no more")
        done += moved


def _started(path: str, process: int) -> tuple[str, FileIO]:
    """Return a new directory, and the open and locked file in it."""
    while True:
        directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{process}-", dir=path)  # with permissions for the user alone
        file = None
        try:
            file = _locked(os.path.join(directory, _FILE))
        finally:
            if file is None:
                _delete(directory)
        if file is not None:
            return directory, file


def _locked(name: str) -> FileIO | None:
    """Return a new file, open and locked; None if it was removed meanwhile."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        file = FileIO(os.open(name, flags, 0o600), "r+")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.fstat(file.fileno()).st_nlink > 0
    except BlockingIOError:  # somebody is about to remove it
        is_there = False
    except BaseException:
        file.close()
        raise
    if is_there:
        return file
    file.close()
    return None


def _remove(directory: str, file: FileIO, process: int) -> None:
    if os.getpid() == process:
        _delete(directory)
    file.close()


def _delete(directory: str) -> None:
    """Remove a directory and the file in it, and nothing else that somebody may have put there."""
    try:
        os.unlink(os.path.join(directory, _FILE))
    except FileNotFoundError:
        pass
    except OSError:
        return  # at exit there is nobody to tell; the next start tries again
    _delete_empty(directory)


def _delete_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        return


def remove_of_the_dead(path: str) -> None:
    """Remove the directories in `path` whose processes are gone; those that cannot be removed stay."""
    with os.scandir(path) as entries:
        found = [
            entry.path for entry in entries if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)
        ]
    for directory in found:
        try:
            file = os.open(os.path.join(directory, _FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            _delete_empty(directory)  # its file was removed already, or is not there yet
            continue
        except OSError:
            continue  # another user's
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # alive
        else:
            _delete(directory)
        finally:
            os.close(file)
