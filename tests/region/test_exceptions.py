"""Rule 13: after an exception everything is as it was, and the same backward can be tried again."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from memory import without_collector
from oracle import Ran, assert_bitwise, random_states, seed_everything
from surroundings import (
    Counted,
    Failure,
    Kept,
    SinIsCos,
    Trap,
    around_the_forward,
    assert_same_gradients,
    assert_unchanged,
    gradients,
    prepared,
    surroundings,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate._torch.autograd import innermost_pack_hook


class Interruption(BaseException):
    """One that `except Exception` does not catch."""


ERRORS: list[type[BaseException]] = [Failure, KeyboardInterrupt, SystemExit, Interruption, MemoryError]


# -- in the forward pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("determinism", ["metadata", "every"])
@pytest.mark.parametrize("error", ERRORS)
def test_in_the_forward(error: type[BaseException], determinism: Any) -> None:
    """Nothing else stays behind than the same code leaves without a checkpoint; the next call is right."""

    def once(wrap: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any], list[Tensor]]:
        trap = Trap()
        module, x = prepared(trap)
        fn = wrap(module)
        trap.arm(error("armed"))
        with around_the_forward():
            with pytest.raises(error, match="armed") as caught:
                fn(x)
            assert caught.value is trap.error, "the very exception, not another one"
            left = random_states() | {name: buffer.clone() for name, buffer in module.named_buffers()}
            left |= {"training": module.norm.training, "losses": list(module.losses)}
            module.norm.train()
            inside = surroundings()
            out = fn(x)
        inside.pop("saved-tensor hooks")
        inside.pop("modes")
        return left, inside, [out.detach(), *gradients(out, module, x)]

    ran = Ran()
    plain = once(lambda fn: fn)
    outside = surroundings()
    with observed_by(ran):
        ours = once(lambda fn: reactivate.checkpoint(fn, check=determinism))
    after = surroundings()
    assert (ran.regions, ran.recomputations) == (1, 1), "only a forward pass that came to its end makes a region"
    for one, other in zip(plain[:2], ours[:2]):
        assert_unchanged(one, other)
    assert_same_gradients(plain[2], ours[2])
    for name in ("saved-tensor hooks", "modes", "grad mode", "recomputing", "autocast"):
        assert outside[name] == after[name], name


def test_a_failed_forward_leaves_nothing_alive() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def fn(x: Tensor) -> Tensor:
        h = x.sin().exp()
        alive.append(weakref.ref(h))
        raise Failure

    with without_collector():
        x = torch.ones(4, requires_grad=True)
        with suppress(Failure):
            reactivate.checkpoint(fn)(x)
        assert alive[0]() is None


# -- in the recomputation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [nullcontext, around_the_forward])
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"check": "every"}], ids=str)
@pytest.mark.parametrize("error", ERRORS)
def test_in_the_recomputation(
    error: type[BaseException], options: dict[str, Any], settings: Callable[[], AbstractContextManager[None]]
) -> None:
    """Three times in a row; then the same backward gives the gradients of the plain module."""
    trap, ran = Trap(), Ran()
    module, x = prepared(trap)
    with settings(), Kept() as kept_plain:
        plain = module(x)
    expected = gradients(plain, module, x)

    module, x = prepared(trap)
    with observed_by(ran):
        with settings(), Kept() as kept:
            out = reactivate.checkpoint(module, **options)(x)
        assert_bitwise(plain.detach(), out.detach(), "output")
        trap.arm(error("armed"), times=3)
        before = surroundings(module)
        for _ in range(3):
            with pytest.raises(error, match="armed") as caught:
                gradients(out, module, x)
            assert caught.value is trap.error
            del caught
            assert_unchanged(before, surroundings(module))
        ours = gradients(out, module, x)
    assert_unchanged(before, surroundings(module))
    assert_same_gradients(expected, ours)
    assert (ran.regions, ran.recomputations) == (1, 1), "a recomputation that failed is none"
    assert kept.kept_bytes < kept_plain.kept_bytes


def test_a_failed_recomputation_keeps_nothing() -> None:
    """The tensors that it had computed by then go, although the graph and its slots stay."""
    made, trap = Journal(), Trap()

    def fn(x: Tensor) -> Tensor:
        h = x.sin().exp()
        made.append(weakref.ref(h.untyped_storage()))  # type: ignore[arg-type]
        out = h.cos().exp()
        trap()
        return out.tanh()

    x = torch.ones(4, requires_grad=True)
    out = reactivate.checkpoint(fn)(x)
    trap.arm(Failure())
    with suppress(Failure):
        out.backward(torch.ones_like(out))
    trap.error = None  # its traceback holds the frames
    assert len(made) == 2, "the recomputation came that far"
    assert made[1]() is None
    out.backward(torch.ones_like(out))
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().cos().exp().tanh().sum(), x)[0])


def test_the_second_of_two_regions_fails() -> None:
    """The first has had its recomputation in the same backward, and has another one in the next."""

    def once(wrap: Callable[..., Any], ran: Ran, *, fails: bool) -> list[Tensor]:
        trap = Trap()
        seed_everything()
        weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]

        def first(x: Tensor) -> Tensor:
            h = F.dropout(x @ weights[0]).sin()
            trap()
            return h.exp()

        x = torch.randn(4, 8, requires_grad=True)
        with observed_by(ran):
            out = wrap(lambda h: F.dropout(h.tanh() @ weights[1]).exp())(wrap(first)(x))
            if fails:
                trap.arm(Failure())
                before = surroundings()
                with pytest.raises(Failure):
                    out.backward(torch.ones_like(out), retain_graph=True)
                assert_unchanged(before, surroundings())
                assert x.grad is None
                weights[1].grad = None  # the first region had come to its end
            out.backward(torch.ones_like(out))
        return [out.detach(), x.grad, weights[0].grad, weights[1].grad]

    ran = Ran()
    plain = once(lambda fn: fn, Ran(), fails=False)
    ours = once(reactivate.checkpoint, ran, fails=True)
    assert_same_gradients(plain, ours)
    assert (ran.regions, ran.recomputations) == (2, 3)


@pytest.mark.parametrize("pass_that_fails", [2, 3], ids=["outer recomputation", "inner recomputation"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_in_a_nested_region(pass_that_fails: int, early_stop: bool) -> None:
    """The inner function runs in the forward, in the outer region's recomputation, and in its own."""
    trap, ran = Trap(), Ran()
    calls = Journal()

    def once(wrap: Callable[..., Any], error: BaseException | None) -> list[Tensor]:
        calls.clear()
        module, x = prepared(trap)

        def inner(x: Tensor) -> Tensor:
            calls.append("inner")
            h = F.dropout(module(x)).exp()
            if len(calls) == pass_that_fails and error is not None:
                raise error
            return (h * 2).tanh()

        out = wrap(lambda x: wrap(inner)(x.sin()).exp() * module(x))(x)
        before = surroundings(module)
        if error is not None:
            with pytest.raises(type(error), match="in the middle"):
                gradients(out, module, x, retain_graph=True)
            assert len(calls) == pass_that_fails
            assert_unchanged(before, surroundings(module))
        result = [out.detach(), *gradients(out, module, x)]
        assert_unchanged(before, surroundings(module))
        return result

    plain = once(lambda fn: fn, None)
    for error in (Failure("in the middle"), KeyboardInterrupt("in the middle")):
        with observed_by(ran):
            ours = once(lambda fn: reactivate.checkpoint(fn, early_stop=early_stop), error)
        assert_same_gradients(plain, ours)
    assert ran.recomputations >= 4, "both regions were recomputed for both errors"


# -- modules with hooks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["pre-hook", "forward", "hook"])
@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
def test_a_module_with_hooks(where: str, error: type[BaseException]) -> None:
    """The region takes the place of `forward` while the hooks run, and not longer."""

    def trip(place: str) -> None:
        if is_armed and place == where:
            raise error

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            trip("forward")
            return self.linear(x).sin().exp()

    is_armed, ran = True, Ran()
    module = Block()
    module.register_forward_pre_hook(lambda *_: trip("pre-hook"))
    module.register_forward_hook(lambda *_: trip("hook"))
    x = torch.randn(2, 4, requires_grad=True)
    before = surroundings(module)
    with pytest.raises(error):
        reactivate.checkpoint(module)(x)
    assert_unchanged(before, surroundings(module))
    is_armed = False
    expected = gradients(module(x), module, x)
    with observed_by(ran):
        ours = gradients(reactivate.checkpoint(module)(x), module, x)
    assert_same_gradients(expected, ours)
    assert (ran.regions, ran.recomputations) == (1, 1)
    assert_unchanged(before, surroundings(module))


# -- around a backward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.enable_grad, torch.autograd.graph.save_on_cpu, SinIsCos, Counted]
)
def test_in_a_recomputation_under_other_contexts(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Contexts around the backward are still around it after the failure."""
    trap = Trap()
    module, x = prepared(trap)
    expected = gradients(module(x), module, x)
    module, x = prepared(trap)
    out = reactivate.checkpoint(module)(x)
    outside = surroundings(module)
    cotangent = torch.ones_like(out)
    leaves = [x, *module.parameters()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(context())
        trap.arm(Failure())
        before = surroundings(module)
        with pytest.raises(Failure):
            torch.autograd.grad(out, leaves, cotangent)
        assert_unchanged(before, surroundings(module))
        ours = list(torch.autograd.grad(out, leaves, cotangent))
        assert_unchanged(before, surroundings(module))
    assert_unchanged(outside, surroundings(module))
    assert_same_gradients(expected, ours)


@pytest.mark.unfenced(reason="the node of an output is its exit")
def test_a_recomputation_outside_of_a_backward() -> None:
    """Somebody looks at what a node has saved, under `no_grad`."""
    trap = Trap()

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        trap()
        assert torch.is_grad_enabled()
        return h.exp()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    out = reactivate.checkpoint(fn)(x)
    with torch.no_grad():
        before = surroundings()
        trap.arm(Failure())
        with pytest.raises(Failure):
            out.grad_fn._saved_result  # type: ignore[union-attr]
        assert_unchanged(before, surroundings())
        assert_bitwise(out.grad_fn._saved_result.detach(), x.sin().exp(), "saved")  # type: ignore[union-attr]
        assert_unchanged(before, surroundings())


def test_shared_recompute_ends_by_an_error() -> None:
    """The next one can be entered, and shares nothing with it."""
    trap, ran = Trap(), Ran()

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin().exp()
        trap()
        return first, x.cos().tanh()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    with observed_by(ran):
        first, second = reactivate.checkpoint(fn)(x)
        trap.arm(Failure())
        with pytest.raises(Failure), reactivate.shared_recompute():
            first.sum().backward(retain_graph=True)
        with reactivate.shared_recompute():
            first.sum().backward(retain_graph=True)
            second.sum().backward()
    expected = torch.autograd.grad(x.sin().exp().sum(), x)[0] + torch.autograd.grad(x.cos().tanh().sum(), x)[0]
    assert torch.equal(x.grad, expected)
    assert (ran.regions, ran.recomputations) == (1, 1)


# -- through torch's own checkpoint -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "recomputation", "saved call"])
def test_an_error_goes_through_torchs_checkpoint_inside(where: str) -> None:
    """torch 2.9 leaves the hooks of a checkpoint to whoever collects the traceback: they would take ours with them."""
    calls = 0

    def fails(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        h = x.sin().exp()
        if where != "recomputation" or calls == 2:
            raise Failure
        return h.sin()

    def inner(x: Tensor) -> Tensor:
        return checkpoint(fails, x, use_reentrant=False)

    def function(x: Tensor) -> Tensor:
        return (reactivate.site(inner, name="inner")(x.cos()) if where == "saved call" else inner(x.cos())).exp()

    policy = policies.save_names("inner") if where == "saved call" else None
    x = torch.linspace(0, 1, 6, requires_grad=True)
    hooks_before = innermost_pack_hook()
    with pytest.raises(Failure) as caught:
        reactivate.checkpoint(function, policy=policy, early_stop=where != "recomputation")(x).sum().backward()
    assert innermost_pack_hook() is hooks_before
    seen: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        del caught  # which held the traceback
        gc.collect()
        x.sin().exp()
    assert len(seen) == 2, "the hooks of a user are there to the end"
