"""A journal that no recomputation rewinds: what a test notes in it stays noted, however often the function runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any


class Journal:
    """Notes in the order in which they were made. They are kept behind an object in C."""

    def __init__(self) -> None:
        self._hidden: MappingProxyType[str, list[Any]] = MappingProxyType({"notes": []})

    def append(self, item: Any) -> None:
        self._hidden["notes"].append(item)

    def clear(self) -> None:
        self._hidden["notes"].clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._hidden["notes"]))

    def __getitem__(self, index: Any) -> Any:
        return self._hidden["notes"][index]

    def __len__(self) -> int:
        return len(self._hidden["notes"])

    def __eq__(self, other: object) -> bool:
        return self._hidden["notes"] == (list(other) if isinstance(other, Journal) else other)

    def __repr__(self) -> str:
        return f"Journal({self._hidden['notes']})"

    __hash__ = None  # type: ignore[assignment]
