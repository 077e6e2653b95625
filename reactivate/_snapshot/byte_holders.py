"""Objects that are held by their bytes: arrays of NumPy's and Python's, byte arrays and streams in memory."""

from __future__ import annotations

import io
from typing import Any

from reactivate._snapshot.holders import Contents, Holder


class ArrayHolder(Holder):
    """The elements of an array of NumPy's."""

    __slots__ = ()

    def get(self) -> Contents:
        return (self.target.copy(),)

    def record(self) -> Contents:
        return self.get()

    def is_at(self, contents: Contents) -> bool:
        return bool(self.target.tobytes() == contents[0].tobytes())

    def put(self, contents: Contents) -> None:
        self.target[...] = contents[0]


class NumbersHolder(ArrayHolder):
    """The numbers in an `array.array`."""

    __slots__ = ()

    def get(self) -> Contents:
        return (self.target[:],)

    def put(self, contents: Contents) -> None:
        self.target[:] = contents[0]


class BytesHolder(Holder):
    """The bytes in a `bytearray`."""

    __slots__ = ()

    def get(self) -> Contents:
        return (bytes(memoryview(self.target)),)

    def is_at(self, contents: Contents) -> bool:
        return bool(memoryview(self.target) == contents[0])

    def put(self, contents: Contents) -> None:
        bytearray.__setitem__(self.target, slice(None), contents[0])


class StreamHolder(Holder):
    """The contents of an `io.StringIO` or `io.BytesIO`, and the position in it."""

    __slots__ = ()

    def get(self) -> Contents:
        return self.target.__getstate__()[:-1] if not self.target.closed else ()

    def is_at(self, contents: Contents) -> bool:
        return bool(self.get() == contents)

    def put(self, contents: Contents) -> None:
        if contents and not self.target.closed:  # one that was closed stays so
            self.target.__setstate__((*contents, None))


def length_of_stream(stream: Any) -> int:
    """Return how many bytes or letters there are in an in-memory stream."""
    position = stream.tell()
    length = stream.seek(0, io.SEEK_END)
    stream.seek(position)
    return int(length)
