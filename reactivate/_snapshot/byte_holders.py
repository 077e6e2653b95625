"""Objects that are held by their bytes: arrays of NumPy's and Python's, byte arrays and streams in memory."""

from __future__ import annotations

import io
from array import array
from typing import Any

from reactivate._snapshot.holders import Contents, Holder
from reactivate.errors import UnsupportedError


class ArrayHolder(Holder):
    """The elements of an array of NumPy's, its shape and its dtype."""

    __slots__ = ()

    def get(self) -> Contents:
        return (_elements_of(self.target).copy(),)

    def record(self) -> Contents:
        return self.get()

    def is_at(self, contents: Contents) -> bool:
        now, noted = _elements_of(self.target), contents[0]
        return bool(now.shape == noted.shape and now.dtype == noted.dtype and now.tobytes() == noted.tobytes())

    def put(self, contents: Contents) -> None:
        target, noted = _elements_of(self.target), contents[0]
        if target.nbytes != noted.nbytes:  # its memory may be that of a tensor, too
            raise UnsupportedError(
                f"An array of NumPy's that a region reads was resized in place after the region began, from {noted.shape} to "
                f"{target.shape}, and cannot be given its size back. Assign a new array instead: a = np.resize(a, ...)."
            )
        if target.dtype != noted.dtype or target.shape != noted.shape:
            target.shape = (target.size,)
            target.dtype = noted.dtype
            target.shape = noted.shape
        target[...] = noted


def _elements_of(array: Any) -> Any:
    """Return an array as one of NumPy's own class, that of a masked one with what is under the mask."""
    return array.data if type(array).__module__.startswith("numpy.ma") else array


class BytesHolder(Holder):
    """The bytes in a `bytearray`."""

    __slots__ = ()

    def get(self) -> Contents:
        return (bytes(memoryview(self.target)),)

    def is_at(self, contents: Contents) -> bool:
        return bool(memoryview(self.target).cast("B") == contents[0])

    def put(self, contents: Contents) -> None:
        bytearray.__setitem__(self.target, slice(None), contents[0])


class NumbersHolder(BytesHolder):
    """The numbers in an `array.array`."""

    __slots__ = ()

    def put(self, contents: Contents) -> None:
        target, (content,) = self.target, contents
        if array.__len__(target) * target.itemsize == len(content):
            memoryview(target).cast("B")[:] = content  # there may be other views of it
        else:
            array.__delitem__(target, slice(None))
            array.frombytes(target, content)


class StreamHolder(Holder):
    """The contents of an `io.StringIO` or `io.BytesIO`, and the position in it."""

    __slots__ = ()

    def get(self) -> Contents:
        return () if is_closed(self.target) else _kind_of_stream(self.target).__getstate__(self.target)[:-1]

    def is_at(self, contents: Contents) -> bool:
        return bool(self.get() == contents)

    def put(self, contents: Contents) -> None:
        if contents and not is_closed(self.target):  # one that was closed stays so
            _kind_of_stream(self.target).__setstate__(self.target, (*contents, None))


def holder_of_bytes(value: Any, kind: type) -> tuple[type[Holder], int] | None:
    """Return the class that holds an object of `BUFFERS`, and how many bytes that is; None of a closed stream."""
    if issubclass(kind, (array, bytearray)):
        return NumbersHolder if issubclass(kind, array) else BytesHolder, memoryview(value).nbytes
    return None if is_closed(value) else (StreamHolder, length_of_stream(value))


def is_closed(stream: Any) -> bool:
    """Return whether an in-memory stream is closed."""
    return bool(vars(_kind_of_stream(stream))["closed"].__get__(stream))


def length_of_stream(stream: Any) -> int:
    """Return how many bytes or letters there are in an in-memory stream, past methods that a subclass overrides."""
    kind = _kind_of_stream(stream)
    position = kind.tell(stream)
    length = kind.seek(stream, 0, io.SEEK_END)
    kind.seek(stream, position)
    return int(length)


def _kind_of_stream(stream: Any) -> Any:
    return io.StringIO if isinstance(stream, io.StringIO) else io.BytesIO
