"""One choice for all ranks: the fastest that one of them finds, if it holds on each."""

from __future__ import annotations

import functools
from collections.abc import Callable

from reactivate.planner.ranks import Ranks
from reactivate.planner.solver.solution import MOST_ROUNDS, Proven, Search

Names = dict[str, str] | None  # of the treatments, by the paths of units


class SharedSearch:
    """Looks for the choice of one rank that holds on all: of the one that has the least room.

    Args:
        ranks: all of them.
        search: this rank's own.
        room_bytes: what its step may allocate itself.
        plain_bytes: what its plain step does.
    """

    def __init__(self, ranks: Ranks, search: Search, room_bytes: int, plain_bytes: int) -> None:
        self._ranks, self._search, self._room_bytes = ranks, search, room_bytes
        rooms = ranks.gather((room_bytes, plain_bytes))
        self._leader = min(range(len(rooms)), key=lambda rank: rooms[rank][0] - rooms[rank][1])
        self._limit_bytes = min(room for room, _ in rooms)

    def fit(self) -> Proven | None:
        """Return the fastest choice of the leading rank that holds on all, as it is on this one; None if none does."""
        limit = self._limit_bytes
        for _ in range(MOST_ROUNDS):
            found = self._proposed(functools.partial(self._search.fit, limit))
            if found is None:
                break
            worst = self._worst(found)
            if worst <= 0:
                return found
            limit -= worst
        smallest = self.smallest()
        return smallest if self._worst(smallest) <= 0 else None

    def smallest(self) -> Proven:
        """Return the leading rank's choice with the least peak, as it is on this one."""
        found = self._proposed(self._search.smallest)
        assert found is not None
        return found

    def _worst(self, found: Proven) -> int:
        """Return by how much a choice is too large where it fits least; not above 0 where it fits all."""
        return max(self._ranks.gather(found.trace.needed_bytes - self._room_bytes))

    def _proposed(self, propose: Callable[[], Proven | None]) -> Proven | None:
        own = propose() if self._ranks.number == self._leader else None
        names: Names = self._ranks.gather(None if own is None else own.names)[self._leader]
        return own if own is not None or names is None else self._search.prove(names)
