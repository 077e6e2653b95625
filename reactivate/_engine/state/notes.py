"""Notes of many objects, rewound together for a recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from reactivate._engine.state.contents import LengthNote, Note

_NOTED = attrgetter("noted")


class RewoundNotes:
    """Objects with their noted contents, for as long as the context lasts.

    Afterwards every object holds what it held before the context, whatever the recomputation did to it.

    Attributes:
        are_same: whether `differs` has just seen that every object holds what was noted.
    """

    __slots__ = ("_notes", "_present", "are_same")

    def __init__(self, notes: Sequence[Note]) -> None:
        self._notes = notes
        self.are_same = False

    def differs(self) -> bool:
        """Return whether an object that threads share holds something else; what was seen holds if `__enter__` is next."""
        others = [note for note in self._notes if not note.is_at(note.noted)]
        self.are_same = not others
        return any(note.is_shared for note in others)

    def __enter__(self) -> None:
        if self.are_same:
            self._present: list[Any] = list(map(_NOTED, self._notes))
            return
        self._present = []
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
