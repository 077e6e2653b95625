"""Jobs on a thread each, which wait for each other where they meet; and settings that a thread can be under."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from oracle import assert_bitwise, flatten
from surroundings import SinIsCos

PATIENCE_SECONDS = 60.0  # after which a meeting that does not take place is a failure

setting: contextvars.ContextVar[float] = contextvars.ContextVar("setting", default=1.0)

Meet = Callable[[], None]


def alone() -> None:
    """The meeting of somebody who meets nobody."""


def together(*jobs: Callable[[Meet], Any]) -> list[Any]:
    """Return the results of jobs that run on a thread each; `meet()` returns when all of them have called it."""
    barrier = threading.Barrier(len(jobs), timeout=PATIENCE_SECONDS)

    def meet() -> None:
        barrier.wait()

    def run(job: Callable[[Meet], Any]) -> Any:
        try:
            return job(meet)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(run, job) for job in jobs]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors, "one of them did not come to a meeting"
    return [future.result() for future in futures]


def assert_equal(one: Any, other: Any, what: str) -> None:
    for first, second in zip(flatten(one), flatten(other), strict=True):
        assert_bitwise(first, second, what)


@contextmanager
def context_variable() -> Iterator[None]:
    token = setting.set(3.0)
    try:
        yield
    finally:
        setting.reset(token)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "function mode": SinIsCos,
    "default device": lambda: torch.device("cpu"),
    "context variable": context_variable,
    "no grad in a part": nullcontext,
}


@contextmanager
def changing_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
