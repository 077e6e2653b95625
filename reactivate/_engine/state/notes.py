"""Notes of many objects, rewound together for a recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reactivate._engine.state.contents import LengthNote, Note


class RewoundNotes:
    """Objects with their noted contents, for as long as the context lasts.

    Afterwards every object holds what it held before the context, whatever the recomputation did to it.
    """

    __slots__ = ("_notes", "_present")

    def __init__(self, notes: Sequence[Note]) -> None:
        self._notes = notes

    def __enter__(self) -> None:
        self._present: list[Any] = []
        try:
            for note in self._notes:
                if note.is_at(note.noted):
                    self._present.append(note.noted)
                else:
                    self._present.append(_contents_of(note))
                    note.put(note.noted)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        # The last first: an object that was noted twice was found rewound the second time.
        notes, present = self._notes, self._present
        for index in range(len(present) - 1, -1, -1):
            if not notes[index].is_at(present[index]):
                notes[index].put(present[index])
        self._present = []  # an exception's traceback may hold this context, and the contents the exception


def _contents_of(note: Note) -> Any:
    return note.appended() if isinstance(note, LengthNote) else note.contents(weak=None)
