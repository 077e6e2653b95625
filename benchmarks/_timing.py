"""Times of steps, interleaved in an order that is shuffled in every round, by two methods: warm batches, single calls.

Between two times of one function all the others run. A machine that becomes slower meanwhile is slower for all of them.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from time import monotonic, perf_counter_ns, process_time_ns

import numpy as np
import torch
from _estimates import SINGLE, WARM, Key, Times

Step = Callable[[], object]
Steps = Mapping[Key, Step]
Tick = Callable[[], None]
"""Called after every round, outside of what is timed."""

Track = Callable[[str, int], Tick]
"""(what begins, its number of rounds) -> a function to call after each of them."""

REFRESH_SECONDS = 0.5

# What is timed computes, and never waits: alone on a machine both clocks say the same, in company the first is right.
CLOCKS = {"cpu": process_time_ns, "wall": perf_counter_ns}


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
        self._synchronize()
        start = now()
        for _ in todo:
            step()
        end = now()
        self._synchronize()
        return (end - start) * 1e-9 / calls

    def calls_in(self, seconds: float, step: Step) -> int:
        """Return how many calls last as long."""
        step()
        once = min(self.seconds(step, 1) for _ in range(3))
        return max(1, round(seconds / max(once, 1e-9)))

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


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
    if device.type == "cpu":
        return step

    def run() -> None:
        step()
        torch.accelerator.synchronize(device)

    return run


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
