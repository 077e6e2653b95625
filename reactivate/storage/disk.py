"""A disk: for what neither the device nor the host has room for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from reactivate.errors import UsageError
from reactivate.storage.disk_file import check_system, free_bytes as disk_bytes
from reactivate.storage.moving import Moving
from reactivate.storage.spool import Spool


@dataclass(frozen=True)
class Disk(Moving):
    """Keep tensors in a file, and read them for the backward.

    Threads write and read, beside what computes. In the backward each tensor that is read starts to read the one that was
    taken in before it. The last tensors taken in stay in memory, since the backward needs these at once. At most two
    tensors are being written at a time: a forward that is faster than the disk waits for it. Views of one memory are
    written once. Parameters and other leaves stay where they are. Tensors of a device are copied through the host's memory,
    and the host waits for these copies.

    Each process has a file of its own in the directory `path`, from the first tensor that it writes on. The file has no name:
    no other process can read it, and the operating system frees it when the storage is let go and when the process ends, also
    if it is killed. A process that is forked makes a file of its own, if it uses the storage.

    A tensor is kept as it is when it is taken in. A modification before it is written raises an error in the backward, as
    autograd does, if a version counter sees it: one through `tensor.data` is not noticed. A tensor that is taken in again,
    by the next region say, is compared with what was taken in before by checksum; if they differ, it is written too. If the
    disk is full or fails, tensors stay in memory, and a warning says so once. If a tensor cannot be read again, the
    backward raises a `reactivate.errors.StorageError`.

    Args:
        path: a directory that exists, on a local and fast disk.
        limit: the most bytes of the file, as an int or a text ("100GiB"); as much as there is room for by default. Over it,
            tensors stay in memory, and a warning says so once.
        least_bytes: smaller tensors stay in memory; an int or a text as well.
        ahead: how many tensors are being read while another one is used.
        last: how many tensors, of those taken in last, stay in memory.

    Raises:
        UsageError: an argument is none of these; when a step is planned with it, or the first tensor is written, there is no
            such directory.

    Examples:
        >>> import reactivate, tempfile
        >>> disk = reactivate.storage.Disk(tempfile.gettempdir(), limit=100 * 2**30)
        >>> policy = reactivate.policies.full(inputs=disk)
    """

    path: str
    limit: int | str | None = field(default=None, kw_only=True)
    least_bytes: int | str = field(default=2**20, kw_only=True)
    ahead: int = field(default=1, kw_only=True)
    last: int = field(default=1, kw_only=True)
    _mover: Spool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_system()
        try:
            path = os.fspath(self.path)
        except TypeError:
            raise UsageError(f"Disk(path) takes the path of a directory, and was given {self.path!r}.") from None
        object.__setattr__(self, "path", os.fsdecode(path))
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise UsageError(f"Disk(path) takes the path of a directory, and {self.path!r} is none.")
        object.__setattr__(self, "_mover", Spool(self.path, *self._checked()))

    @property
    def allowed_bytes(self) -> int:
        """Return the most bytes that the file may have: the limit, or what is free on the disk."""
        return disk_bytes(self.path) if self._mover.limit is None else self._mover.limit

    @property
    def used_bytes(self) -> int:
        """Bytes of the file in which there are tensors now."""
        file = self._mover.file
        return 0 if file is None else file.used_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        file = self._mover.file
        return 0 if file is None else file.file_bytes
