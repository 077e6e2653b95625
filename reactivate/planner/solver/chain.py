"""The problem: a chain of blocks, what each of them may do, and what a choice among that costs. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from reactivate.errors import UsageError

__all__ = ["Candidate", "Chain", "Pick", "Solution", "Span"]

_TOO_MUCH = 1 << 62  # for the solver's 64-bit integers


@dataclass(frozen=True)
class Candidate:
    """One way to treat a block, or several blocks as one.

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
class Span:
    """Blocks that may be treated as one: those from `start` up to, not including, `stop`.

    Attributes:
        start, stop: which.
        menu: the entries to choose from, each in the place of one entry for each of these blocks.
    """

    start: int
    stop: int
    menu: tuple[Candidate, ...]


@dataclass(frozen=True)
class Pick:
    """An entry that was chosen for the blocks from `start` up to, not including, `stop`."""

    start: int
    stop: int
    entry: Candidate


@dataclass(frozen=True)
class Solution:
    """An entry for each block.

    Attributes:
        picks: what was chosen, in the order of the blocks.
        seconds: how much longer a step takes by it.
        peak_bytes: the most that is alive at any moment.
        states: how many partial choices were looked at to find it. Not compared.
    """

    picks: tuple[Pick, ...]
    seconds: float
    peak_bytes: int
    states: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after the other, and backward in reverse.

    Args:
        menus: for each block the entries to choose from.
        outside: for k from 0 to the number of blocks, the most bytes alive at any moment while no block runs and exactly
            the first k hold, above what these hold: the embedding has k = 0, the head and the loss have the last.
        spans: blocks that may be treated as one.

    Raises:
        UsageError: the parts do not fit together, an entry has a time that is none, or there are 2**62 bytes.

    Example:
        >>> from reactivate.planner.solver.chain import Chain, Candidate
        >>> keep, recompute = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
        >>> chain = Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2))
        >>> chain.peak_of(chain.picks_of([keep, recompute, recompute]))
        11
    """

    menus: tuple[tuple[Candidate, ...], ...]
    outside: tuple[int, ...]
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.menus)
        if len(self.outside) != count + 1:
            raise UsageError(
                f"A chain of {count} blocks was given {len(self.outside)} numbers of bytes outside of them: give "
                f"{count + 1}, one for before each block and one for after the last."
            )
        for index, menu in enumerate(self.menus):
            _check_menu(menu, f"block {index}")
        for span in self.spans:
            if not 0 <= span.start < span.stop <= count:
                raise UsageError(
                    f"A span of blocks from {span.start} up to {span.stop} was given for a chain of {count} blocks: it "
                    "must begin before it ends, and lie within the chain."
                )
            _check_menu(span.menu, f"the span of blocks from {span.start} up to {span.stop}")
        entries = [entry for menu in (*self.menus, *(span.menu for span in self.spans)) for entry in menu]
        sizes = [*self.outside, *(size for entry in entries for size in (entry.held_bytes, entry.need_bytes))]
        if sum(map(abs, sizes)) >= _TOO_MUCH:
            raise UsageError(
                f"The bytes of a chain come to {sum(map(abs, sizes))}: all its numbers must sum to below 2**62."
            )

    def picks_of(self, entries: Iterable[Candidate]) -> tuple[Pick, ...]:
        """One entry a block as picks."""
        return tuple(Pick(index, index + 1, entry) for index, entry in enumerate(entries))

    def peak_of(self, picks: Iterable[Pick]) -> int:
        """The most bytes alive at any moment if these are chosen.

        Raises:
            UsageError: the picks do not cover the chain, each block once and in order.
        """
        held_bytes, done, peak_bytes = 0, 0, self.outside[0]
        for pick in picks:
            if pick.start != done or not pick.start < pick.stop <= len(self.menus):
                raise UsageError(
                    f"After blocks up to {done} of {len(self.menus)}, a pick for those from {pick.start} up to "
                    f"{pick.stop} was given: picks must cover the chain, each block once and in order."
                )
            peak_bytes = max(peak_bytes, held_bytes + pick.entry.need_bytes)
            held_bytes += pick.entry.held_bytes
            done = pick.stop
            peak_bytes = max(peak_bytes, held_bytes + self.outside[done])
        if done != len(self.menus):
            raise UsageError(
                f"The picks end after {done} of {len(self.menus)} blocks: pick an entry for the others too."
            )
        return peak_bytes

    def solution_of(self, picks: Iterable[Pick], *, states: int = 0) -> Solution:
        """Return the solution that these picks make.

        Args:
            picks: an entry for each block.
            states: how many partial choices were looked at to find them.
        """
        picks = tuple(picks)
        seconds = math.fsum(pick.entry.seconds for pick in picks)
        return Solution(picks, seconds, self.peak_of(picks), states)


def _check_menu(menu: tuple[Candidate, ...], place: str) -> None:
    if not menu:
        raise UsageError(f"There is nothing to choose from for {place}: give it at least one entry.")
    for entry in menu:
        if not 0 <= entry.seconds < math.inf:
            raise UsageError(
                f"Entry {entry.name!r} of {place} takes {entry.seconds} seconds: extra time must be a number from 0 on."
            )
