"""Memory that is allocated on the CPU, from the profiler's memory events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


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
