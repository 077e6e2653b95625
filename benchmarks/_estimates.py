"""From the times of calls to figures with intervals.

Two methods, since the answer depends on the method. *Warm batches*: the minimum over the rounds, which is what the code
costs when nothing disturbs it and caches are warm. *Single calls*: the median of paired differences, which is what a
call costs amid other code.

A figure is written once, as a function of a `View`. It is evaluated for the times as they are, which gives its value,
and for many draws of their rounds, which gives its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Key = tuple[str, int]
"""What was timed: the way of checkpointing, and the size of the workload."""

Times = Mapping[Key, Array]
"""Seconds a call, one entry a round; entries at the same index were measured in the same round."""

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


class View:
    """The times of some rounds, or of many draws of rounds at once."""

    def __init__(self, times: Times, method: Method, rounds: NDArray[np.int64]) -> None:
        self._times = times
        self._method = method
        self._rounds = rounds

    def level(self, key: Key) -> Array:
        """Seconds of a call, one for each draw."""
        level: Array = self._method.center(self._times[key][self._rounds], axis=-1)
        return level

    def over(self, key: Key, base: Key) -> Array:
        """Seconds of a call beyond one of `base`, one for each draw."""
        if not self._method.is_paired:
            return self.level(key) - self.level(base)
        differences = self._times[key] - self._times[base]
        over: Array = self._method.center(differences[self._rounds], axis=-1)
        return over


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


def slope(sizes: Sequence[int], values: Sequence[Array]) -> Array:
    """By how much the values grow with the size: the least-squares line's slope, one for each draw."""
    x = np.asarray(sizes, dtype=np.float64)
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()
    fitted: Array = weights @ np.stack(values)
    return fitted


def verdict(figure: Estimate, target: float) -> str:
    """Return whether the figure is at most its target, judged by its interval."""
    if figure.high <= target:
        return "met"
    return "missed" if figure.low > target else "within noise"
