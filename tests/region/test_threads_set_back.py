"""Rule 14: threads whose recomputations set the same state back wait for each other, and all others run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meeting_threads import (
    PATIENCE_SECONDS,
    Meet,
    alone,
    assert_equal,
    changing_threads_often,
    together,
)
from oracle import Ran, assert_bitwise, seed_everything
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by
from reactivate._snapshot.rewound_tensors import rewound_memory
from reactivate._snapshot.state_lock import STATE_LOCK, LockEntry


def test_recomputations_that_set_nothing_back_run_side_by_side() -> None:
    """Nobody drew between forward and backward, so neither of two threads waits for the other."""

    def job(meet: Meet) -> Tensor:
        x = torch.linspace(0, 1, 4, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            if reactivate.is_recomputing():
                meet()
            return x.sin().exp()

        reactivate.checkpoint(fn)(x).sum().backward()
        return x.grad

    x = torch.linspace(0, 1, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    for grad in together(job, job, job):
        assert_bitwise(expected, grad, "gradient")


class Normed(nn.Module):
    """Writes to buffers, and waits for the other thread in the middle of a recomputation, as in a collective."""

    meet: Meet

    def __init__(self, large: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(large))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)).sin()
        self.seen += 1
        if reactivate.is_recomputing():
            self.meet()
        return (y * self.seen[0]).exp() * self.norm.running_mean.clone()


@pytest.mark.parametrize("large", [8, 8192])
def test_recomputations_that_set_back_tensors_of_their_own_run_side_by_side(large: int) -> None:
    """Each sets back the buffers of its own model, and waits for the other: small buffers, and those with a shadow."""

    def job(seed: int, wrap: Callable[..., Any], ran: Ran) -> Callable[[Meet], Any]:
        torch.manual_seed(seed)
        module = Normed(large)

        def run(meet: Meet) -> Any:
            module.meet = meet
            x = torch.linspace(-1, seed, 32).reshape(4, 8).requires_grad_()
            with observed_by(ran):
                for _ in range(3):
                    wrap(module)(x).sum().backward()
            return x.grad, *(parameter.grad for parameter in module.parameters()), *module.buffers()

        return run

    rans = [Ran(), Ran()]
    expected = [job(seed, lambda fn: fn, Ran())(alone) for seed in (1, 2)]
    found = together(*(job(seed, reactivate.checkpoint, ran) for seed, ran in zip((1, 2), rans)))
    assert_equal(expected, found, "buffers")
    assert [(ran.regions, ran.recomputations) for ran in rans] == [(3, 3)] * 2
    assert not (STATE_LOCK.inside or STATE_LOCK.writers or STATE_LOCK.waiting or rewound_memory)


def test_a_recomputation_that_is_given_a_buffer_waits_for_one_that_sets_it_back() -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if reactivate.is_recomputing():
                begun.set()
                ended.wait(0.3)  # the other waits for this one
            self.count += 1
            return (x * self.count.clone()).sin()

    def reading(x: Tensor) -> Tensor:
        return (x * 2).sin().exp()

    begun, ended = threading.Event(), threading.Event()
    module = Adding()
    x = torch.linspace(0, 1, 4, requires_grad=True)
    out = reactivate.checkpoint(module)(x)
    given = module.count.data.requires_grad_()
    other = reactivate.checkpoint(reading)(given)
    (expected,) = torch.autograd.grad(reading(given).sum(), given)

    def second(meet: Meet) -> Any:
        assert begun.wait(PATIENCE_SECONDS)
        try:
            return torch.autograd.grad(other.sum(), given)
        finally:
            ended.set()

    _, (found,) = together(lambda meet: torch.autograd.grad(out.sum(), x), second)
    assert_bitwise(expected, found, "gradient")


def test_one_that_waits_long_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both set back torch's random numbers, so that the second cannot begin."""
    monkeypatch.setattr("reactivate._snapshot.state_lock.PATIENCE_SECONDS", 0.01)
    begun, waited = threading.Event(), threading.Event()

    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5)
        if reactivate.is_recomputing() and not begun.is_set():
            begun.set()
            waited.wait(PATIENCE_SECONDS)
        return y.exp()

    region = reactivate.checkpoint(fn)
    outs = [region(torch.linspace(0, 1, 4, requires_grad=True)).sum() for _ in range(2)]
    monkeypatch.setattr("reactivate._snapshot.state_lock.warn", lambda text: (waited.set(), told.append(text)))
    told: list[str] = []

    def second(meet: Meet) -> None:
        assert begun.wait(PATIENCE_SECONDS)
        outs[1].backward()

    together(lambda meet: outs[0].backward(), second)
    assert len(told) == 1 and "neither goes on" in told[0]


def test_recomputations_that_set_nothing_back_take_no_mutex(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken(Exception):
        pass

    class Mutex:
        def __enter__(self) -> None:
            raise Taken

        def __exit__(self, *error: object) -> None:
            pass

    x, ran = torch.linspace(0, 1, 4, requires_grad=True), Ran()
    with observed_by(ran):
        quiet, loud = (reactivate.checkpoint(lambda x: x.sin().exp())(x).sum() for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(STATE_LOCK, "_mutex", Mutex())
            quiet.backward()
            torch.rand(1)  # which is put back
            with pytest.raises(Taken):
                loud.backward()
        assert ran.recomputations == 1
        loud.backward()
    assert ran.recomputations == 2
    assert not (STATE_LOCK.inside or STATE_LOCK.waiting)


def test_a_recomputation_that_sets_state_back_inside_of_one_that_does_not() -> None:
    """On another thread: the outer one waits for it, and the inner one does not for the outer."""

    def once(wrap: Callable[..., Any], ran: Ran) -> list[Any]:
        seed_everything()
        scales = [2.0]

        def outer(x: Tensor) -> Tensor:
            h = x.sin() * scales[0]
            with torch.random.fork_rng():
                z = h.detach().requires_grad_()
                y = wrap(lambda z: F.dropout(z.sin(), 0.5).exp())(z)
                ((slope,),) = together(lambda meet: torch.autograd.grad(y.sum(), z))
            return (h * slope).tanh()

        x = torch.linspace(0, 1, 8, requires_grad=True)
        with observed_by(ran):
            out = wrap(outer)(x)
            return [out.detach(), *torch.autograd.grad(out.sum(), x), torch.rand(2)]

    ran = Ran()
    assert_equal(once(lambda fn: fn, Ran()), once(reactivate.checkpoint, ran), "gradient")
    assert ran.recomputations >= 3
    assert not STATE_LOCK.inside


def test_recomputations_that_set_state_back_wait_for_each_other() -> None:
    """One is inside of another on its own thread, and does not wait for that."""

    def job(seed: int, wrap: Callable[..., Any]) -> Callable[[Meet], Any]:
        def run(meet: Meet) -> Any:
            module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(0.1 * seed)
            x = torch.linspace(-1, seed, 32).reshape(4, 8).requires_grad_()

            def inner(x: Tensor) -> Tensor:
                return module(x).sin().exp()

            def outer(x: Tensor) -> Tensor:
                y = wrap(inner)(x * 1)
                (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                return (y * slope).tanh()

            out = wrap(outer)(x)
            return out.detach(), torch.autograd.grad(out.sum(), [x, *module.parameters()])

        return run

    seeds = 1, 2, 3
    expected = [job(seed, lambda fn: fn)(alone) for seed in seeds]
    with changing_threads_often():
        for _ in range(10):
            found = together(*(job(seed, reactivate.checkpoint) for seed in seeds))
            assert_equal(expected, found, "nested")


def test_an_entry_is_found_by_what_it_is() -> None:
    """Hundreds of modules make hundreds of entries inside of each other: to compare what is in them took seconds."""
    assert LockEntry(frozenset) != LockEntry(frozenset)
