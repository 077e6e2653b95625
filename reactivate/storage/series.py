"""Pieces in the order in which a storage took them in, which a backward reads from its end."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar
from weakref import ref

from reactivate.storage.moved import Piece

P = TypeVar("P", bound=Piece)


class Series(Generic[P]):
    """Pieces in the order in which they were taken in.

    Attributes:
        pieces: all that are still needed, and some that are not.
        waiting: those that wait where they were.
        going: those that are on their way.
    """

    def __init__(self) -> None:
        self.pieces: list[ref[P]] = []
        self.waiting: deque[ref[P]] = deque()
        self.going: deque[ref[P]] = deque()

    def add(self, piece: P) -> None:
        """Note the piece that was taken in last."""
        while self.pieces and self.pieces[-1]() is None:
            self.pieces.pop()
        piece.number = len(self.pieces)
        self.pieces.append(ref(piece))
        self.waiting.append(ref(piece))

    def before(self, number: int, count: int) -> list[P]:
        """Return the pieces taken in before one, the nearest first, of those that are still needed."""
        found: list[P] = []
        for reference in reversed(self.pieces[max(0, number - 2 * count) : number]):
            piece = reference()
            if piece is not None and len(found) < count:
                found.append(piece)
        return found
