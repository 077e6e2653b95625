"""Areas of a file: which bytes of it are in use."""

from __future__ import annotations

import mmap
from bisect import bisect
from collections import deque
from threading import Lock


def in_pages(nbytes: int) -> int:
    """Round a number of bytes up to whole pages, as a storage does."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class Area:
    """A stretch of a file, in use as long as it lives.

    Attributes:
        start, nbytes: where it is.
        checksum: of what is in it; None as long as there is nothing.
    """

    __slots__ = ("_returned", "checksum", "nbytes", "start")

    def __init__(self, start: int, nbytes: int, returned: deque[tuple[int, int]]) -> None:
        self.start = start
        self.nbytes = nbytes
        self.checksum: int | None = None
        self._returned = returned

    @property
    def stop(self) -> int:
        """Return where it ends."""
        return self.start + self.nbytes

    def __del__(self) -> None:
        # On any thread and at any place: so there is no lock here, and the next `take` does the rest.
        self._returned.append((self.start, self.nbytes))


class Areas:
    """All areas of a file, each of whole pages. The smallest free stretch that is large enough is used next.

    Args:
        limit: where the file has to end; None for nowhere.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._guard = Lock()
        self._end = 0
        self._used = 0
        self._free: list[tuple[int, int]] = []  # (start, stop), in order, no two of them side by side
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes of the areas that are in use."""
        with self._guard:
            self._take_back()
            return self._used

    def take(self, nbytes: int) -> Area | None:
        """Return an area of at least `nbytes`, None if the file would end behind the limit."""
        nbytes = in_pages(nbytes)
        with self._guard:
            self._take_back()
            start = self._fitting(nbytes)
            if start is None:
                if self._limit is not None and self._end + nbytes > self._limit:
                    return None
                start = self._end
                self._end += nbytes
            self._used += nbytes
            return Area(start, nbytes, self._returned)

    def _fitting(self, nbytes: int) -> int | None:
        fitting = [(stop - start, start) for start, stop in self._free if stop - start >= nbytes]
        if not fitting:
            return None
        size, start = min(fitting)
        self._free.remove((start, start + size))
        if size > nbytes:
            self._insert(start + nbytes, start + size)
        return start

    def _take_back(self) -> None:
        while self._returned:
            start, nbytes = self._returned.popleft()
            self._used -= nbytes
            self._insert(start, start + nbytes)
        if self._free and self._free[-1][1] == self._end:
            self._end = self._free.pop()[0]

    def _insert(self, start: int, stop: int) -> None:
        index = bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
