"""Random number streams that the whole process shares, and one snapshot of them between two draws.

A region refers to the current snapshot; all regions between two draws share one object. Whether a region drew is never asked:
a recomputation starts from its snapshot and puts the streams back, so a fork, a reseed or a restored state inside of the
region are right by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from reactivate._snapshot.generators import Stream, numpy_stream, python_stream, torch_stream
from reactivate._torch.modes import ask

join = b"".join
"""Copies the bytes of many views in one call."""


class StreamMoment(NamedTuple):
    """One stream at one moment: what was seen of it, and the state that `write` takes."""

    seen: tuple[bytes, Any]
    state: Any


_NONE = StreamMoment((b"", ...), None)  # what is seen of no stream


class RngSnapshot(NamedTuple):
    """All streams at one moment.

    Attributes:
        seen: what `(join(memory), *map(ask, asks))` of the streams was.
        moments: of each stream.
    """

    seen: tuple[Any, ...]
    moments: list[StreamMoment]


class RandomStreams:
    """Torch's generator of the CPU, Python's `random`, and NumPy's global generator once NumPy is imported.

    `(join(memory), *map(ask, asks))` differs after a draw. What looks for each region does so in place, without a call of
    Python's.

    Attributes:
        last: the current snapshot, if nothing was drawn since.
        lacks_numpy: whether NumPy's generator is not among them yet.
    """

    memory: list[memoryview]
    asks: list[Callable[[], Any]]
    last: RngSnapshot

    def __init__(self) -> None:
        self._use([torch_stream(), python_stream()])
        self.lacks_numpy = True

    def _use(self, streams: list[Stream]) -> None:
        self._streams = streams
        self.memory = [view for stream in streams for view in stream.memory]
        self._sizes = [sum(view.nbytes for view in stream.memory) for stream in streams]
        self.asks = [stream.ask for stream in streams if stream.ask is not None]
        self.last = RngSnapshot((), [])  # what no look returns

    def now(self) -> RngSnapshot:
        """Return the current snapshot: the last one, as long as nothing was drawn."""
        if self.lacks_numpy and "numpy.random" in sys.modules:
            stream = numpy_stream()
            if stream is not None:
                self.lacks_numpy = False
                self._use([*self._streams, stream])
        last = self.last
        seen: tuple[Any, ...] = (join(self.memory), *map(ask, self.asks))
        while last.seen != seen:
            parts = self._parts(seen)
            known = last.moments if len(last.moments) == len(parts) else [_NONE] * len(parts)
            moments = [
                moment if moment.seen == part else StreamMoment(part, stream.read())
                for stream, moment, part in zip(self._streams, known, parts)
            ]
            before, seen = seen, (join(self.memory), *map(ask, self.asks))
            if before == seen:  # otherwise another thread has drawn meanwhile
                last = self.last = RngSnapshot(seen, moments)
        return last

    def rewind(self, snapshot: RngSnapshot, present: RngSnapshot | None = None) -> None:
        """Set the streams to a snapshot, which is the current one from here on.

        Args:
            snapshot: the snapshot.
            present: the current one, if it is known.
        """
        if present is None:
            parts = self._parts((join(self.memory), *map(ask, self.asks)))
        else:
            parts = [moment.seen for moment in present.moments]
        for stream, moment, part in zip(self._streams, snapshot.moments, parts):
            if moment.seen != part:
                stream.write(moment.state)
        self.last = snapshot

    def _parts(self, seen: tuple[Any, ...]) -> list[tuple[bytes, Any]]:
        """Return what was seen of each stream."""
        memory, *rests = seen
        start, rest, parts = 0, iter(rests), []
        for stream, size in zip(self._streams, self._sizes):
            parts.append((memory[start : start + size], None if stream.ask is None else next(rest, None)))
            start += size
        return parts


STREAMS = RandomStreams()
