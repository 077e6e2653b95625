"""Rule 13: functions that catch what passes through them, and guards that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from journal import Journal
from oracle import Ran, assert_bitwise, compare, random_states
from surroundings import Failure, Trap, assert_same_gradients, assert_unchanged, gradients, prepared, surroundings
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by
from reactivate.guards import DEFAULT, ContextPair, Guard

# -- functions that catch ---------------------------------------------------------------------------------------------

fallbacks = Journal()


def falls_back(x: Tensor) -> Tensor:
    """As libraries try a fused kernel: the last tensor that the backward needs is saved inside of the `try`."""
    h = x.sin()
    try:
        return h.exp()
    except Exception:
        fallbacks.append("falls back")
        return h.exp() + 0 * h.cos()


def suppresses(x: Tensor) -> Tensor:
    h = x.sin()
    with suppress(Exception):
        return h.exp()
    fallbacks.append("suppresses")
    return h.cos()


def catches_everything(x: Tensor) -> Tensor:
    h = x.sin()
    try:
        return h.exp()
    except:  # noqa: E722 - what is tested
        return h.exp()[:2] * h.cos()[:2]


def catches_in_a_loop(x: Tensor) -> Tensor:
    h = x
    for _ in range(3):
        try:
            h = h.sin().exp()
        except BaseException:
            h = h + torch.ones(2, 2, 4).sum(0).sum(0).cos()
    return h


def drops_a_tail(x: Tensor) -> Tensor:
    """Tensors saved for the tail are dead when the recomputation comes to it, and the handler has another tail."""
    h = x.sin()
    try:
        out = h.exp()
    except BaseException:
        out, h = h, h[:1].double()
    (h.cos() * 2).exp().tanh()
    return out


CATCHING = [falls_back, suppresses, catches_everything, catches_in_a_loop, drops_a_tail]


@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"check": "every"}], ids=str)
@pytest.mark.parametrize("fn", CATCHING, ids=lambda fn: fn.__name__)
def test_a_function_that_catches_what_ends_a_recomputation(
    fn: Callable[[Tensor], Tensor], options: dict[str, Any]
) -> None:
    fallbacks.clear()

    def gradient(wrap: Any) -> Any:
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        out = wrap(fn)(x)
        before = surroundings()
        yield from torch.autograd.grad(out.sum(), x)
        assert_unchanged(before, surroundings())

    ran = compare(gradient, **options)
    assert (ran.regions, ran.recomputations) == (1, 1)
    assert not fallbacks, "`except Exception` does not catch the end of a recomputation"


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_function_that_catches_a_refusal(early_stop: bool) -> None:
    """A caught error cannot make a recomputation that differs look like one that does not."""

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        with suppress(Exception):
            h = (h[:2] if reactivate.is_recomputing() else h).exp()
        return h.cos()

    x = torch.ones(4, requires_grad=True)
    out = reactivate.checkpoint(fn, early_stop=early_stop)(x)
    with pytest.raises(reactivate.errors.RecomputeMismatchError):
        out.sum().backward()


@pytest.mark.parametrize("early_stop", [True, False])
def test_an_error_that_the_function_expects(early_stop: bool) -> None:
    """The function raises and catches in both passes."""

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        try:
            h.exp().view(-1, 3)  # four elements: a RuntimeError of torch's
        except RuntimeError:
            h = h.exp().cos()
        try:
            raise Failure
        except Failure as error:
            return h.tanh() + len(str(error))

    x = torch.linspace(0, 1, 4, requires_grad=True)
    ran = compare(lambda wrap: torch.autograd.grad(wrap(fn)(x).sum(), x), early_stop=early_stop)
    assert (ran.regions, ran.recomputations) == (1, 1)


# -- `finally` --------------------------------------------------------------------------------------------------------


def test_finally_runs_in_the_recomputation_and_may_fail() -> None:
    """Once early stop has ended the function, nothing that its `finally` raises matters."""
    seen = Journal()

    def fn(x: Tensor) -> Tensor:
        out = None
        h = x.sin()
        try:
            out = h.exp()
            return out
        finally:
            seen.append(reactivate.is_recomputing())
            assert out is not None, "the function was cut short"

    x = torch.linspace(0, 1, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    seen.clear()
    out = reactivate.checkpoint(fn, check="metadata")(x)
    before = surroundings()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_bitwise(expected, grad, "gradient")
    assert_unchanged(before, surroundings())
    assert seen == [False, True]


def test_finally_is_interrupted() -> None:
    """An interruption is never lost, not even when the recomputation had all that it needs."""
    trap = Trap()

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        try:
            return h.exp()
        finally:
            trap()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    out = reactivate.checkpoint(fn)(x)
    trap.arm(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(out.sum(), x)
    assert not reactivate.is_recomputing()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_bitwise(expected, grad, "gradient")


def test_finally_runs_an_op_on_the_way_out() -> None:
    """The op in it would save a tensor for which there is no slot."""
    norms: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        try:
            h = h.exp()
            return h.tanh()
        finally:
            norms.append((h * h).sum().sqrt().detach())

    x = torch.linspace(0, 1, 4, requires_grad=True)
    compare(lambda wrap: torch.autograd.grad(wrap(fn)(x).sum(), x))


# -- guards -----------------------------------------------------------------------------------------------------------


class Notes(Guard):
    """A guard that opens something, and tells whether it is open."""

    def __init__(self) -> None:
        self.open = 0
        self.errors: list[BaseException | None] = []

    def before(self, call: Any) -> Any:
        self.open += 1
        return "token"

    @contextmanager
    def recompute(self, snapshot: Any) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def leave(self, token: Any, error: BaseException | None) -> None:
        self.open -= 1
        self.errors.append(error)


class Faulty(Guard):
    """A guard that raises in one of its methods, as long as it is armed."""

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error
        self.is_armed = True

    def _at(self, place: str) -> None:
        if self.is_armed and place == self.where:
            raise self.error

    def before(self, call: Any) -> Any:
        self._at("before")
        return "token"

    def after(self, token: Any) -> Any:
        self._at("after")
        return token

    def recompute(self, snapshot: Any) -> Any:
        self._at("recomputation")
        return self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._at("enter")
        yield
        self._at("exit")

    def leave(self, token: Any, error: BaseException | None) -> None:
        self._at("leave")


IN_FORWARD = ["before", "after", "leave"]
IN_RECOMPUTATION = ["recomputation", "enter", "exit"]


@pytest.mark.parametrize(
    "error", [Failure("guard"), KeyboardInterrupt("guard")], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("where", IN_FORWARD + IN_RECOMPUTATION)
def test_in_a_guard(where: str, error: BaseException) -> None:
    """Guards before it and behind it are left in order, and it all works once the guard does."""
    trap, ran = Trap(), Ran()
    module, x = prepared(trap)
    plain = module(x)
    expected = gradients(plain, module, x)

    module, x = prepared(trap)
    first, faulty, last = Notes(), Faulty(where, error), Notes()
    fn = reactivate.checkpoint(module, guards=DEFAULT.adding(first, faulty, last))
    with observed_by(ran):
        if where in IN_FORWARD:
            clean = surroundings()
            with pytest.raises(type(error), match="guard") as caught:
                fn(x)
            assert caught.value is error
            after = surroundings()
            for name in clean.keys() - random_states().keys():
                assert clean[name] == after[name], name
            assert first.open == last.open == 0
            faulty.is_armed = False
            module, x = prepared(trap)
            fn = reactivate.checkpoint(module, guards=DEFAULT.adding(first, faulty, last))
        out = fn(x)
        before = surroundings(module)
        if where in IN_RECOMPUTATION:
            with pytest.raises(type(error), match="guard"):
                gradients(out, module, x)
            assert_unchanged(before, surroundings(module))
            faulty.is_armed = False
        ours = gradients(out, module, x)
    assert first.open == last.open == 0
    assert_unchanged(before, surroundings(module))
    assert_bitwise(plain.detach(), out.detach(), "output")
    assert_same_gradients(expected, ours)
    assert ran.recomputations >= 1
    assert reactivate.current_region() is None


def test_guards_are_told_of_the_error() -> None:
    notes = Notes()
    trap = Trap()

    def fn(x: Tensor) -> Tensor:
        trap()
        return x.sin()

    checkpointed = reactivate.checkpoint(fn, guards=(notes,))
    x = torch.ones(2, requires_grad=True)
    error = Failure()
    trap.arm(error)
    with pytest.raises(Failure):
        checkpointed(x)
    checkpointed(x)
    assert notes.errors == [error, None]
    assert notes.open == 0


@pytest.mark.parametrize("where", ["forward context", "function"])
def test_a_pair_of_contexts_is_left(where: str) -> None:
    """The forward context sees the error, and its own does not leave the other guards open."""
    seen: list[type[BaseException] | None] = []
    notes = Notes()

    class Forward:
        def __enter__(self) -> None: ...

        def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
            seen.append(kind)
            if where == "forward context":
                raise Failure

    def fn(x: Tensor) -> Tensor:
        if where == "function":
            raise Failure
        return x.sin()

    pair = ContextPair(lambda: (Forward(), nullcontext()))
    with pytest.raises(Failure):
        reactivate.checkpoint(fn, guards=DEFAULT.adding(notes, pair))(torch.ones(2, requires_grad=True))
    assert seen == [Failure if where == "function" else None]
    assert notes.open == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("failing_call", [1, 2], ids=["before the recomputation", "after the recomputation"])
def test_a_module_that_cannot_load_its_state(failing_call: int) -> None:
    """Its buffers, its attributes and those of its neighbours are set back all the same."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.losses, self.total = nn.BatchNorm1d(4), [], 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(1.0)
            self.total += 1
            return self.norm(x).sin().exp() * self.total

        def recompute_state(self) -> float:
            return self.total

        def load_recompute_state(self, state: float) -> None:
            attempts.append(state)
            if not len(disarmed) and len(attempts) == failing_call:
                raise Failure
            self.total = state

    attempts, disarmed = Journal(), Journal()
    torch.manual_seed(0)
    module, x = Stateful(), torch.randn(8, 4, requires_grad=True)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    expected = gradients(module(x), module, x)
    module = Stateful()
    module.load_state_dict(state)
    out = reactivate.checkpoint(module)(x)
    before = surroundings(module)
    with pytest.raises(Failure):
        gradients(out, module, x, retain_graph=True)
    assert_unchanged(before, surroundings(module))
    disarmed.append(True)
    assert_same_gradients(expected, gradients(out, module, x))
    assert_unchanged(before, surroundings(module))
