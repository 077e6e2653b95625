"""A journal that no recomputation rewinds: what a test notes in it stays noted, however often the function runs."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any


class Journal:
    """Notes in the order in which they were made. They are kept in a queue, which is an object in C."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._read: list[Any] = []

    def append(self, item: Any) -> None:
        self._queue.put(item)

    def _drain(self) -> list[Any]:
        while not self._queue.empty():
            self._read.append(self._queue.get())
        return self._read

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._drain()))

    def __getitem__(self, index: Any) -> Any:
        return self._drain()[index]

    def __len__(self) -> int:
        return len(self._read) + self._queue.qsize()

    def __eq__(self, other: object) -> bool:
        return self._drain() == (list(other) if isinstance(other, Journal) else other)

    def __repr__(self) -> str:
        return f"Journal({self._drain()})"

    __hash__ = None  # type: ignore[assignment]

    def clear(self) -> None:
        self._drain().clear()
