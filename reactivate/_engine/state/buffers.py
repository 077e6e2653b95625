"""Buffers of Python objects, noted by their bytes: arrays, byte arrays and streams in memory."""

from __future__ import annotations

from typing import Any

from reactivate._engine.state.contents import Note


class ArrayNote(Note):
    """The elements of an array of NumPy's."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return self.target.copy()

    def is_at(self, contents: Any) -> bool:
        return bool(self.target.tobytes() == contents.tobytes())

    def put(self, contents: Any) -> None:
        self.target[...] = contents


class NumbersNote(ArrayNote):
    """The numbers in an `array.array`."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return self.target[:]

    def put(self, contents: Any) -> None:
        self.target[:] = contents


class BytesNote(Note):
    """The bytes in a `bytearray`."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return bytes(memoryview(self.target))

    def is_at(self, contents: Any) -> bool:
        return bool(memoryview(self.target) == contents)

    def put(self, contents: Any) -> None:
        bytearray.__setitem__(self.target, slice(None), contents)


class StreamNote(Note):
    """The contents of an `io.StringIO` or `io.BytesIO`, and the position in it."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return self.target.__getstate__()[:-1] if not self.target.closed else None

    def is_at(self, contents: Any) -> bool:
        return bool(self.contents() == contents)

    def put(self, contents: Any) -> None:
        if contents is not None and not self.target.closed:  # one that was closed stays so
            self.target.__setstate__((*contents, None))
