"""The caching allocator of accelerators, simulated: what it reserves of the device for a sequence of allocations.

torch's allocator takes segments from the device and cuts blocks out of them. A block is a multiple of 512 bytes. Blocks
up to 1 MiB come out of segments of 2 MiB, those below 10 MiB out of segments of 20 MiB, larger ones have one segment
each, of whole 2 MiB. The smallest free block that is large enough is taken, and cut if more than 1 MiB is left over (of a
small one: 512 bytes). Free neighbours become one. Segments stay reserved. These are its defaults;
`PYTORCH_CUDA_ALLOC_CONF` changes them (https://docs.pytorch.org/docs/stable/notes/cuda.html). One stream is simulated;
others have other blocks.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from reactivate.planner.trace.records import Allocation, Trace

BLOCK, SMALL, SMALL_SEGMENT = 512, 2**20, 2 * 2**20
LARGE, LARGE_SEGMENT, OWN_SEGMENT = 10 * 2**20, 20 * 2**20, 2 * 2**20


@dataclass(eq=False)
class MemoryBlock:
    """A block of a segment.

    Attributes:
        size_bytes: its size.
        number: where it stands among all blocks that were ever made: the older of two equal ones is taken first.
        is_small: whether it is of a segment for small blocks.
        before, after: its neighbours in the segment.
        is_free: whether it can be taken.
    """

    size_bytes: int
    number: int
    is_small: bool
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    is_free: bool = True


@dataclass
class CachingAllocator:
    """An allocator that has reserved nothing yet.

    Attributes:
        reserved_bytes: what it has taken from the device.
    """

    reserved_bytes: int = 0
    _free: dict[bool, list[tuple[int, int, MemoryBlock]]] = field(default_factory=lambda: {True: [], False: []})
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def allocate(self, size_bytes: int) -> MemoryBlock:
        """Take a block of at least this size."""
        size = max(BLOCK, -(-size_bytes // BLOCK) * BLOCK)
        is_small = size <= SMALL
        free = self._free[is_small]
        best = bisect_left(free, (size, -1))
        block = free.pop(best)[2] if best < len(free) else self._segment(size, is_small)
        block.is_free = False
        left = block.size_bytes - size
        if left >= BLOCK if is_small else left > SMALL:
            self._cut(block, size)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Give a block back, as one with its free neighbours."""
        for beside in (block.before, block.after):
            if beside is not None and beside.is_free:
                free = self._free[beside.is_small]
                del free[bisect_left(free, (beside.size_bytes, beside.number))]
                block.size_bytes += beside.size_bytes
                if beside is block.before:
                    block.before = beside.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = beside.after
                    if block.after is not None:
                        block.after.before = block
        block.is_free = True
        self._enter_free(block)

    def _segment(self, size: int, is_small: bool) -> MemoryBlock:
        whole = -(-size // OWN_SEGMENT) * OWN_SEGMENT
        found = SMALL_SEGMENT if is_small else LARGE_SEGMENT if size < LARGE else whole
        self.reserved_bytes += found
        return MemoryBlock(found, next(self._numbers), is_small)

    def _cut(self, block: MemoryBlock, size: int) -> None:
        rest = MemoryBlock(block.size_bytes - size, next(self._numbers), block.is_small)
        rest.before, rest.after, block.after, block.size_bytes = block, block.after, rest, size
        if rest.after is not None:
            rest.after.before = rest
        self._enter_free(rest)

    def _enter_free(self, block: MemoryBlock) -> None:
        insort(self._free[block.is_small], (block.size_bytes, block.number, block))


def reserved_for(trace: Trace, fixed_bytes: int) -> int | None:
    """Return the bytes that a caching allocator has reserved after a step; None for the memory of a CPU.

    What an op takes for itself counts as one block while it runs; the state of the optimizer and what else is on the device
    as one block that was there before.

    Args:
        fixed_bytes: what is there all the time.
    """
    if trace.rounding == 1:
        return None
    allocator = CachingAllocator()
    for size_bytes in (*trace.standing, max(0, fixed_bytes - sum(trace.standing))):
        if size_bytes:
            allocator.allocate(size_bytes)
    born: defaultdict[int, list[Allocation]] = defaultdict(list)
    died: defaultdict[int, list[Allocation]] = defaultdict(list)
    for allocation in trace.allocations:
        born[allocation.born].append(allocation)
        if allocation.died is not None:
            died[allocation.died].append(allocation)
    blocks: dict[int, MemoryBlock] = {}
    for number, op in enumerate(trace.ops):
        for allocation in died[number]:
            if allocation.born < number:
                allocator.free(blocks.pop(id(allocation)))
        for allocation in born[number]:
            blocks[id(allocation)] = allocator.allocate(allocation.size_bytes)
        for allocation in died[number]:
            if allocation.born == number:
                allocator.free(blocks.pop(id(allocation)))
        if op.top_bytes > op.live_bytes:
            allocator.free(allocator.allocate(op.top_bytes - op.live_bytes))
    return allocator.reserved_bytes
