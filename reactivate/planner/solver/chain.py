"""The problem: a chain of blocks, what each of them may do, and what a choice among that costs. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from reactivate.errors import UsageError

__all__ = ["Candidate", "Chain", "Solution"]


@dataclass(frozen=True)
class Candidate:
    """One way to treat a block.

    Attributes:
        name: what it is called.
        seconds: how much longer a step takes by it, at least 0.
        held_bytes: what is alive after its forward, until its backward begins, less what was alive before. May be
            negative.
        need_bytes: the most that is alive while its own forward or backward runs, above what the blocks before it hold.
    """

    name: str
    seconds: float
    held_bytes: int
    need_bytes: int


@dataclass(frozen=True)
class Solution:
    """An entry for each block.

    Attributes:
        entries: what was chosen, in the order of the blocks.
        seconds: how much longer a step takes by it.
        peak_bytes: the most that is alive at any moment.
    """

    entries: tuple[Candidate, ...]
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after the other, and backward in reverse.

    Args:
        menus: for each block the entries to choose from.
        outside: for k from 0 to the number of blocks, the most bytes alive at any moment while no block runs and exactly
            the first k hold, above what these hold: the embedding has k = 0, the head and the loss have the last.

    Raises:
        UsageError: the parts do not fit together, or an entry has a time that is none.

    Example:
        >>> from reactivate.planner.solver.chain import Chain, Candidate
        >>> keep, recompute = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
        >>> chain = Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2))
        >>> chain.solution_of([keep, recompute, recompute]).peak_bytes
        11
    """

    menus: tuple[tuple[Candidate, ...], ...]
    outside: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.menus)
        if len(self.outside) != count + 1:
            raise UsageError(
                f"A chain of {count} blocks was given {len(self.outside)} numbers of bytes outside of them: give "
                f"{count + 1}, one for before each block and one for after the last."
            )
        for index, menu in enumerate(self.menus):
            if not menu:
                raise UsageError(f"There is nothing to choose from for block {index}: give it at least one entry.")
            for entry in menu:
                if not 0 <= entry.seconds < math.inf:
                    raise UsageError(
                        f"Entry {entry.name!r} of block {index} takes {entry.seconds} seconds: extra time must be a number "
                        "from 0 on."
                    )

    def solution_of(self, entries: Iterable[Candidate]) -> Solution:
        """Return the solution that these entries make, one for each block."""
        entries = tuple(entries)
        held_bytes, peak_bytes = 0, self.outside[0]
        for entry, outside in zip(entries, self.outside[1:], strict=True):
            peak_bytes = max(peak_bytes, held_bytes + entry.need_bytes)
            held_bytes += entry.held_bytes
            peak_bytes = max(peak_bytes, held_bytes + outside)
        return Solution(entries, math.fsum(entry.seconds for entry in entries), peak_bytes)
