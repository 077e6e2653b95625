"""Rule 14: no state of one thread is seen by another, and each computes what it computes alone."""

from __future__ import annotations

import contextvars
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import Ran, assert_bitwise, flatten, seed_everything
from surroundings import Failure, Kept, SinIsCos, assert_unchanged, surroundings
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by, without_regions
from reactivate._snapshot.generators import RandomStream, numpy_stream
from reactivate._snapshot.random_streams import STREAMS, RandomStreams, RngSnapshot
from reactivate._snapshot.rewound_tensors import rewound_memory
from reactivate._snapshot.state_lock import STATE_LOCK, LockEntry
from reactivate.guards import DEFAULT

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


# -- two threads in lock step, under other settings each ---------------------------------------------------------------


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


def step(name: str, seed: int, meet: Meet, wrap: Callable[..., Any], where: str) -> tuple[Ran, int, list[Tensor]]:
    """Forward and backward of two regions, with meetings before, inside of and after each pass."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(8, 8, generator=generator).requires_grad_() for _ in range(2)]
    x = torch.randn(4, 8, generator=generator).requires_grad_()
    ran = Ran()

    def part(index: int) -> Callable[[Tensor], Tensor]:
        def run(h: Tensor) -> Tensor:
            meet()
            h = (h @ weights[index]).sin() * setting.get()
            with torch.set_grad_enabled(name != "no grad in a part"):
                more = (h @ weights[index]).cos()
            h = h + more
            meet()
            return h.float().exp().tanh() * torch.ones(8)

        return wrap(run)

    settings = SETTINGS[name]
    with observed_by(ran):
        with settings() if where != "backward" else nullcontext(), Kept() as kept:
            meet()
            out = part(1)(part(0)(x))
            meet()
        out = out.float().sum()
        with settings() if where != "forward" else nullcontext():
            meet()
            before = surroundings()
            out.backward()
            assert_unchanged(before, surroundings())
            meet()
    return ran, kept.kept_bytes, [out.detach(), x.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    "names",
    [
        ("none", "bfloat16"),
        ("bfloat16", "float16"),
        ("function mode", "default device"),
        ("context variable", "none"),
        ("no grad in a part", "function mode"),
        ("none", "none"),
    ],
    ids=" and ".join,
)
def test_in_lock_step(names: tuple[str, str], where: str, early_stop: bool) -> None:
    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        return reactivate.checkpoint(fn, early_stop=early_stop)

    expected = [step(name, seed, alone, lambda fn: fn, where) for seed, name in enumerate(names)]
    first, second = names
    found = together(
        lambda meet: step(first, 0, meet, wrap, where),
        lambda meet: step(second, 1, meet, wrap, where),
    )
    for name, (_, kept_plain, plain), (ran, kept, ours) in zip(names, expected, found):
        assert_equal(plain, ours, name)
        assert (ran.regions, ran.recomputations) == (2, 2)
        assert kept < kept_plain


def test_one_recomputes_while_the_other_does_not() -> None:
    """Only the thread that recomputes says so, though both are inside of a region."""
    seen = {"forward": Journal(), "recomputation": Journal()}

    def recomputes(meet: Meet) -> list[Tensor]:
        x = torch.linspace(0, 1, 4, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            if reactivate.is_recomputing():
                meet()
                seen["recomputation"].append(reactivate.is_recomputing())
                meet()
            return x.sin().exp()

        out = reactivate.checkpoint(fn)(x)
        out.sum().backward()
        assert not reactivate.is_recomputing()
        return [out.detach(), x.grad]

    def runs_forward(meet: Meet) -> list[Tensor]:
        x = torch.linspace(1, 2, 4, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            if not reactivate.is_recomputing():
                meet()
                seen["forward"].append(reactivate.is_recomputing())
                meet()
            return x.sin().exp()

        out = reactivate.checkpoint(fn)(x)
        out.sum().backward()
        return [out.detach(), x.grad]

    for found, first in zip(together(recomputes, runs_forward), (0, 1)):
        x = torch.linspace(first, first + 1, 4, requires_grad=True)
        out = x.sin().exp()
        assert_equal([out.detach(), torch.autograd.grad(out.sum(), x)[0]], found, "alone")
    assert seen == {"forward": [False], "recomputation": [True]}


def test_a_thread_that_the_function_starts_does_not_recompute() -> None:
    """`is_recomputing` speaks of the thread that asks."""
    seen = Journal()

    def fn(x: Tensor) -> Tensor:
        here = reactivate.is_recomputing()
        (there,) = together(lambda meet: reactivate.is_recomputing())
        seen.append((here, there))
        return x.sin().exp()

    reactivate.checkpoint(fn)(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [(False, False), (True, False)]


def test_one_fails_while_the_other_recomputes() -> None:
    """An exception in one thread's recomputation is nothing to the other."""

    def job(fails: bool) -> Callable[[Meet], Any]:
        def run(meet: Meet) -> Any:
            x = torch.linspace(0, 1, 4, requires_grad=True)

            def fn(x: Tensor) -> Tensor:
                h = x.sin()
                if reactivate.is_recomputing():
                    meet()
                    if fails and not errors:
                        errors.append(Failure())
                        raise errors[0]
                return h.exp()

            errors = Journal()
            out = reactivate.checkpoint(fn)(x)
            before = surroundings()
            if fails:
                with pytest.raises(Failure):
                    torch.autograd.grad(out.sum(), x)
            else:
                torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert_unchanged(before, surroundings())
            return torch.autograd.grad(out.sum(), x)[0]

        return run

    x = torch.linspace(0, 1, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    for grad in together(job(True), job(False)):
        assert_bitwise(expected, grad, "gradient")


# -- a backward on another thread --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_backward_on_another_thread(name: str) -> None:
    """A recomputation sees the settings of the forward's thread, and leaves its own as they were."""

    def once(wrap: Callable[..., Any], ran: Ran) -> list[Tensor]:
        seed_everything()
        weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            return F.dropout((x @ weight).sin() * setting.get()).float().exp() * torch.ones(8)

        def backward(meet: Meet) -> None:
            before = surroundings()
            out.sum().backward()
            assert_unchanged(before, surroundings())
            assert not reactivate.is_recomputing()

        with observed_by(ran):
            with SETTINGS[name]():
                out = wrap(fn)(x)
            together(backward)
        return [out.detach(), x.grad, weight.grad, torch.get_rng_state()]

    ran = Ran()
    assert_equal(once(lambda fn: fn, Ran()), once(reactivate.checkpoint, ran), name)
    assert (ran.regions, ran.recomputations) == (1, 1)


def test_microbatches_go_from_one_thread_to_the_other() -> None:
    """One thread runs the forward passes, the other the backward passes: batch norm's statistics move once each."""

    def once(wrap: Callable[..., Any], ran: Ran) -> list[Tensor]:
        seed_everything()
        block = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8))
        inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(4)]
        fn = wrap(block)
        outputs: list[Tensor] = []

        def forwards(meet: Meet) -> None:
            with observed_by(ran):
                for x in inputs:
                    outputs.append(fn(x).tanh())
                    meet()
                    meet()

        def backwards(meet: Meet) -> None:
            for index in range(len(inputs)):
                meet()
                outputs[index].sum().backward()
                meet()

        together(forwards, backwards)
        gradients = [tensor.grad for tensor in (*inputs, *block.parameters())]
        return [*(out.detach() for out in outputs), *gradients, *block.buffers()]

    ran = Ran()
    assert_equal(once(lambda fn: fn, Ran()), once(reactivate.checkpoint, ran), "training")
    assert (ran.regions, ran.recomputations) == (4, 4)


# -- two threads on one graph ------------------------------------------------------------------------------------------


def shared_graph(wrap: Callable[..., Any]) -> tuple[Tensor, list[Tensor]]:
    seed_everything()
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    x = torch.randn(4, 8, requires_grad=True)
    h = x
    for weight in weights:
        h = wrap(lambda h, weight=weight: F.dropout((h @ weight).sin()).exp().tanh())(h)
    return h.sum(), [x, *weights]


def test_two_backwards_on_one_graph() -> None:
    """Often, and with the interpreter changing threads all the time: each gets the gradients."""
    out, leaves = shared_graph(lambda fn: fn)
    expected = torch.autograd.grad(out, leaves)

    def differentiate(meet: Meet) -> list[Any]:
        found = []
        for _ in range(20):
            meet()
            found.append(torch.autograd.grad(out, leaves, retain_graph=True))
        return found

    ran = Ran()
    with observed_by(ran), changing_threads_often():
        out, leaves = shared_graph(lambda fn: reactivate.checkpoint(fn, guards=DEFAULT))
        for found in together(differentiate, differentiate):
            for gradients in found:
                assert_equal(list(expected), list(gradients), "gradients")
    assert ran.regions == 3
    assert ran.recomputations >= 3 * 20


@contextmanager
def changing_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_a_backward_ends_while_another_looks_for_what_it_recomputed() -> None:
    """The one that ends lets go of what was recomputed, between the other's recomputation and its look at the result."""
    resume, ended = threading.Event(), threading.Event()

    class Delayed(Ran):
        def recomputation_done(self, record: Any) -> None:
            super().recomputation_done(record)
            if self.recomputations == 2:
                resume.set()
                assert ended.wait(PATIENCE_SECONDS)

    x = torch.linspace(0, 1, 4, requires_grad=True)
    ran = Delayed()

    def ends(meet: Meet) -> Tensor:
        def pause(grad: Tensor) -> None:
            if threading.get_ident() == here:
                meet()
                assert resume.wait(PATIENCE_SECONDS)

        here = threading.get_ident()
        h.register_hook(pause)
        (grad,) = torch.autograd.grad(second.sum(), x, retain_graph=True)
        ended.set()
        return grad

    def looks(meet: Meet) -> Tensor:
        meet()
        for _ in range(2):  # the first takes what the other thread has recomputed
            (grad,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        return grad

    with observed_by(ran):
        h = x * 1
        first, second = reactivate.checkpoint(lambda h: (h.sin().exp(), h.cos().tanh()))(h)
        found = together(ends, looks)
    assert torch.equal(found[0], torch.autograd.grad((x * 1).cos().tanh().sum(), x)[0])
    assert torch.equal(found[1], torch.autograd.grad((x * 1).sin().exp().sum(), x)[0])
    assert ran.recomputations == 3


def test_one_recomputation_is_enough_for_two_backwards() -> None:
    """The thread that comes second waits for the recomputation of the first, and finds what it needs."""
    x, ran = torch.linspace(0, 1, 4, requires_grad=True), Ran()
    middle = threading.Barrier(2)

    def fn(h: Tensor) -> tuple[Tensor, Tensor]:
        if reactivate.is_recomputing():
            with suppress(threading.BrokenBarrierError):
                middle.wait(timeout=0.3)  # two recomputations would meet here
        return h.sin().exp(), h.cos().tanh()

    def job(output: int) -> Callable[[Meet], Tensor]:
        def run(meet: Meet) -> Tensor:
            pauses[threading.get_ident()] = meet
            meet()
            return torch.autograd.grad(outputs[output].sum(), x, retain_graph=True)[0]

        return run

    pauses: dict[int, Meet] = {}
    with observed_by(ran):
        h = x * 1
        h.register_hook(lambda grad: pauses[threading.get_ident()]())  # none ends before both have all they need
        outputs = reactivate.checkpoint(fn)(h)
        found = together(job(0), job(1))
    assert torch.equal(found[0], torch.autograd.grad((x * 1).sin().exp().sum(), x)[0])
    assert torch.equal(found[1], torch.autograd.grad((x * 1).cos().tanh().sum(), x)[0])
    assert (ran.regions, ran.recomputations) == (1, 1)


# -- one module, two threads -------------------------------------------------------------------------------------------


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


# -- switches are for the thread that sets them ------------------------------------------------------------------------


def test_contexts_of_ours_end_at_the_thread() -> None:
    """`shared_recompute` and the plain runs of `verify` are nothing to another thread."""

    def job(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Meet], Any]:
        def run(meet: Meet) -> Any:
            ran = Ran()
            x = torch.linspace(0, 1, 4, requires_grad=True)
            with observed_by(ran), context():
                meet()
                first, second = reactivate.checkpoint(lambda x: (x.sin().exp(), x.cos().tanh()), early_stop=False)(x)
                first.sum().backward(retain_graph=True)
                meet()
                second.sum().backward(retain_graph=True)
                meet()
            return ran.regions, ran.recomputations, x.grad

        return run

    contexts = nullcontext, reactivate.shared_recompute, without_regions
    expected = torch.linspace(0, 1, 4, requires_grad=True)
    (expected.sin().exp().sum()).backward()
    (expected.cos().tanh().sum()).backward()
    counts = []
    for regions, recomputations, grad in together(*map(job, contexts)):
        counts.append((regions, recomputations))
        assert_bitwise(expected.grad, grad, "gradient")
    assert counts == [(1, 2), (1, 1), (0, 0)]


# -- random numbers ----------------------------------------------------------------------------------------------------


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


def test_a_recomputation_waits_for_a_backward_on_another_thread() -> None:
    """Torch does so for a backward inside of sixty others, and between devices. Both recomputations set state back."""

    def once(wrap: Callable[..., Any], ran: Ran) -> list[Any]:
        seed_everything()
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        x = torch.randn(4, 8, requires_grad=True)

        def outer(x: Tensor) -> Tensor:
            h = module(x)
            z = h.detach().requires_grad_()
            y = wrap(lambda z: module(z).sin().exp())(z)
            ((slope,),) = together(lambda meet: torch.autograd.grad(y.sum(), z))
            return (h * slope).tanh()

        with observed_by(ran):
            out = wrap(outer)(x)
            return [out.detach(), *torch.autograd.grad(out.sum(), [x, *module.parameters()]), *module.buffers()]

    ran = Ran()
    assert_equal(once(lambda fn: fn, Ran()), once(reactivate.checkpoint, ran), "gradient")
    assert ran.recomputations >= 3


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


# -- a tensor that one thread may not read any more --------------------------------------------------------------------


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


def test_an_entry_is_found_by_what_it_is() -> None:
    """Hundreds of modules make hundreds of entries inside of each other: to compare what is in them took seconds."""
    assert LockEntry(frozenset) != LockEntry(frozenset)
