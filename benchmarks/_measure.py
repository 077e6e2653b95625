"""The two ways to take times: warm batches, and single calls, both in an order that is shuffled in every round.

Between two times of one function all the others run. A machine that becomes slower meanwhile is slower for all of them.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter_ns, process_time_ns

import numpy as np
import torch
from _figures import Key, Times

Step = Callable[[], object]
Steps = Mapping[Key, Step]
Tick = Callable[[], None]
"""Called after every round, outside of what is timed."""

# What is timed computes, and never waits: alone on a machine both clocks say the same, in company the first is right.
CLOCKS = {"cpu": process_time_ns, "wall": perf_counter_ns}


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
        self._fence()
        start = now()
        for _ in todo:
            step()
        end = now()
        self._fence()
        return (end - start) * 1e-9 / calls

    def calls_in(self, seconds: float, step: Step) -> int:
        """Return how many calls last as long."""
        step()
        once = min(self.seconds(step, 1) for _ in range(3))
        return max(1, round(seconds / max(once, 1e-9)))

    def _fence(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


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
