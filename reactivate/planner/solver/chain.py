"""The problem: a chain of blocks, what each of them may do, and what a choice among that costs. No torch.

A block may move tensors to a storage and back. Copies run beside the blocks, one after the other in each direction, and cost
time only where the step waits for them:

- A block that moves tensors out waits for those that were moved out before it, but for as many as may be on their way.
  What has run since, forward, has hidden that much of their copies.
- Its tensors come back while the next block that moved tensors runs backward, and all between the two, and its own
  backward waits for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from reactivate.errors import UsageError

__all__ = [
    "Candidate",
    "Chain",
    "Infeasible",
    "Queue",
    "Solution",
    "Span",
    "Transfer",
    "copies_of",
    "passed",
    "ticks_of",
]

_TICK_BITS = 60  # time is added up in 2**-60 of a second, as integers: a sum of floats would depend on their order


class Infeasible(Exception):
    """No choice fits the budget.

    Attributes:
        least_bytes: the smallest budget that one fits.
    """

    def __init__(self, least_bytes: int) -> None:
        super().__init__(f"No choice fits the budget: the smallest that one fits is {least_bytes} bytes.")
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Transfer:
    """The copies of a block's tensors to a storage and back.

    Attributes:
        out_seconds, back_seconds: how long they take.
        stored_bytes: what the storage keeps meanwhile.
    """

    out_seconds: float
    back_seconds: float
    stored_bytes: int


@dataclass(frozen=True)
class Candidate:
    """One way to treat a block.

    Attributes:
        name: what it is called.
        seconds: how much longer a step takes by it, at least 0.
        held_bytes: what is alive after its forward, until its backward begins, less what was alive before. May be
            negative.
        need_bytes: the most that is alive while its own forward or backward runs, above what the blocks before it hold.
        forward_seconds, backward_seconds: what it takes in each pass, in which copies of other blocks are hidden.
        transfer: what is moved to a storage; None for nothing.
        span: the path of the container that is treated as one with the block in it; "" where the block is treated by itself.
    """

    name: str
    seconds: float
    held_bytes: int
    need_bytes: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    transfer: Transfer | None = None
    span: str = ""


@dataclass(frozen=True)
class Span:
    """One way to treat several blocks, one after the other, as one.

    Attributes:
        start: the number of the first block.
        entries: what each of the blocks comes to then. They are chosen together.
    """

    start: int
    entries: tuple[Candidate, ...]

    def at(self, start: int, path: str) -> Span:
        """Return the same for blocks elsewhere, that are equal to these.

        Args:
            start: the number of the first of them.
            path: of what is around them.
        """
        return Span(start, tuple(replace(entry, span=path) for entry in self.entries))


@dataclass(frozen=True)
class Solution:
    """An entry for each block.

    Attributes:
        entries: what was chosen, in the order of the blocks.
        seconds: how much longer a step takes by it, with what it waits for copies.
        peak_bytes: the most that is alive at any moment.
        stored_bytes: what the storage keeps.
    """

    entries: tuple[Candidate, ...]
    seconds: float
    peak_bytes: int
    stored_bytes: int = 0

    @property
    def own_seconds(self) -> float:
        """Return how much longer a step takes by it, without what it waits for copies."""
        return math.fsum(entry.seconds for entry in self.entries)


class Queue(NamedTuple):
    """The copies that are not done: ticks."""

    out: int = 0
    back: int = 0


def ticks_of(seconds: float) -> int:
    """Return a time in ticks."""
    return round(math.ldexp(seconds, _TICK_BITS))


def passed(
    queue: Queue, forward: int, backward: int, copies: tuple[int, int] | None, in_flight: int
) -> tuple[Queue, int]:
    """Return the copies that are not done after a block, and what it waits for those before it, all in ticks.

    Args:
        queue: the copies when it begins.
        forward, backward: what it takes.
        copies: out and back, if it moves tensors.
        in_flight: how many blocks' tensors may be on their way out at a time; 0: each copy is waited for.
    """
    if copies is not None and not in_flight:
        return queue, sum(copies)
    out, back = queue.out, max(0, queue.back - backward)
    waited = 0
    if copies is not None:
        allowed = (in_flight - 1) * copies[0]
        waited = max(0, out - allowed) + back
        out, back = min(out, allowed) + copies[0], copies[1]
    return Queue(max(0, out - forward), back), waited


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after the other, and backward in reverse.

    Args:
        menus: for each block the entries to choose from.
        outside: for k from 0 to the number of blocks, the most bytes alive at any moment while no block runs and exactly
            the first k hold, above what these hold: the embedding has k = 0, the head and the loss have the last.
        limit_bytes: the most that the storage may keep; None for any number.
        in_flight: how many blocks' tensors may be on their way out at a time; 0: each copy is waited for.
        spans: what may be done with several blocks as one, in place of an entry of each.

    Raises:
        UsageError: the parts do not fit together, or an entry has a time that is none.

    Examples:
        >>> from reactivate.planner.solver.chain import Chain, Candidate
        >>> keep, recompute = Candidate("keep", 0.0, 4, 5), Candidate("recompute", 1.0, 1, 6)
        >>> chain = Chain(menus=((keep, recompute),) * 3, outside=(0, 0, 0, 2))
        >>> chain.solution_of([keep, recompute, recompute]).peak_bytes
        11
    """

    menus: tuple[tuple[Candidate, ...], ...]
    outside: tuple[int, ...]
    limit_bytes: int | None = None
    in_flight: int = 1
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.menus)
        for span in self.spans:
            if not (0 <= span.start < span.start + len(span.entries) <= count):
                raise UsageError(
                    f"A span of {len(span.entries)} blocks from number {span.start} on is not within a chain of {count}."
                )
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
                copies = entry.transfer
                if copies is not None and not (
                    0 <= copies.out_seconds < math.inf
                    and 0 <= copies.back_seconds < math.inf
                    and copies.stored_bytes >= 0
                ):
                    raise UsageError(f"Entry {entry.name!r} of block {index} has copies that cannot be: {copies}.")

    def solution_of(self, entries: Iterable[Candidate]) -> Solution:
        """Return the solution that these entries make, one for each block."""
        entries = tuple(entries)
        held_bytes, peak_bytes = 0, self.outside[0]
        for entry, outside in zip(entries, self.outside[1:], strict=True):
            peak_bytes = max(peak_bytes, held_bytes + entry.need_bytes)
            held_bytes += entry.held_bytes
            peak_bytes = max(peak_bytes, held_bytes + outside)
        stored_bytes = sum(entry.transfer.stored_bytes for entry in entries if entry.transfer is not None)
        waited = self._waited(entries)
        seconds = math.fsum([*(entry.seconds for entry in entries), math.ldexp(waited, -_TICK_BITS)])
        return Solution(entries, seconds, peak_bytes, stored_bytes)

    def _waited(self, entries: Iterable[Candidate]) -> int:
        """Return how long the step waits for copies, in ticks."""
        queue, total = Queue(), 0
        for entry in entries:
            forward, backward = ticks_of(entry.forward_seconds), ticks_of(entry.backward_seconds)
            queue, waited = passed(queue, forward, backward, copies_of(entry), self.in_flight)
            total += waited
        return total


def copies_of(entry: Candidate) -> tuple[int, int] | None:
    """Return the ticks of the copies out and back; None if there are none."""
    transfer = entry.transfer
    return None if transfer is None else (ticks_of(transfer.out_seconds), ticks_of(transfer.back_seconds))
