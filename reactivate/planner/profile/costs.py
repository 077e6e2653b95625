"""The cost of ops on the device at hand: their seconds, and the memory that they take for themselves.

One step runs for real, each op under a clock and the allocator's eye. An op is known by its name, the shapes, strides
and dtypes of its tensors, and its other arguments: a recomputation runs the same ops again, so what one step tells holds for
every policy.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate._engine.accounts import storages_of
from reactivate._torch.containers import leaves_at_op
from reactivate._torch.ops import opaque_arguments
from reactivate.planner.cost import roofline
from reactivate.planner.cost.devices import DeviceSpec
from reactivate.planner.profile.trace import Cost

Key = tuple[Hashable, ...]


class Modelled:
    """The costs of ops as a roofline tells.

    Args:
        spec: whose.
        rounding: of the allocator.
    """

    def __init__(self, spec: DeviceSpec, rounding: int) -> None:
        self.rounding = rounding
        self._spec = spec
        self._known: dict[Key, Cost] = {}

    def of(self, op: Any, args: Any, kwargs: Any, result: Any) -> Cost:
        key = key_of(op, args, kwargs)
        if key not in self._known:
            self._known[key] = Cost(roofline.seconds_of(op, args, kwargs, result, self._spec))
        return self._known[key]


class Measured(Modelled):
    """The costs of ops as they were measured, and those of others as a roofline tells."""

    def __init__(self, spec: DeviceSpec, rounding: int, known: dict[Key, Cost]) -> None:
        super().__init__(spec, rounding)
        self._known = known


def key_of(op: Any, args: Any, kwargs: Any) -> Key:
    """Return the key of an op's cost: all that is known of the call before it runs."""
    opaque = opaque_arguments(op)
    given = [*enumerate(args), *kwargs.items()]
    return (op, *((name, None if name in opaque else _facts_of(value)) for name, value in given))


def _facts_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride() if leaf.layout is torch.strided else None, leaf.dtype
    if isinstance(leaf, (list, tuple)):
        return tuple(map(_facts_of, leaf))
    return leaf if isinstance(leaf, Hashable) else repr(leaf)


def measure(step: Callable[[], object], device: torch.device, spec: DeviceSpec, rounding: int) -> Measured:
    """Run `step` once, and take down what its ops cost.

    Args:
        step: forward and backward, for real.
        device: where it runs.
        spec, rounding: of the device, for ops that do not run in `step`.
    """
    meter = _Meter(device)
    with _watched(device) as tops, meter:
        step()
    found = tops()
    seen: defaultdict[Key, list[Cost]] = defaultdict(list)
    for number, (key, cost) in enumerate(meter.seen):
        seen[key].append(cost._replace(top_bytes=found.get(number, cost.top_bytes)))
    return Measured(spec, rounding, {key: _of_several(costs) for key, costs in seen.items()})


def _of_several(costs: list[Cost]) -> Cost:
    seconds = statistics.median(cost.seconds for cost in costs)
    sizes = tuple(map(max, zip(*(cost.result_bytes for cost in costs))))
    return Cost(seconds, max(cost.top_bytes for cost in costs), sizes)


class _Meter(TorchDispatchMode):
    """Times each op. On an accelerator the queue is emptied around it, and the allocator asked for its peak."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.seen: list[tuple[Key, Cost]] = []
        self._is_cpu = device.type == "cpu"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = key_of(func, args, kwargs)
        run = self._on_cpu if self._is_cpu else self._on_accelerator
        result, seconds, top = run(func, args, kwargs)
        self.seen.append((key, Cost(seconds, top, tuple(_sizes_of(result)))))
        return result

    def _on_cpu(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, int]:
        with record_function(f"{_MARK}{len(self.seen)}"):
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


def _sizes_of(result: Any) -> Iterator[int]:
    for leaf in leaves_at_op(result):
        if isinstance(leaf, Tensor):
            yield sum(int(storage.nbytes()) for storage in storages_of(leaf))


_MARK = "reactivate::op "


@contextmanager
def _watched(device: torch.device) -> Iterator[Callable[[], dict[int, int]]]:
    """The most that each op allocates, by its number: of the CPU only the profiler tells. Yields what gives it."""
    if device.type != "cpu":
        yield dict
        return
    with _profiler() as profiler:
        yield lambda: _tops(_events(profiler))


@contextmanager
def _profiler() -> Iterator[Any]:
    """Profile one cycle, without the profiler's log on the terminal."""
    is_set = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "6")  # read when the first profiler of a process starts
    try:
        # torch 2.11 warns, unless it is asked for the events of every cycle.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            yield profiler
    finally:
        if not is_set:
            os.environ.pop(_LOG_LEVEL, None)


_LOG_LEVEL = "KINETO_LOG_LEVEL"


def _events(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]  # type: ignore[no-any-return]


def _tops(events: list[dict[str, Any]]) -> dict[int, int]:
    """The most that was allocated in each op that `_Meter` marked, above what there was when it began.

    A number that it was given counts: it is a small tensor for a moment, which is made before the op begins.
    """
    marks: list[tuple[float, int, int]] = []  # second, what, which or how much
    for event in events:
        name = event.get("name", "")
        if event.get("ph") == "X" and name.startswith(_MARK):
            number = int(name.removeprefix(_MARK))
            marks += [(event["ts"], _BEGINS, number), (event["ts"] + event["dur"], _ENDS, number)]
        elif name == "[memory]":
            marks.append((event["ts"], _CHANGES, event["args"]["Bytes"]))
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
    changes = [event for event in _events(profiler) if event["name"] == "[memory]"]
    live = top = 0
    for event in sorted(changes, key=lambda event: float(event["ts"])):
        live += event["args"]["Bytes"]
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
