"""The least time that the rest of a chain takes in the room that is left: a bound, from below.

Seconds of the blocks from k on, over the room that they may use, fall in steps: the steps of a multiple-choice knapsack.
The bound is their lower convex hull, or below it. Where only the sum of what is held counts, that of block k is that of
block k + 1 with the edges of block k's own hull put among its edges, in the order of their slopes: this is the linear
relaxation (Sinha & Zoltners, "The multiple-choice knapsack problem", Operations Research 27, 1979). What a block needs
while it runs, more than what it will hold, cuts a hull off at the left; where entries are cut off at different rooms, and
where spans end at different blocks, the hull is taken of all together.

The last blocks are not bounded but solved, as long as their steps are few: there what each entry needs counts most, and
the hull of a small choice is far below its steps. And the left end of every bound is the truth: in less room than that
there is no solution, in that room there is.

Time is in ticks, which are integers, so that a bound is one whatever the numbers: nothing here is rounded but downwards.
What it does not do well: a block in the middle that needs much more by one entry than by another, and little by all of
those after it, has a small choice, too. And a hull of 1,000 blocks has some thousand corners, with a copy for each block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from reactivate.planner.solver.chain import Pick

__all__ = ["Bound", "Move", "bounds_of"]

_SLOPE_BITS = 128  # two fractions with terms below 2**63 are equal if they agree in that many bits
_STEPS = 1024  # of the last blocks, at most

_Point = tuple[int, int]  # room in bytes, ticks gained: less time is a gain
_Edge = tuple[int, int, int]  # minus the slope, then the difference in room and in gain


class Move(NamedTuple):
    """From one block to a later one, by an entry or by several of which there was no choice.

    Attributes:
        stop: the first block that is not done then.
        held, need: bytes, the latter with what is outside of the blocks right before and after them.
        ticks: the time it takes.
        picks: what is chosen thereby.
    """

    stop: int
    held: int
    need: int
    ticks: int
    picks: tuple[Pick, ...]

    def then(self, other: Move) -> Move:
        """Both, one after the other."""
        return Move(
            other.stop,
            self.held + other.held,
            max(self.need, self.held + other.need),
            self.ticks + other.ticks,
            self.picks + other.picks,
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """A falling convex line through corners, which goes on flat behind the last.

    Attributes:
        rooms: the corners in bytes, rising; no solution needs less than the first.
        gains: minus the ticks at the corners, rising too.
        edges: what is between corners, steepest first.
    """

    rooms: Sequence[int]
    gains: Sequence[int]
    edges: list[_Edge]

    @classmethod
    def of(cls, start: _Point, edges: list[_Edge]) -> Bound:
        """The line that begins at `start`."""
        rooms = array("q", accumulate([room for _, room, _ in edges], initial=start[0]))
        gains = array("q", accumulate([gain for _, _, gain in edges], initial=start[1]))
        return cls(rooms, gains, edges)

    def ticks_in(self, room: int) -> int:
        """At least so much time does the rest take in this room, which is not less than the first corner's."""
        index = bisect_right(self.rooms, room)
        before, gained = self.rooms[index - 1], self.gains[index - 1]
        if index < len(self.rooms):
            _, width, height = self.edges[index - 1]
            gained += height * (room - before) // width
        return -gained

    def room_for(self, ticks: int) -> int:
        """At least so much room does the rest need if it may take these ticks, which are not less than at the last corner."""
        index = bisect_left(self.gains, -ticks)
        if index == 0:
            return self.rooms[0]
        _, width, height = self.edges[index - 1]
        return self.rooms[index - 1] - (self.gains[index - 1] + ticks) * width // height

    def weights_at(self, room: int) -> tuple[int, int]:
        """Weights of room and of ticks whose sum is least, along the line, at `room`."""
        index = bisect_right(self.rooms, room)
        return (0, 1) if index == len(self.rooms) else (self.edges[index - 1][2], self.edges[index - 1][1])

    def least_of(self, room_weight: int, tick_weight: int) -> int:
        """The least of weighted room and ticks along the line."""
        index = bisect_left(self.edges, (-((room_weight << _SLOPE_BITS) // tick_weight),))
        return room_weight * self.rooms[index] - tick_weight * self.gains[index]

    def plus(self, corners: list[_Point]) -> Bound:
        """Return this bound with one more choice in front, of which the hull is given."""
        edges = self.edges.copy()
        for edge in _edges_of(corners):
            index = bisect_left(edges, edge[:1])
            if index < len(edges) and edges[index][0] == edge[0]:
                edges[index] = (edge[0], edges[index][1] + edge[1], edges[index][2] + edge[2])
            else:
                edges.insert(index, edge)
        return Bound.of((self.rooms[0] + corners[0][0], self.gains[0] + corners[0][1]), edges)

    def cut(self, room: int) -> Bound:
        """Return the part that is not to the left of `room`."""
        index = bisect_right(self.rooms, room)
        if index == 0:
            return self
        if index == len(self.rooms):
            return Bound.of((room, self.gains[-1]), [])
        _, width, height = self.edges[index - 1]
        gain = self.gains[index - 1] - (-height * (room - self.rooms[index - 1]) // width)
        edges = self.edges[index:]
        for edge in _edges_of([(room, gain), (self.rooms[index], self.gains[index])]):
            insort(edges, edge)
        return Bound.of((room, gain), edges)


def bounds_of(moves: Sequence[Sequence[Move]], last_room: int) -> list[Bound]:
    """A bound for what comes from each block on, and for what comes after the last.

    Args:
        moves: those from each block.
        last_room: the bytes that are needed after the last.
    """
    bounds = [Bound.of((last_room, 0), [])] * (len(moves) + 1)
    steps: list[list[_Point]] = [[(last_room, 0)]] * (len(moves) + 1)
    for index in reversed(range(len(moves))):
        steps[index] = _steps_of(moves[index], steps)
        bounds[index] = _under(steps[index]) if steps[index] else _bound_of(moves[index], bounds)
    return bounds


def _steps_of(moves: Sequence[Move], steps: Sequence[list[_Point]]) -> list[_Point]:
    """The corners of the true steps from a block on; none if they are too many, there or further on."""
    if not all(steps[move.stop] for move in moves):
        return []
    corners: list[_Point] = []
    for room, loss in sorted(
        (max(move.need, move.held + room), move.ticks - gain) for move in moves for room, gain in steps[move.stop]
    ):
        if not corners or -loss > corners[-1][1]:
            corners.append((room, -loss))
    return corners if len(corners) <= _STEPS else []


def _bound_of(moves: Sequence[Move], bounds: Sequence[Bound]) -> Bound:
    left = min(max(move.need, move.held + bounds[move.stop].rooms[0]) for move in moves)
    parts = []
    for stop in sorted({move.stop for move in moves}):
        rest = bounds[stop]
        free = []
        for move in moves:
            if move.stop == stop:
                if move.need <= max(left, move.held + rest.rooms[0]):
                    free.append((move.held, -move.ticks))
                else:
                    parts.append(rest.plus([(move.held, -move.ticks)]).cut(move.need))
        if free:
            parts.append(rest.plus(_hull(free)).cut(left))
    return parts[0] if len(parts) == 1 else _under([point for part in parts for point in zip(part.rooms, part.gains)])


def _under(points: Iterable[_Point]) -> Bound:
    corners = _hull(points)
    return Bound.of(corners[0], sorted(_edges_of(corners)))


def _hull(points: Iterable[_Point]) -> list[_Point]:
    """The corners of the least concave line that rises and leaves no point above it (Andrew's monotone chain)."""
    corners: list[_Point] = []
    for room, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not corners or gain > corners[-1][1]:
            while len(corners) > 1 and _is_under(corners[-2], corners[-1], (room, gain)):
                corners.pop()
            corners.append((room, gain))
    return corners


def _is_under(first: _Point, middle: _Point, last: _Point) -> bool:
    return (middle[1] - first[1]) * (last[0] - first[0]) <= (last[1] - first[1]) * (middle[0] - first[0])


def _edges_of(corners: Sequence[_Point]) -> list[_Edge]:
    differences = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(corners)]
    return [(-((gain << _SLOPE_BITS) // room), room, gain) for room, gain in differences]
