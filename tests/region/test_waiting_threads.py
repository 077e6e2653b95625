"""Regions that wait for the backward of another region on a thread that they have started."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from journal import Journal
from oracle import Watched, seed_everything
from torch import Tensor
from torch.nn import functional as F

import reactivate
from reactivate._passes.observing import observed_by
from reactivate._snapshot.thread_waits import waits_for

Run = Callable[[Callable[[], None]], None]


def join(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def result(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def on_pool(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda number: work(), range(1)))


def twice(work: Callable[[], None]) -> None:
    join(lambda: result(work))


@pytest.mark.parametrize("run", [join, result, on_pool, twice])
def test_a_region_waits_for_the_backward_of_another_one(run: Run) -> None:
    def train(checkpoint: Callable[..., Any]) -> list[Tensor]:
        def inner(x: Tensor) -> Tensor:
            again.append(reactivate.is_recomputing())
            return F.dropout(x.sin()).sin()

        def outer(x: Tensor) -> Tensor:
            y, z = F.dropout(x.cos()).cos(), leaf.clone().detach().requires_grad_()
            run(lambda: checkpoint(inner)(z).sum().backward())
            return F.dropout(y * z.grad).sin()

        seed_everything()
        leaf, found = torch.linspace(0, 1, 12), []
        for _ in range(3):
            x = torch.randn(12, requires_grad=True)
            y = checkpoint(outer)(x)
            y.sum().backward()
            found += [y.detach(), x.grad, torch.get_rng_state()]
        return found

    again = Journal()
    watched = Watched()
    plain = train(lambda fn: fn)
    with observed_by(watched):
        ours = train(reactivate.checkpoint)
    assert all(map(torch.equal, plain, ours))
    assert watched.recomputations == 3 and list(again).count(True) == 6


def test_only_one_that_waits_for_good_counts() -> None:
    found: dict[str, bool] = {}
    me = threading.get_ident()

    def look(name: str) -> Callable[[], None]:
        def work() -> None:
            began.wait()
            while not waits_in("threading"):
                pass
            found[name] = waits_for(me, threading.get_ident())

        return work

    def waits_in(module: str) -> bool:
        return sys._current_frames()[me].f_globals["__name__"] == module

    for name in ("join", "limited", "event"):
        began, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda name=name: (look(name)(), done.set()))
        thread.start()
        began.set()
        {"join": thread.join, "limited": lambda: thread.join(100), "event": done.wait}[name]()
        thread.join()
    assert found == {"join": True, "limited": False, "event": False}
    assert not waits_for(me, me)
