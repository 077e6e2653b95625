"""Random number streams that the whole process shares, and one snapshot of them between two draws.

A region refers to the current snapshot; all regions between two draws share one object. Whether a region drew is never asked:
a recomputation starts from its snapshot and puts the streams back, so a fork, a reseed or a restored state inside of the
region are right by themselves.
"""

from __future__ import annotations

import sys
from _thread import RLock
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from reactivate._snapshot.generators import RandomStream, numpy_stream, python_stream, torch_stream

_join = b"".join  # copies the bytes of many views in one call

Seen = tuple[bytes, Any]
"""What was seen of one stream or of all: bytes of memory, and what else was asked."""
_NOTHING_SEEN: Seen = (b"", ...)  # what no look returns
_NO_SPARE = b"\0\0"


class StreamMoment(NamedTuple):
    """One stream at one moment: what was seen of it, its memory and the rest, and the state that `write` takes."""

    seen: Seen
    state: Any


_NOT_SEEN = StreamMoment(_NOTHING_SEEN, None)


class RngSnapshot(NamedTuple):
    """All streams at one moment.

    Attributes:
        seen: what `RandomStreams.look` saw.
        moments: of each stream.
    """

    seen: Seen
    moments: list[StreamMoment]


class RandomStreams:
    """Torch's generator of the CPU, Python's `random`, and NumPy's global generator once NumPy is imported.

    Attributes:
        last: the current snapshot, if nothing was drawn since.
        lacks_numpy: whether NumPy's generator is not among them yet.
    """

    _memory: list[memoryview]
    _ask: Callable[[], Any]
    last: RngSnapshot

    def __init__(self) -> None:
        self._looking = RLock()
        self._use([torch_stream(), python_stream()])
        self.lacks_numpy = True

    def _use(self, streams: list[RandomStream]) -> None:
        self._streams = streams
        self._memory = [view for stream in streams for view in stream.memory]
        self._spare = streams[0].spare
        self._sizes = [sum(view.nbytes for view in stream.memory) for stream in streams]
        asks = [stream.ask for stream in streams if stream.ask is not None]
        self._ask = asks[0] if len(asks) == 1 else (lambda: [ask() for ask in asks])  # as mostly: Python's alone
        self.last = RngSnapshot(_NOTHING_SEEN, [_NOT_SEEN] * len(streams))

    def look(self) -> Seen:
        """Return what differs after a draw from any of them."""
        # In few lines, and without calls for a single stream: this is what costs most where a model has used the caches.
        memory = _join(self._memory)
        if memory[:2] != _NO_SPARE and self._spare is not None:
            memory += self._spare
        return memory, self._ask()

    def _parts(self, seen: Seen) -> list[Seen]:
        """Return what of this is of each stream."""
        memory, asked = seen
        rest, ends = iter(asked if type(asked) is list else [asked]), list(accumulate(self._sizes))
        rows = zip(self._streams, self._sizes, ends)
        parts = [
            (memory[end - size : end], None if stream.ask is None else next(rest, None)) for stream, size, end in rows
        ]
        parts[0] = parts[0][0] + memory[ends[-1] :], parts[0][1]  # a spare number, behind the others
        return parts

    def now(self) -> RngSnapshot:
        """Return the current snapshot: the last one, as long as nothing was drawn."""
        with self._looking:  # of two threads that find NumPy at once, one may note its stream
            if self.lacks_numpy and "numpy.random" in sys.modules:
                stream = numpy_stream()
                if stream is not None:
                    self.lacks_numpy = False
                    self._use([*self._streams, stream])
            last, seen = self.last, self.look()
            while last.seen != seen:
                known = [*last.moments, _NOT_SEEN]  # by a snapshot from before NumPy was imported one is missing
                moments = [
                    moment if moment.seen == part else StreamMoment(part, stream.read())
                    for stream, moment, part in zip(self._streams, known, self._parts(seen))
                ]
                before, seen = seen, self.look()
                if before == seen:  # otherwise another thread has drawn meanwhile
                    last = self.last = RngSnapshot(seen, moments)
            return last

    def rewind(self, snapshot: RngSnapshot, seen: Seen | None = None) -> None:
        """Set the streams to a snapshot, which is the current one from here on.

        Args:
            snapshot: the snapshot.
            seen: what is seen of them now, if that is known.
        """
        for stream, moment, part in zip(self._streams, snapshot.moments, self._parts(seen or self.look())):
            if moment.seen != part:
                stream.write(moment.state)
        self.last = snapshot


STREAMS = RandomStreams()
