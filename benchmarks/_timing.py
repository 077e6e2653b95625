"""Times of steps, interleaved in an order that is shuffled in every round, and figures from them, with intervals.

Between two times of one function all the others run. A machine that becomes slower meanwhile is slower for all of them.

Two methods, since the answer depends on the method. *Warm batches*: the minimum over the rounds, which is what the code
costs when nothing disturbs it and caches are warm. *Single calls*: the median of paired differences, which is what a
call costs amid other code.

A figure is written once, as a function of a `View`. It is evaluated for the times as they are, which gives its value,
and for many draws of their rounds, which gives its interval.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from time import monotonic, perf_counter_ns, process_time_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Key = tuple[str, int]
"""What was timed: the way of checkpointing, and the size of the workload."""

Times = Mapping[Key, Array]
"""Seconds a call, one entry a round; entries at the same index were measured in the same round."""

Step = Callable[[], object]
Steps = Mapping[Key, Step]
Tick = Callable[[], None]
"""Called after every round, outside of what is timed."""

Track = Callable[[str, int], Tick]
"""(what begins, its number of rounds) -> a function to call after each of them."""

# What is timed computes, and never waits: alone on a machine both clocks say the same, in company the first is right.
CLOCKS = {"cpu": process_time_ns, "wall": perf_counter_ns}
REFRESH_SECONDS = 0.5

DRAWS = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Method:
    """Ways to make one time of many.

    Attributes:
        center: reduces the last axis.
        is_paired: whether a difference is taken round by round, before it is reduced.
        draw: (number of rounds, generator) -> indices of rounds, one row a draw.
        describe: one sentence for the reader of a result.
    """

    name: str
    center: Callable[..., Any]
    is_paired: bool
    draw: Callable[[int, np.random.Generator], NDArray[np.int64]]
    describe: str


def halves(rounds: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Random halves of the rounds."""
    return np.argsort(generator.random((DRAWS, rounds)), axis=1)[:, : (rounds + 1) // 2]


def with_replacement(rounds: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """As many rounds as there are, each drawn from all: the bootstrap."""
    return generator.integers(rounds, size=(DRAWS, rounds))


# The bootstrap fails for a minimum: most of its draws contain the very round that is the minimum.
WARM = Method(
    "warm batches",
    np.min,
    is_paired=False,
    draw=halves,
    describe="minimum over the rounds of the mean of a batch; 95 % of the figures from random halves of the rounds",
)
SINGLE = Method(
    "single calls",
    np.median,
    is_paired=True,
    draw=with_replacement,
    describe="median of paired differences over calls in random order; 95 % bootstrap interval over the rounds",
)
METHODS = (WARM, SINGLE)


@dataclass(frozen=True)
class View:
    """The times of some rounds, or of many draws of rounds at once."""

    times: Times
    method: Method
    rounds: NDArray[np.int64]

    def level(self, key: Key) -> Array:
        """Seconds of a call, one for each draw."""
        return np.asarray(self.method.center(self.times[key][self.rounds], axis=-1))

    def over(self, key: Key, base: Key) -> Array:
        """Seconds of a call beyond one of `base`, one for each draw."""
        if not self.method.is_paired:
            return self.level(key) - self.level(base)
        differences = self.times[key] - self.times[base]
        return np.asarray(self.method.center(differences[self.rounds], axis=-1))


Figure = Callable[[View], Array]


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """In another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def estimate(figure: Figure, times: Times, method: Method) -> Estimate:
    """The figure, with the interval that `CONFIDENCE` of the draws fall into."""
    rounds = len(next(iter(times.values())))
    (value,) = figure(View(times, method, np.arange(rounds)[None]))
    # One seed for every figure: a figure and the table that it stands in are drawn alike.
    drawn = figure(View(times, method, method.draw(rounds, np.random.default_rng(0))))
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(value), float(low), float(high))


def verdict(figure: Estimate, target: float) -> str:
    """Return whether the figure is at most its target, judged by its interval."""
    if figure.high <= target:
        return "met"
    return "missed" if figure.low > target else "within noise"


@dataclass(frozen=True)
class Settings:
    """Settings: how long to measure.

    Attributes:
        rounds: of warm batches.
        batch_seconds: the length of a batch.
        calls: rounds of single calls.
        clock: "cpu" or "wall".
    """

    rounds: int = 120
    batch_seconds: float = 0.006  # short, so that on a busy machine some batches are left alone
    calls: int = 2000
    clock: str = "cpu"


@contextmanager
def quiet() -> Iterator[None]:
    """One thread, and no garbage but that of the measured calls.

    The collector stays enabled, as users have it: who leaves cycles behind pays for them here as well.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Timer:
    """Times calls until they return; on an accelerator this is what the host does for them.

    Attributes:
        clock: one of `CLOCKS`.
    """

    device: torch.device
    clock: str

    def seconds(self, step: Step, calls: int) -> float:
        """Seconds a call, from an empty queue of the device on."""
        now = CLOCKS[self.clock]
        todo = repeat(None, calls)
        synchronize(self.device)
        start = now()
        for _ in todo:
            step()
        end = now()
        synchronize(self.device)
        return (end - start) * 1e-9 / calls

    def calls_in(self, seconds: float, step: Step) -> int:
        """Return how many calls last as long."""
        step()
        once = min(self.seconds(step, 1) for _ in range(3))
        return max(1, round(seconds / max(once, 1e-9)))


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def by_both_methods(
    part: str, steps: Steps, settings: Settings, device: torch.device, track: Track
) -> dict[str, Times]:
    """{the name of a method: times by it}."""
    timer = Timer(device, settings.clock)
    with quiet():
        tick = track(f"{part}, {WARM.name}", settings.rounds)
        warm = warm_batches(steps, settings.rounds, settings.batch_seconds, timer, tick)
        tick = track(f"{part}, {SINGLE.name}", settings.calls)
        return {WARM.name: warm, SINGLE.name: single_calls(steps, settings.calls, timer, tick)}


def warm_batches(steps: Steps, rounds: int, batch_seconds: float, timer: Timer, tick: Tick) -> Times:
    """In each round a batch of calls of each step, after some calls that are not timed."""
    calls = {key: timer.calls_in(batch_seconds, step) for key, step in steps.items()}

    def batch(key: Key) -> float:
        for _ in range(max(1, calls[key] // 10)):
            steps[key]()
        return timer.seconds(steps[key], calls[key])

    return _shuffled_rounds(steps, rounds, batch, tick)


def single_calls(steps: Steps, rounds: int, timer: Timer, tick: Tick) -> Times:
    """In each round one call of each step."""
    for step in steps.values():
        step()
    return _shuffled_rounds(steps, rounds, lambda key: timer.seconds(steps[key], 1), tick)


def _shuffled_rounds(steps: Steps, rounds: int, measure: Callable[[Key], float], tick: Tick) -> Times:
    order = list(steps)
    shuffle = random.Random(0).shuffle
    times = {key: np.empty(rounds) for key in steps}
    for index in range(rounds):
        shuffle(order)
        for key in order:
            times[key][index] = measure(key)
        tick()
    return times


def finished(step: Step, device: torch.device) -> Step:
    """The step, until the device has done it."""

    def run() -> None:
        step()
        torch.accelerator.synchronize(device)

    return step if device.type == "cpu" else run


def silent(description: str, rounds: int) -> Tick:
    """A `Track` that shows nothing."""
    return lambda: None


@contextmanager
def progress() -> Iterator[Track]:
    """A bar for each part. No thread draws it, for that would disturb the measurement: it is drawn between rounds."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, auto_refresh=False) as bars:
        drawn = 0.0

        def track(description: str, rounds: int) -> Tick:
            task = bars.add_task(description, total=rounds)

            def tick() -> None:
                nonlocal drawn
                bars.advance(task)
                if monotonic() - drawn > REFRESH_SECONDS or bars.tasks[task].finished:
                    bars.refresh()
                    drawn = monotonic()

            return tick

        yield track
