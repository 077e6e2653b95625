"""Random number streams that the whole process shares, and one snapshot of them between two draws.

A region refers to the current snapshot; all regions between two draws share one object. Whether a region drew is never asked:
a recomputation starts from its snapshot and puts the streams back, so a fork, a reseed or a restored state inside of the
region are right by themselves.
"""

from __future__ import annotations

import sys
from _thread import RLock
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from reactivate._snapshot.generators import RandomStream, numpy_stream, python_stream, torch_stream
from reactivate._torch.modes import ask

join = b"".join
"""Copies the bytes of many views in one call."""


_nothing_else: Callable[[], Any] = [].clear
"""What to ask of a stream of which memory says all: a call of C that returns None."""


class StreamMoment(NamedTuple):
    """One stream at one moment: what was seen of it, its memory and the rest, and the state that `write` takes."""

    seen: tuple[bytes, Any]
    state: Any


_NONE = StreamMoment((b"", ...), None)  # what is seen of no stream


class RngSnapshot(NamedTuple):
    """All streams at one moment.

    Attributes:
        seen: what `(*map(join, memory), *map(ask, asks))` of the streams was.
        moments: of each stream.
    """

    seen: tuple[Any, ...]
    moments: list[StreamMoment]


class RandomStreams:
    """Torch's generator of the CPU, Python's `random`, and NumPy's global generator once NumPy is imported.

    `(*map(join, memory), *map(ask, asks))` differs after a draw. What looks for each region does so in place, without a
    call of Python's.

    Attributes:
        last: the current snapshot, if nothing was drawn since.
        lacks_numpy: whether NumPy's generator is not among them yet.
    """

    memory: list[Sequence[memoryview]]
    asks: list[Callable[[], Any]]
    last: RngSnapshot

    def __init__(self) -> None:
        self._looking = RLock()
        self._use([torch_stream(), python_stream()])
        self.lacks_numpy = True

    def _use(self, streams: list[RandomStream]) -> None:
        self._streams = streams
        self.memory = [stream.memory for stream in streams]
        self.asks = [stream.ask or _nothing_else for stream in streams]
        self.last = RngSnapshot((), [])  # what no look returns

    def now(self) -> RngSnapshot:
        """Return the current snapshot: the last one, as long as nothing was drawn."""
        with self._looking:  # of two threads that find NumPy at once, one may note its stream
            if self.lacks_numpy and "numpy.random" in sys.modules:
                stream = numpy_stream()
                if stream is not None:
                    self.lacks_numpy = False
                    self._use([*self._streams, stream])
            last, count = self.last, len(self._streams)
            seen = (*map(join, self.memory), *map(ask, self.asks))
            while last.seen != seen:
                known = last.moments if len(last.moments) == count else [_NONE] * count
                moments = [
                    moment if moment.seen == part else StreamMoment(part, stream.read())
                    for stream, moment, part in zip(self._streams, known, zip(seen, seen[count:]))
                ]
                before, seen = seen, (*map(join, self.memory), *map(ask, self.asks))
                if before == seen:  # otherwise another thread has drawn meanwhile
                    last = self.last = RngSnapshot(seen, moments)
            return last

    def rewind(self, snapshot: RngSnapshot, seen: tuple[Any, ...] | None = None) -> None:
        """Set the streams to a snapshot, which is the current one from here on.

        Args:
            snapshot: the snapshot.
            seen: what is seen of them now, if that is known.
        """
        if seen is None:
            seen = (*map(join, self.memory), *map(ask, self.asks))
        for stream, moment, part in zip(self._streams, snapshot.moments, zip(seen, seen[len(self._streams) :])):
            if moment.seen != part:
                stream.write(moment.state)
        self.last = snapshot


STREAMS = RandomStreams()
