"""Pieces in the order in which a storage took them in, which a backward reads from its end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch

from reactivate.storage.pieces import Piece
from reactivate.storage.streams import current_stream

P = TypeVar("P", bound=Piece)


class Series(Generic[P]):
    """Pieces in the order in which they were taken in.

    Attributes:
        group: which series it is, for those who take in several before the first is read.
        stream: the one that computes what is taken in; None where there is none.
        pieces: all that are still needed, and some that are not.
        waiting: those that wait where they were.
        going: those that are on their way.
    """

    def __init__(self, group: Any = None, stream: Any = None) -> None:
        self.group = group
        self.stream = stream
        self.pieces: list[ref[P]] = []
        self.waiting: deque[ref[P]] = deque()
        self.going: deque[ref[P]] = deque()

    def add(self, piece: P) -> None:
        """Note the piece that was taken in last."""
        while self.pieces and self.pieces[-1]() is None:
            self.pieces.pop()
        piece.number = len(self.pieces)
        self.pieces.append(ref(piece))
        self.waiting.append(ref(piece))

    def begin_to_go(self, last: int) -> Iterator[P]:
        """Yield the pieces that wait no longer, since more than `last` came after them."""
        return _first_of(self.waiting, last)

    def have_gone(self, in_flight: int) -> Iterator[P]:
        """Yield the pieces that are no longer on their way, since at most `in_flight` are at a time."""
        return _first_of(self.going, in_flight)

    def have_gone_but(self, needed: list[P]) -> Iterator[P]:
        """Yield the pieces that are no longer on their way, since something is read: all but those that are needed."""
        for reference in list(self.going):
            piece = reference()
            if piece is None or piece not in needed:
                self.going.remove(reference)
                if piece is not None:
                    yield piece

    def bring_back_before(self, number: int, count: int) -> list[P]:
        """Start to bring back the pieces taken in before the one with a number, and return them."""
        found = self.before(number, count)
        for other in found:
            other.start_back()
        return found

    def before(self, number: int, count: int) -> list[P]:
        """Return these pieces, the nearest first, of those that are still needed."""
        found: list[P] = []
        for reference in reversed(self.pieces[max(0, number - 2 * count) : number]):
            piece = reference()
            if piece is not None and len(found) < count:
                found.append(piece)
        return found


def _first_of(queue: deque[ref[P]], left: int) -> Iterator[P]:
    """Take the first pieces out of a queue until so many are left, and yield those that are still needed."""
    while len(queue) > left:
        piece = queue.popleft()()
        if piece is not None:
            yield piece


class Order(Generic[P]):
    """All series of a storage: one for each thread that takes tensors in, device and stream of these, and group.

    A series lives as long as one of its pieces. What one stream computes no other one sends away: it has not waited for it.
    """

    def __init__(self) -> None:
        self._all: WeakSet[Series[P]] = WeakSet()
        self._mine = _Mine()

    def series(self, device: torch.device) -> Series[P]:
        """Return the series of this thread and its stream for tensors of a device, in the group of the context around."""
        stream = current_stream(device)
        key = device, stream, self._mine.group
        found = self._mine.series.get(key)
        if found is None:
            found = self._mine.series[key] = Series(self._mine.group, stream)
            self._all.add(found)
        return found

    def of_this_thread(self) -> list[Series[P]]:
        """Return the series that this thread takes tensors into."""
        return list(self._mine.series.values())

    def of_group(self, key: Any) -> list[Series[P]]:
        """Return the series of a group, of all threads, devices and streams."""
        return [series for series in list(self._all) if series.group == key]

    @contextmanager
    def group(self, key: Any) -> Iterator[None]:
        """Let this thread take tensors into the series of a group."""
        before, self._mine.group = self._mine.group, key
        try:
            yield
        finally:
            self._mine.group = before


class _Mine(threading.local):
    """The part of an `Order` that each thread has."""

    def __init__(self) -> None:
        self.group: Any = None
        self.series: WeakValueDictionary[Any, Series[Any]] = WeakValueDictionary()
