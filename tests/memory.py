"""Memory that is allocated on the CPU, from the profiler's memory events."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


@contextmanager
def without_collector() -> Iterator[None]:
    """A context in which objects go with their last references, without the collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive(references: Iterable[weakref.ref[Any]]) -> int:
    """Count the references whose objects are there."""
    return sum(reference() is not None for reference in references)


@dataclass
class Allocated:
    """Bytes that a call allocated: at most at one time, and what is left of them."""

    peak_bytes: int
    left_bytes: int
    result: Any


def allocated_by(fn: Callable[[], Any]) -> Allocated:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = fn()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return Allocated(peak, now, result)


@dataclass
class OfRank:
    """Bytes that a step of one rank allocated at most at one time.

    Attributes:
        peak_bytes: all of them.
        own_bytes: those without the memory that the backend of the process group takes for itself: what it allocates in a
            collective (gloo copies what it reduces), and in threads of its own. NCCL takes none of it from torch's allocator.
    """

    peak_bytes: int
    own_bytes: int


def allocated_by_rank(step: Callable[[], Any]) -> OfRank:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    events = sorted((event for root in roots for event in _memory_events(root)), key=lambda event: event[0])
    (thread,) = {root.start_tid for root in roots if root.name.startswith("aten::")} or {None}
    is_own = [thread_of == thread and not in_collective for *_, thread_of, in_collective in events]
    return OfRank(_peak_of(events, [True] * len(events)), _peak_of(events, is_own))


def _memory_events(event: Any, in_collective: bool = False) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield (when, where, how much, in which thread, whether in a collective) of what was allocated, or freed: negative."""
    if event.tag == _EventType.Allocation:
        what = event.extra_fields
        yield event.start_time_ns, what.ptr, what.alloc_size, event.start_tid, in_collective
    for child in event.children:
        yield from _memory_events(child, in_collective or event.name.startswith("c10d::"))


def _peak_of(events: list[tuple[int, int, int, int, bool]], counts: list[bool]) -> int:
    alive: dict[int, int] = {}
    now = peak = 0
    for (_, where, size, *_), is_counted in zip(events, counts):
        if size < 0:
            now -= alive.pop(where, 0)
        elif is_counted:
            alive[where] = size
            now += size
        peak = max(peak, now)
    return peak
