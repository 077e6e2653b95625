"""Several looks at what the ops of a step cost: the best of each, and how sure that is.

Other programs on the machine make ops take longer, never shorter. So the least of several times is nearest to what an op
takes on a quiet machine, and a plan that is made of these is the same on a busy one. An op is looked at again where its times
are implausible: far apart, or far above those of its twin, an op with tensors of the same shapes that lie in another order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from reactivate.planner.place import Place, is_alone
from reactivate.planner.profile.costs import Sample, measure, seconds_of
from reactivate.planner.profile.op_costs import Key, Measured, without_strides
from reactivate.planner.profile.trace import Cost
from reactivate.planner.progress import Tell
from reactivate.planner.step import TrainingStep

LEAST_LOOKS, MOST_LOOKS = 2, 5
TIMED = 2  # steps without a clock at each op
FAR = 3.0  # times as long as its twin, or as in another look
MATTERS = 0.01  # of the step: implausible times of less are let be


@dataclass(frozen=True)
class Looked:
    """The findings of several looks at a step.

    Attributes:
        costs: of its ops.
        seconds: what the step takes.
        uncertainty: by which part of it the time of the step was another when it was measured again.
    """

    costs: Measured
    seconds: float
    uncertainty: float


def look_at(step: TrainingStep, place: Place, tell: Tell) -> Looked:
    """Run a step for real: once to warm up, then for what its ops cost as often as that is implausible, then for its time.

    Args:
        step: forward and backward.
        place: where it runs.
        tell: reports progress.
    """
    tell("the step runs, to warm up")
    step.run_for_real()
    samples: list[Sample] = []
    most = MOST_LOOKS if is_alone() else LEAST_LOOKS  # ranks that run together look equally often
    while len(samples) < LEAST_LOOKS or (len(samples) < most and implausible(samples)):
        tell("the step runs, for what its ops cost")
        step.run_for_real(watch=lambda run: samples.append(_sample(run, place, takes_memory=not samples)))
    tell("the step runs, for its time")
    seconds: list[float] = []
    step.run_for_real(TIMED, watch=lambda run: seconds.append(seconds_of(run, place.device)))
    modelled = {key: value for sample in samples for key, value in sample.modelled.items()}
    costs = Measured(place.spec, place.rounding, best_of(samples), modelled)
    again = max(seconds) / min(seconds) - 1 if min(seconds) else 0.0
    return Looked(costs, min(seconds), max(again, uncertainty_of(samples)))


def _sample(run: Callable[[], object], place: Place, *, takes_memory: bool) -> Sample:
    """Look at one run: at memory only once, since a profiler takes time, and an op the same memory each time."""
    return measure(run, place.device, place.spec, takes_memory=takes_memory)


def best_of(samples: Sequence[Sample]) -> dict[Key, Cost]:
    """Return the least time of each op, with the most memory that it took."""
    seen: defaultdict[Key, list[Cost]] = defaultdict(list)
    for sample in samples:
        for key, costs in sample.seen.items():
            seen[key] += costs
    return {key: _best(costs) for key, costs in seen.items()}


def _best(costs: Sequence[Cost]) -> Cost:
    sizes = tuple(map(max, zip(*(cost.result_bytes for cost in costs if cost.result_bytes))))  # of the look at memory
    return Cost(min(cost.seconds for cost in costs), max(cost.top_bytes for cost in costs), sizes)


def uncertainty_of(samples: Sequence[Sample]) -> float:
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
    fastest: dict[Key, float] = {}
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
