"""Rule 14: a backward on another thread than its forward, and two of them on one graph, get the gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meeting_threads import (
    PATIENCE_SECONDS,
    SETTINGS,
    Meet,
    assert_equal,
    changing_threads_often,
    setting,
    together,
)
from oracle import Ran, seed_everything
from surroundings import assert_unchanged, surroundings
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by
from reactivate.guards import DEFAULT


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
