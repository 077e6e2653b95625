"""The memory that an accelerator's allocator reserves for a step, beside what the step allocates."""

from __future__ import annotations

from collections import defaultdict

from reactivate.planner.cost.caching_allocator import CachingAllocator, MemoryBlock
from reactivate.planner.profile.trace import Allocation, Trace


def reserved_for(trace: Trace, fixed_bytes: int) -> int | None:
    """Return the bytes that a caching allocator has reserved after a step; None for the memory of a CPU.

    What an op takes for itself counts as one block while it runs; the state of the optimizer and what else is on the device
    as one block that was there before.

    Args:
        trace: the step.
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
