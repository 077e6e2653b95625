"""The cost of ops on the device at hand: their seconds, and the memory that they take for themselves.

One step runs for real, each op under a clock and the allocator's eye. An op is known by its name, the shapes, strides
and dtypes of its tensors, and its other arguments: a recomputation runs the same ops again, so what one step tells holds for
every policy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate.planner.cost import roofline
from reactivate.planner.cost.devices import DeviceSpec
from reactivate.planner.profile.op_costs import Key, key_of, sizes_of
from reactivate.planner.profile.trace import Cost


class Sample(NamedTuple):
    """The costs of the ops of one run.

    Attributes:
        seen: those of each call of an op.
        modelled: the seconds of each op as a roofline tells.
    """

    seen: dict[Key, list[Cost]]
    modelled: dict[Key, float]


def measure(step: Callable[[], object], device: torch.device, spec: DeviceSpec, *, takes_memory: bool) -> Sample:
    """Run `step` once, and take down what its ops cost.

    Args:
        step: forward and backward, for real.
        device: where it runs.
        spec: of the device, for ops that do not run in `step`.
        takes_memory: whether to see what ops take for themselves.
    """
    meter = _Meter(device, spec, takes_memory=takes_memory)
    with _watched(device) if takes_memory else nullcontext(dict) as tops, meter:
        step()
    found = tops()
    seen: dict[Key, list[Cost]] = {}
    for number, (key, cost) in enumerate(meter.seen):
        seen.setdefault(key, []).append(cost._replace(top_bytes=found[number]) if number in found else cost)
    return Sample(seen, meter.modelled)


class _Meter(TorchDispatchMode):
    """Times each op. On an accelerator the queue is emptied around it, and the allocator asked for its peak.

    Args:
        device, spec: as for `measure`.
        takes_memory: whether to take down the memory of results, and to tell a profiler where ops begin and end.
    """

    def __init__(self, device: torch.device, spec: DeviceSpec, *, takes_memory: bool) -> None:
        super().__init__()
        self.seen: list[tuple[Key, Cost]] = []
        self.modelled: dict[Key, float] = {}
        self._spec = spec
        self._is_cpu = device.type == "cpu"
        self._takes_memory = takes_memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = key_of(func, args, kwargs)
        run = self._on_cpu if self._is_cpu else self._on_accelerator
        result, seconds, top = run(func, args, kwargs)
        self.seen.append((key, Cost(seconds, top, tuple(sizes_of(result)) if self._takes_memory else ())))
        if key not in self.modelled:
            self.modelled[key] = roofline.seconds_of(func, args, kwargs, result, self._spec)
        return result

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, int]:
        with record_function(f"{_MARK}{len(self.seen)}") if self._takes_memory else _UNMARKED:
            began = perf_counter()
            result = func(*args, **kwargs)
            return result, perf_counter() - began, 0

    @staticmethod
    def _on_accelerator(func: Any, args: Any, kwargs: Any) -> tuple[Any, float, int]:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before, began = torch.accelerator.memory_allocated(), perf_counter()
        result = func(*args, **kwargs)
        torch.accelerator.synchronize()
        return result, perf_counter() - began, torch.accelerator.max_memory_allocated() - before


_MARK = "reactivate::op "
_UNMARKED = nullcontext()


@contextmanager
def _watched(device: torch.device) -> Iterator[Callable[[], dict[int, int]]]:
    """The most that each op allocates, by its number: of the CPU only the profiler tells. Yields what gives it."""
    if device.type != "cpu":
        yield dict
        return
    with _profiler() as profiler:
        yield lambda: _tops(profiler)


@contextmanager
def _profiler() -> Iterator[Any]:
    """Profile, without the profiler's log on the terminal. Its events are read as they are: torch's own summary of them, and
    a file of them, take a hundred times as long as the step.
    """
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "6")  # read when the first profiler of a process starts
    try:
        with profile(profile_memory=True) as profiler:
            yield profiler
    finally:
        if not is_set:
            os.environ.pop(_LOG_LEVEL, None)


_LOG_LEVEL = "KINETO_LOG_LEVEL"


def _changes(profiler: Any) -> list[Any]:
    """List what was allocated and freed, in order: events with a time, and bytes that may be negative."""
    found = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    return sorted(found, key=lambda event: int(event.start_ns()))


def _tops(profiler: Any) -> dict[int, int]:
    """The most that was allocated in each op that `_Meter` marked, above what there was when it began.

    A number that it was given counts: it is a small tensor for a moment, which is made before the op begins.
    """
    marks: list[tuple[int, int, int]] = []  # nanosecond, what, which or how much
    for event in profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            marks.append((event.start_ns(), _CHANGES, event.nbytes()))
        elif name.startswith(_MARK):
            number, began = int(name.removeprefix(_MARK)), event.start_ns()
            marks += [(began, _BEGINS, number), (began + event.duration_ns(), _ENDS, number)]
    marks.sort(key=lambda mark: mark[0])
    tops: dict[int, int] = {}
    running: int | None = None
    live = numbers = 0
    for _, what, value in marks:
        if what == _BEGINS:
            running, live, tops[value] = value, numbers, numbers
        elif what == _ENDS:
            running, numbers = None, 0
        elif running is not None:
            live += value
            tops[running] = max(tops[running], live)
        elif 0 < value <= _NUMBER_BYTES:
            numbers += value
    return tops


_BEGINS, _ENDS, _CHANGES = range(3)
_NUMBER_BYTES = 16  # of the largest: a complex one


def measured_peak(step: Callable[[], object], device: torch.device) -> int:
    """The most that `step` allocates above what there is before it, for real."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        step()
        torch.accelerator.synchronize()
        return int(torch.accelerator.max_memory_allocated() - before)
    with _profiler() as profiler:
        step()
    live = top = 0
    for event in _changes(profiler):
        live += event.nbytes()
        top = max(top, live)
    return top


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes."""
    _wait(device)
    began = perf_counter()
    run()
    _wait(device)
    return perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
