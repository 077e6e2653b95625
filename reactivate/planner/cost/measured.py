"""The cost of ops on the device at hand: their seconds, and the memory that they take for themselves.

Steps run for real, each op under a clock and the allocator's eye. An op is known by its name, the shapes, strides and
dtypes of its tensors, and its other arguments: a recomputation runs the same ops again, so what one step tells holds for
every policy.

Other programs on the machine make ops take longer, never shorter. So the least of several times is nearest to what an op
takes on a quiet machine, and a plan that is made of these is the same on a busy one. An op is measured again where its
times are implausible: far apart, or far above those of its twin, an op with tensors of the same shapes that lie in
another order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from reactivate._torch.dynamo import DispatchMode
from reactivate.planner.cost import roofline
from reactivate.planner.cost.devices import DeviceSpec
from reactivate.planner.cost.op_costs import Key, MeasuredCosts, op_key, result_sizes, without_strides
from reactivate.planner.cost.stretches import nothing_collected, profiled
from reactivate.planner.progress import Tell
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import Target, is_alone
from reactivate.planner.trace.records import Cost

LEAST_LOOKS, MOST_LOOKS = 2, 5
TIMED = 2  # steps without a clock at each op
FAR = 3.0  # times as long as its twin, or as in another look
MATTERS = 0.01  # of the step: implausible times of less are let be


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
        spec: of the device, for ops that do not run in `step`.
        takes_memory: whether to see what ops take for themselves.
    """
    meter = _Meter(device, spec, takes_memory=takes_memory)
    is_profiled = takes_memory and device.type == "cpu"  # of whose memory only the profiler tells
    with profiled() if is_profiled else nullcontext() as profiler, meter:
        step()
    found = _tops(profiler) if is_profiled else {}
    seen: dict[Key, list[Cost]] = {}
    for number, (key, cost) in enumerate(meter.seen):
        seen.setdefault(key, []).append(cost._replace(top_bytes=found[number]) if number in found else cost)
    return Sample(seen, meter.modelled)


class _Meter(DispatchMode):
    """Times each op. On an accelerator the queue is emptied around it, and the allocator asked for its peak.

    Args:
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
        key = op_key(func, args, kwargs)
        run = self._on_cpu if self._is_cpu else self._on_accelerator
        with nothing_collected():
            result, seconds, top = run(func, args, kwargs)
        self.seen.append((key, Cost(seconds, top, tuple(result_sizes(result)) if self._takes_memory else ())))
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


# -- a whole step -----------------------------------------------------------------------------------------------------


def time_call(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes."""
    _wait(device)
    began = perf_counter()
    run()
    _wait(device)
    return perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


# -- several looks -----------------------------------------------------------------------------------------------------


def measure_step(step: TrainingStep, target: Target, tell: Tell) -> tuple[MeasuredCosts, float, float]:
    """Run a step for real: once to warm up, then for what its ops cost as often as that is implausible, then for its time.

    Returns:
        The costs of its ops; what it takes, in seconds; by which part of that it was another when it was measured again.
    """
    tell("the step runs, to warm up")
    step.run_for_real()
    samples: list[Sample] = []
    most = MOST_LOOKS if is_alone() else LEAST_LOOKS  # ranks that run together look equally often
    while len(samples) < LEAST_LOOKS or (len(samples) < most and implausible(samples)):
        tell("the step runs, for what its ops cost")
        # Memory is looked at only once, since a profiler takes time, and an op the same memory each time.
        step.run_for_real(
            watch=lambda run: samples.append(measure(run, target.device, target.spec, takes_memory=not samples))
        )
    tell("the step runs, for its time")
    seconds: list[float] = []
    step.run_for_real(TIMED, watch=lambda run: seconds.append(time_call(run, target.device)))
    modelled = {key: value for sample in samples for key, value in sample.modelled.items()}
    costs = MeasuredCosts(target.spec, target.rounding, best_costs(samples), modelled)
    again = max(seconds) / min(seconds) - 1 if min(seconds) else 0.0
    return costs, min(seconds), max(again, time_uncertainty(samples))


def best_costs(samples: Sequence[Sample]) -> dict[Key, Cost]:
    """Return the least time of each op, with the most memory that it took."""
    seen: defaultdict[Key, list[Cost]] = defaultdict(list)
    for sample in samples:
        for key, costs in sample.seen.items():
            seen[key] += costs
    return {key: _best(costs) for key, costs in seen.items()}


def _best(costs: Sequence[Cost]) -> Cost:
    sizes = tuple(map(max, zip(*(cost.result_bytes for cost in costs if cost.result_bytes))))  # of the look at memory
    return Cost(min(cost.seconds for cost in costs), max(cost.top_bytes for cost in costs), sizes)


def time_uncertainty(samples: Sequence[Sample]) -> float:
    """Return by which part the ops of a step took longer in the second best look at each."""
    looks = list(_looks(samples))
    best = sum(count * times[0] for _, count, times in looks)
    second = sum(count * times[min(1, len(times) - 1)] for _, count, times in looks)
    return second / best - 1 if best else 0.0


def _looks(samples: Sequence[Sample]) -> Iterator[tuple[Key, int, list[float]]]:
    """Yield each op, how often a step makes it, and its best time in each look, the least first."""
    times: defaultdict[Key, list[float]] = defaultdict(list)
    counts: defaultdict[Key, int] = defaultdict(int)
    for sample in samples:
        for key, costs in sample.seen.items():
            times[key].append(min(cost.seconds for cost in costs))
            counts[key] = max(counts[key], len(costs))
    for key, found in times.items():
        yield key, counts[key], sorted(found)


def implausible(samples: Sequence[Sample]) -> set[Key]:
    """Return the ops that took much less in one look than in all others, or else much longer than their twins.

    An op that is still slower than its twin after one more look is slow.
    """
    looks = list(_looks(samples))
    least = MATTERS * sum(count * times[0] for _, count, times in looks)
    fastest: dict[Hashable, float] = {}
    for key, _, times in looks:
        twins = without_strides(key)
        fastest[twins] = min(times[0], fastest.get(twins, times[0]))
    found = set()
    for key, count, times in looks:
        twin, again = fastest[without_strides(key)], times[min(1, len(times) - 1)]
        is_slow = len(samples) <= LEAST_LOOKS and times[0] > FAR * twin and count * (times[0] - twin) > least
        if is_slow or (again > FAR * times[0] and count * (again - times[0]) > least):
            found.add(key)
    return found
