"""A chain as a graph of moves from block to block, without the moves that another one dominates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from reactivate.planner.solver.bound import Move
from reactivate.planner.solver.chain import Candidate, Chain, Pick

_TICK_BITS = 60

Graph = dict[int, list[Move]]  # from each block on


def graph_of(chain: Chain) -> Graph:
    """The moves from each block. What is outside of blocks is in their needs."""
    menus = [[(start + 1, menu)] for start, menu in enumerate(chain.menus)]
    for span in chain.spans:
        menus[span.start].append((span.stop, span.menu))
    shift = _TICK_BITS - math.frexp(_slowest(menus))[1]
    graph: Graph = {}
    for start, row in enumerate(menus):
        by_stop: dict[int, list[Move]] = {}
        for stop, menu in row:
            by_stop.setdefault(stop, []).extend(_move_of(chain, start, stop, entry, shift) for entry in menu)
        graph[start] = [move for moves in by_stop.values() for move in _undominated(moves)]
    return graph


def _move_of(chain: Chain, start: int, stop: int, entry: Candidate, shift: int) -> Move:
    need = max(entry.need_bytes, chain.outside[start], entry.held_bytes + chain.outside[stop])
    ticks = round(math.ldexp(entry.seconds, shift))
    return Move(stop, entry.held_bytes, need, ticks, (Pick(start, stop, entry),))


def _slowest(menus: Sequence[Sequence[tuple[int, Sequence[Candidate]]]]) -> float:
    """The seconds of the slowest choice."""
    seconds = [0.0] * (len(menus) + 1)
    for start in reversed(range(len(menus))):
        seconds[start] = max(seconds[stop] + max(entry.seconds for entry in menu) for stop, menu in menus[start])
    return seconds[0]


def _undominated(moves: Iterable[Move]) -> list[Move]:
    """Return the moves that hold, need or take less than every other."""
    found: list[Move] = []
    for move in sorted(moves, key=lambda move: (move.held, move.ticks, move.need)):
        if not any(other.need <= move.need and other.ticks <= move.ticks for other in found):
            found.append(move)
    return found


def contracted(graph: Graph) -> Graph:
    """Return the moves with one in place of two between which there is no choice."""
    arrivals = Counter(move.stop for moves in graph.values() for move in moves)
    passed = {start for start, moves in graph.items() if start and len(moves) == 1 and arrivals[start] == 1}
    shorter = {}
    for start, moves in graph.items():
        if start not in passed:
            shorter[start] = [_extended(move, graph, passed) for move in moves]
    return shorter


def _extended(move: Move, graph: Graph, passed: set[int]) -> Move:
    """The move with what follows it without a choice."""
    while move.stop in passed:
        move = move.then(graph[move.stop][0])
    return move
