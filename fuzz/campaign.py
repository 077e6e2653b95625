"""A campaign: many seeds, in one process or several, until a count or a time is reached."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from fuzz.generate import generate
from fuzz.judge import CRASHED, PLAIN_RAISES, Verdict, judge
from fuzz.run import OURS, PLAIN, Arm, compiled, run
from fuzz.source import source_of

CHUNK = 20
"""Seeds that a worker takes at a time."""
LONGEST = 120
"""Seconds after which a program counts as hanging, and its process is ended."""
MEASURED = 10
"""Of so many programs one is measured in bytes."""

Found = Iterator[tuple[int, Verdict]]


@dataclass(frozen=True)
class Limits:
    """The end of a campaign: a number of programs, or a time, whichever comes first."""

    count: int | None = None
    seconds: float | None = None

    def seeds(self, first: int) -> Iterator[int]:
        """Yield seeds until the limit."""
        end = None if self.seconds is None else time.monotonic() + self.seconds
        for seed in itertools.count(first) if self.count is None else range(first, first + self.count):
            if end is not None and time.monotonic() >= end:
                return
            yield seed


def judge_seed(seed: int, arm: Arm = OURS) -> Verdict:
    """Return the verdict on the program of a seed."""
    return judge(generate(seed), arm, measure=seed % MEASURED == 0)


def place_on(device: str) -> None:
    """Let the tensors of all programs of this process be on a device, whose kernels then give the same bits each time."""
    if device == "cpu":
        return
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_device(device)


def campaign(first: int, limits: Limits, workers: int = 1, judging: Callable[[int], Verdict] = judge_seed) -> Found:
    """Yield (seed, verdict) for one seed after the other; with several workers in the order of completion."""
    seeds = limits.seeds(first)
    if workers > 1:
        yield from _in_processes(seeds, workers)
    else:
        yield from ((seed, judging(seed)) for seed in seeds)


def _processes(count: int) -> ProcessPoolExecutor:
    device = str(torch.get_default_device())
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), place_on, (device,))


def _in_processes(seeds: Iterator[int], workers: int) -> Found:
    while True:
        pending: dict[Future[list[Verdict]], list[int]] = {}
        with _processes(workers) as pool:
            try:
                yield from _fed(pool, seeds, pending, workers)
            except BrokenProcessPool:
                lost = list(itertools.chain.from_iterable(pending.values()))
            else:
                return
        yield from _one_by_one(lost)


def _fed(
    pool: ProcessPoolExecutor, seeds: Iterator[int], pending: dict[Future[list[Verdict]], list[int]], workers: int
) -> Found:
    for chunk in iter(lambda: list(itertools.islice(seeds, CHUNK)), []):
        lost = Future[list[Verdict]]()
        pending[lost] = chunk  # until it is submitted, which fails where the pool is broken
        pending[pool.submit(_chunk, chunk)] = pending[lost]
        del pending[lost]
        if len(pending) > workers:
            yield from _finished(pending)
    while pending:
        yield from _finished(pending)


def _finished(pending: dict[Future[list[Verdict]], list[int]]) -> Found:
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        verdicts = future.result()
        yield from zip(pending.pop(future), verdicts)


def _chunk(seeds: list[int]) -> list[Verdict]:
    return [_watched(seed) for seed in seeds]


def _watched(seed: int) -> Verdict:
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    try:
        return judge_seed(seed)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _one_by_one(seeds: list[int]) -> Found:
    """Judge seeds of which one has ended its process, so that it is known which."""
    while seeds:
        with _processes(1) as pool:
            try:
                while seeds:
                    yield seeds[0], pool.submit(_watched, seeds[0]).result()
                    seeds = seeds[1:]
            except BrokenProcessPool:
                yield seeds[0], _crash_of(seeds[0])
                seeds = seeds[1:]


def _crash_of(seed: int) -> Verdict:
    """Return the verdict on a program that ends its process: discarded if the plain run does so too."""
    with _processes(1) as pool:
        try:
            pool.submit(_run_plain, seed).result()
        except BrokenProcessPool:
            return Verdict(PLAIN_RAISES, "the process ended or hung")
    return Verdict(CRASHED, "the process ended or hung")


def _run_plain(seed: int) -> None:
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    run(compiled(source_of(generate(seed))), PLAIN, seed)
    faulthandler.cancel_dump_traceback_later()
