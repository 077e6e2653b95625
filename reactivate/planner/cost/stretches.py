"""Stretches of a real step, between moments that are marked: what is alive, the most that was, and seconds."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function

from reactivate._torch.modes import is_profiler_running
from reactivate.errors import UsageError

_MARK = "reactivate::moment "


class Stretch(NamedTuple):
    """A stretch of a step.

    Attributes:
        start_bytes, top_bytes, live_bytes: what is alive when it begins, the most, and what is alive when it ends, above what
            there was before the first one.
        seconds: how long it takes.
    """

    start_bytes: int
    top_bytes: int
    live_bytes: int
    seconds: float = 0.0


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Pause the garbage collector: what it frees while memory is looked at would count for, or against, what runs then."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


Marked = tuple[Callable[[], None], list[Stretch]]


def marked(device: torch.device, *, takes_memory: bool) -> AbstractContextManager[Marked]:
    """Return a context for a step: it yields what marks a moment, and the stretches, which are there when it is over.

    Args:
        takes_memory: whether memory is looked at, or time.
    """
    if not takes_memory:
        return _timed(device)
    return _profiled() if device.type == "cpu" else _allocated()


def measured_peak(step: Callable[[], object], device: torch.device) -> int:
    """Return the most that `step` allocates above what there is before it, for real."""
    with marked(device, takes_memory=True) as (_, stretches):
        step()
    return stretches[0].top_bytes


@contextmanager
def _timed(device: torch.device) -> Iterator[Marked]:
    now = _clock_of(device)
    moments, found = [now()], list[Stretch]()
    yield lambda: moments.append(now()), found
    moments.append(now())
    found += [Stretch(0, 0, 0, end - begin) for begin, end in pairwise(moments)]


def _clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock of a step: that of the processor where one thread computes, since other programs do not add to it."""
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def now() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return now


@contextmanager
def _profiled() -> Iterator[Marked]:
    numbers, found = itertools.count(), list[Stretch]()

    def mark() -> None:
        with record_function(f"{_MARK}{next(numbers)}"):
            pass

    with profiled() as profiler:
        yield mark, found
    found += _between_marks(profiler)


@contextmanager
def profiled() -> Iterator[Any]:
    """Profile, without the profiler's log on the terminal. Its events are read as they are: torch's own summary of them, and
    a file of them, take a hundred times as long as the step.

    Raises:
        UsageError: a profiler runs, which this one would end.
    """
    if is_profiler_running():
        raise UsageError(
            "A plan on a CPU measures memory with torch's profiler, and a process has one at a time: the one that runs now "
            "would end with nothing in it. Make the plan before `torch.profiler.profile()` begins, or after it has ended."
        )
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "6")  # read when the first profiler of a process starts
    try:
        with profile(profile_memory=True) as profiler:
            yield profiler
    finally:
        if not is_set:
            os.environ.pop(_LOG_LEVEL, None)


_LOG_LEVEL = "KINETO_LOG_LEVEL"


def _between_marks(profiler: Any) -> Iterator[Stretch]:
    events = [
        (event.start_ns(), event.name().startswith(_MARK), event.nbytes())
        for event in profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name().startswith(_MARK)
    ]
    live = start = top = 0
    for _, is_mark, nbytes in sorted(events, key=lambda event: event[0]):
        if is_mark:
            yield Stretch(start, top, live)
            start = top = live
        else:
            live += nbytes
            top = max(top, live)
    yield Stretch(start, top, live)


@contextmanager
def _allocated() -> Iterator[Marked]:
    torch.accelerator.synchronize()
    with nothing_collected():
        torch.accelerator.reset_peak_memory_stats()
        first, found = torch.accelerator.memory_allocated(), list[Stretch]()

    def mark() -> None:
        with nothing_collected():
            top, live = torch.accelerator.max_memory_allocated() - first, torch.accelerator.memory_allocated() - first
            torch.accelerator.reset_peak_memory_stats()
        found.append(Stretch(found[-1].live_bytes if found else 0, int(top), int(live)))

    yield mark, found
    mark()
