"""Rule 14: threads that share a module, random streams, a queue or a tensor compute what each computes alone."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from meeting_threads import (
    PATIENCE_SECONDS,
    Meet,
    alone,
    assert_equal,
    together,
)
from oracle import Ran, seed_everything
from surroundings import assert_unchanged, surroundings
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by
from reactivate._snapshot.generators import RandomStream, numpy_stream
from reactivate._snapshot.random_streams import STREAMS, RandomStreams, RngSnapshot


class Counting(nn.Module):
    """Reads and writes buffers and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.losses = nn.BatchNorm1d(8), []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, middle: Meet) -> Tensor:
        self.count += 1
        self.losses.append(1.0)
        h = self.norm(x).sin()
        middle()
        return (h * self.count.clone()).exp() * len(self.losses) * self.norm.running_mean.clone()


class Plain:
    """Writes to a tensor and a list that no module holds."""

    def __init__(self) -> None:
        self.count, self.losses = torch.zeros(()), [0.0]

    def parameters(self) -> list[Tensor]:
        return []

    def buffers(self) -> list[Tensor]:
        return [self.count]

    def __call__(self, x: Tensor, middle: Meet) -> Tensor:
        self.count += 1
        self.losses.append(1.0)
        h = x.sin()
        middle()
        return (h * self.count.clone()).exp() * len(self.losses)


class Dropping(nn.Module):
    """Draws from streams that are the process's."""

    def forward(self, x: Tensor, middle: Meet) -> Tensor:
        h = F.dropout(x.sin(), 0.3)
        middle()
        return F.dropout(h, random.random()).exp().tanh()


class Encounter:
    """Two recomputations meet in the middle, if they can, and end in the order in which they came."""

    def __init__(self) -> None:
        self._middle, self._first_ended = threading.Barrier(2), threading.Event()
        self._order: list[int] = []

    def __call__(self) -> None:
        if not reactivate.is_recomputing():
            return
        self._order.append(threading.get_ident())
        try:
            self._middle.wait(timeout=0.3)
        except threading.BrokenBarrierError:
            return  # the other has to wait until this one has ended
        if threading.get_ident() == self._order[1]:
            assert self._first_ended.wait(PATIENCE_SECONDS)

    def ended(self) -> None:
        self._first_ended.set()


@pytest.mark.parametrize("make", [Counting, Plain, Dropping])
def test_two_recomputations_of_what_they_share(make: Callable[[], Any]) -> None:
    """Both set the same state back, so one has to wait for the other."""

    def once(wrap: Callable[..., Any], ran: Ran) -> list[Any]:
        seed_everything()
        module, encounter = make(), Encounter()
        inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
        with observed_by(ran):
            outputs = [wrap(module)(x, encounter) for x in inputs]

            def job(index: int) -> Callable[[Meet], Any]:
                def run(meet: Meet) -> Any:
                    meet()
                    leaves = [inputs[index], *module.parameters()]
                    try:
                        return torch.autograd.grad(outputs[index], leaves, torch.ones(4, 8))
                    finally:
                        encounter.ended()

                return run

            gradients = together(job(0), job(1))
        state = [*module.buffers(), *vars(module).get("losses", []), torch.get_rng_state(), random.getstate()]
        return [*(out.detach() for out in outputs), *gradients, *state]

    ran = Ran()
    assert_equal(once(lambda fn: fn, Ran()), once(reactivate.checkpoint, ran), "training")
    assert (ran.regions, ran.recomputations) == (2, 2)


@pytest.mark.parametrize("count", [2, 3])
def test_a_module_with_hooks_called_by_several_threads(count: int) -> None:
    """A region a call, inside of its hooks, and nothing left in the module."""
    meetings: dict[int, Meet] = {}

    def once(wrap: Callable[..., Any], rans: list[Ran]) -> list[Any]:
        seed_everything()
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        calls = Journal()  # a list would be shared state that changes between forward and backward
        module.register_forward_pre_hook(lambda *_: meetings[threading.get_ident()]())
        module.register_forward_hook(lambda *_: calls.append("hook"))
        inputs = [torch.randn(4, 8, requires_grad=True) for _ in rans]
        before = surroundings(module)
        fn = wrap(module)

        def job(index: int) -> Callable[[Meet], Any]:
            def run(meet: Meet) -> Any:
                meetings[threading.get_ident()] = meet
                with observed_by(rans[index]):
                    out = fn(inputs[index])
                    return torch.autograd.grad(out, [inputs[index], *module.parameters()], torch.ones_like(out))

            return run

        gradients = together(*map(job, range(count)))
        assert_unchanged(before, surroundings(module))
        return [*gradients, list(calls)]

    rans = [Ran() for _ in range(count)]
    assert_equal(once(lambda fn: fn, [Ran() for _ in rans]), once(reactivate.checkpoint, rans), "training")
    assert [(ran.regions, ran.recomputations) for ran in rans] == [(1, 1)] * count


def test_what_another_thread_draws_is_what_it_draws_alone() -> None:
    """The streams are the process's, and a recomputation puts them back to where it found them."""

    def draw() -> list[Any]:
        return [torch.rand(3), random.random()]

    seed_everything()
    expected = [draw() for _ in range(3)]
    seed_everything()

    def recomputes(meet: Meet) -> Tensor:
        x = torch.linspace(0, 1, 4, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            return x.sin().exp()

        outputs = [reactivate.checkpoint(fn)(x) for _ in range(2)]
        for out in outputs:
            meet()
            meet()
            out.sum().backward()
        meet()
        return x.grad

    def draws(meet: Meet) -> list[Any]:
        drawn = []
        for _ in range(2):
            meet()
            drawn.append(draw())
            meet()
        meet()
        drawn.append(draw())
        return drawn

    grad, drawn = together(recomputes, draws)
    assert_equal(expected, drawn, "random numbers")
    x = torch.linspace(0, 1, 4, requires_grad=True)
    assert torch.equal(grad, 2 * torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_a_snapshot_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread draws while a region begins; later the generator stands where it stood before that."""
    STREAMS.now()  # which looks for NumPy's stream the first time
    stream, *others = STREAMS._streams

    def others_draw() -> Any:
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.rand, 1).result()
        return stream.read()

    torch.rand(1)  # so that the next region needs a new snapshot
    start = stream.read()
    monkeypatch.setattr(STREAMS, "_streams", [stream._replace(read=others_draw), *others])
    STREAMS.now()
    after_one = torch.rand(1)
    stream.write(start)
    snapshot, expected = STREAMS.now(), torch.rand(3)
    assert torch.equal(expected[1:2], after_one), "no other thread has drawn"
    STREAMS.rewind(snapshot)
    assert torch.equal(torch.rand(3), expected)


def test_two_threads_that_find_numpy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is noted once: with two of it, no later look would be equal to one before."""
    pytest.importorskip("numpy.random")
    streams = RandomStreams()

    def slowly() -> RandomStream | None:
        time.sleep(0.05)
        return numpy_stream()

    def look(meet: Meet) -> RngSnapshot:
        meet()
        return streams.now()

    monkeypatch.setattr("reactivate._snapshot.random_streams.numpy_stream", slowly)
    one, other = together(look, look)
    assert len(one.moments) == 3 and one is other is streams.now()


def test_a_queue_and_its_worker_are_not_rewound() -> None:
    """Items that another thread puts into a queue meanwhile are still there; so is the state of a barrier."""
    waiting: queue.Queue[float] = queue.Queue()
    x = torch.linspace(0, 1, 4, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        assert isinstance(waiting, queue.Queue)
        return x.sin().exp()

    out = reactivate.checkpoint(fn)(x)
    waiting.put(1.0)
    out.register_hook(lambda grad: waiting.put(2.0))
    out.sum().backward()
    assert [waiting.get(timeout=1), waiting.get(timeout=1)] == [1.0, 2.0]


def test_generators_of_their_own_are_in_nobodys_way() -> None:
    """Two threads that draw from a generator each, in forward, backward and recomputation at the same time."""

    def job(seed: int, wrap: Callable[..., Any], ran: Ran) -> Callable[[Meet], Any]:
        def run(meet: Meet) -> Any:
            generator = torch.Generator().manual_seed(seed)
            x = torch.linspace(0, 1, 8, requires_grad=True)

            def fn(x: Tensor, generator: torch.Generator) -> Tensor:
                meet()
                noise = torch.rand(8, generator=generator)
                meet()
                return (x * noise + torch.rand(8, generator=generator)).sin().exp()

            with observed_by(ran):
                out = wrap(fn)(x, generator)
                out.sum().backward()
            return out.detach(), x.grad, torch.rand(3, generator=generator)

        return run

    rans = [Ran(), Ran()]
    expected = [job(seed, lambda fn: fn, Ran())(alone) for seed in (1, 2)]
    found = together(*(job(seed, reactivate.checkpoint, ran) for seed, ran in zip((1, 2), rans)))
    for plain, ours in zip(expected, found):
        assert_equal(plain, ours, "generator")
    assert [(ran.regions, ran.recomputations) for ran in rans] == [(1, 1)] * 2


def test_what_one_recomputation_may_not_save_another_thread_saves() -> None:
    """The table is modified behind one region and in front of the other, which saves it while the first recomputes."""
    table = torch.randn(8, 1024)
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    ran = Ran()

    def outdated(meet: Meet) -> Callable[[Tensor], Tensor]:
        def run(h: Tensor) -> Tensor:
            table.mul(2)  # read, and not saved
            if reactivate.is_recomputing():
                meet()
                meet()
            return h.sin().exp()

        return reactivate.checkpoint(run)

    def current(h: Tensor) -> Tensor:
        return ((h.sin() @ table) * table[0]).exp()

    def first(meet: Meet) -> None:
        with observed_by(ran):
            out = outdated(meet)(x)
            with torch.no_grad():
                table.add_(1)
            out.sum().backward()

    def second(meet: Meet) -> None:
        meet()  # in the middle of the recomputation of the other
        with observed_by(ran):
            reactivate.checkpoint(current)(y).sum().backward()
        meet()

    together(first, second)
    assert (ran.regions, ran.recomputations) == (2, 2)
    found, y.grad = y.grad, None
    current(y).sum().backward()
    assert_equal(found, y.grad, "the gradient")
    assert_equal(torch.autograd.grad(x.sin().exp().sum(), x), x.grad, "the gradient of the outdated one")
