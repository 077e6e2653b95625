"""Options of `dropin.torch.checkpoint`, one by one: each means what it means in `torch.utils.checkpoint`."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as upstream
from dropin_cases import VARIANTS, Wrap, chain, check, leaf, one_block, wrapped
from journal import Journal
from oracle import Case, Ran, assert_bitwise, assert_same, run
from several import each
from torch import Tensor, nn

from reactivate._passes.observing import observed_by
from reactivate.dropin import torch as ours
from reactivate.errors import RecomputeMismatchError

# -- use_reentrant ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
def test_without_use_reentrant_there_is_torchs_warning(name: str) -> None:
    """The warning begins as torch's does, comes once, and points at the caller; what runs is the same."""

    def call(engine: Any) -> Wrap:
        arguments: tuple[Any, ...] = () if name == "checkpoint" else (2,)
        return lambda fn: lambda x: getattr(engine, name)(fn, *arguments, x)

    found = []
    for engine in (upstream, ours):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(chain, call(engine))
        found.append([(entry.category, str(entry.message)[:70]) for entry in caught])
    assert found[0] == found[1] != []
    assert [entry.filename for entry in caught] == [__file__]
    with pytest.warns(UserWarning, match="passed explicitly"):
        check(chain, call(ours))


@each(
    "options",
    [
        {"use_reentrant": True, "context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())},
        {"use_reentrant": True, "debug": True},
        {"determinism_check": "values"},
        {"debug": True, "context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())},
    ],
    ids=lambda options: "-".join(options),
)
@each("grad", [True, False])
def test_options_that_torch_refuses(options: dict[str, Any], grad: bool) -> None:
    """In the same words, and also where nothing is differentiated; since torch 2.14 there is one option more."""
    messages = []
    for engine in (upstream, ours):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"\w") as caught:
            wrapped(engine, **options)(torch.sin)(leaf(3))
        words = str(caught.value).replace("`debug`, or `respect_saved_tensors_hooks`", "or `debug`")
        messages.append(words.replace("`, or", "` or").replace("'", "").rstrip("."))
    assert messages[0] == messages[1]


def test_reentrant_without_its_limits() -> None:
    """Keyword arguments, nested inputs that need no gradient beside parameters that do, `torch.autograd.grad`."""

    def make() -> Case:
        module = nn.Linear(8, 8)

        def fn(x: Tensor, *, rest: list[Tensor]) -> dict[str, Tensor]:
            return {"y": (module(x) * rest[0]).sin().exp(), "x": x}

        return Case(fn, (torch.randn(4, 8),), {"rest": [leaf(4, 8)]}, modules=[module])

    def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> Any:
        return torch.autograd.grad([output.sum() for output in outputs], list(inputs.values()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's "None of the inputs have requires_grad=True" would be wrong here
        plain, reentrant = run(make, None, backward), run(make, wrapped(use_reentrant=True), backward)
    assert_same(plain, reentrant)
    assert (reentrant.regions, reentrant.recomputations) == (1, 1)
    assert reentrant.kept_bytes < plain.kept_bytes


@VARIANTS
def test_without_grad_it_is_the_plain_call(use_reentrant: bool) -> None:
    ran = Ran()
    with observed_by(ran), torch.no_grad():
        wrapped(use_reentrant=use_reentrant)(torch.sin)(leaf(3))
    assert ran.regions == 0


# -- context_fn ------------------------------------------------------------------------------------------------------


class Noting(contextlib.AbstractContextManager[None]):
    """Writes down when it is entered and left."""

    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name = events, name

    def __enter__(self) -> None:
        self.events.append(f"{self.name} begins")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.events.append(f"{self.name} ends" if kind is None else f"{self.name} fails: {kind.__name__}")


def noting(events: list[str]) -> Callable[[], Any]:
    return lambda: (Noting(events, "forward"), Noting(events, "recomputation"))


def test_context_fn() -> None:
    """Its first context is around the forward pass, its second around each recomputation."""
    events: list[str] = []
    check(one_block, wrapped(context_fn=noting(events)))
    forward, recomputation = ["forward begins", "forward ends"], ["recomputation begins", "recomputation ends"]
    assert [event.replace("fails: RecomputationComplete", "ends") for event in events] == forward + recomputation

    events.clear()
    y = wrapped(context_fn=noting(events), early_stop=False)(lambda x: x.sin().exp())(leaf(3))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert events == forward + 2 * recomputation


def test_context_fn_and_an_exception_in_the_forward_pass() -> None:
    events: list[str] = []

    def fn(x: Tensor) -> Tensor:
        raise KeyError

    with pytest.raises(KeyError):
        wrapped(context_fn=noting(events))(fn)(leaf(3))
    assert events == ["forward begins", "forward fails: KeyError"]


def test_context_fn_is_not_entered_without_grad() -> None:
    events: list[str] = []
    with torch.no_grad():
        wrapped(context_fn=noting(events))(torch.sin)(leaf(3))
    assert events == []


# -- determinism_check and debug -------------------------------------------------------------------------------------


class Unsteady:
    """A function that does something else from its second call on. Each object is a function of its own."""

    def __init__(self, difference: Callable[[Tensor], Tensor]) -> None:
        self.calls, self.difference = Journal(), difference

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(None)
        y = x.sin()
        return (y if len(self.calls) == 1 else self.difference(y)).exp()


DIFFERENCES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "shape": (lambda y: y[:1], "have different metadata"),
    "dtype": (lambda y: y.double(), "have different metadata"),
    "fewer": (lambda y: y.detach(), "A different number of tensors was saved"),
    "more": (lambda y: y.cos().sin().tanh(), "trying to save more tensors during recomputation"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_determinism_check(name: str) -> None:
    """By default what differs is refused, in an error of torch's type with torch's words, and of ours."""
    difference, words = DIFFERENCES[name]
    for engine in (upstream, ours):
        y = wrapped(engine, early_stop=False)(Unsteady(difference))(leaf(3))
        with pytest.raises(upstream.CheckpointError, match=words) as caught:
            y.sum().backward()
    assert type(caught.value) is RecomputeMismatchError, "as a traceback calls it"
    assert caught.value.kind in (name, "metadata")
    copied = pickle.loads(pickle.dumps(caught.value))  # as it comes out of another process
    assert (type(copied), copied.kind, str(copied)) == (type(caught.value), caught.value.kind, str(caught.value))
    assert "`debug=True` names the first op that differs" in str(caught.value), "the remedy, as it is called here"


def test_determinism_check_none() -> None:
    """Metadata are not compared, so the gradient is that of what the recomputation did; the number of tensors still is."""
    gradients = []
    for engine in (upstream, ours):
        x = torch.linspace(0, 1, 3).requires_grad_()
        wrapped(engine, determinism_check="none")(Unsteady(DIFFERENCES["dtype"][0]))(x).sum().backward()
        gradients.append(x.grad)
    assert_bitwise(*gradients, "gradient")
    y = wrapped(determinism_check="none")(Unsteady(DIFFERENCES["fewer"][0]))(leaf(3))
    with pytest.raises(upstream.CheckpointError, match=DIFFERENCES["fewer"][1]):
        y.sum().backward()
    check(one_block, wrapped(determinism_check="none"))


def test_debug_names_the_first_op() -> None:
    """With the ops of both passes around it, and the line that called it."""
    line = inspect.getsourcelines(Unsteady)[1] + 9
    y = wrapped(debug=True)(Unsteady(lambda y: y.mul(1.0)))(leaf(3))
    with pytest.raises(upstream.CheckpointError, match="Op 2 is the first that differs") as caught:
        y.sum().backward()
    forward, recomputation = str(caught.value).split("forward:")[1].split("recomputation:")
    assert "aten.sin" in forward.splitlines()[1]
    assert "->    2 aten.exp" in forward
    assert f"{__file__}:{line}" in forward
    assert "aten.sin" in recomputation.splitlines()[1]
    assert "->    2 aten.mul" in recomputation
    assert "because you passed `debug=True`" in recomputation


def test_debug_where_nothing_differs() -> None:
    check(one_block, wrapped(debug=True))


@pytest.mark.parametrize(
    ("override", "debug", "is_found"),
    [(True, False, True), (False, True, False), (None, True, True), (None, False, False)],
)
def test_set_checkpoint_debug_enabled(override: bool | None, debug: bool, is_found: bool) -> None:
    """The context decides for the forward passes inside of it; None leaves it to `debug`. Only with it the op is named."""
    with ours.set_checkpoint_debug_enabled(override):
        y = wrapped(debug=debug)(Unsteady(lambda y: y * 2))(leaf(3))
    with pytest.raises(upstream.CheckpointError, match="different values|Op 2") as caught:
        y.sum().backward()
    assert ("Op 2 is the first that differs" in str(caught.value)) == is_found


# -- early_stop ------------------------------------------------------------------------------------------------------


def ends_in_recomputations(override: Any = None, **options: Any) -> int:
    """Return how often a function came to its end, beyond what its backward needs, in a recomputation.

    The first call, the second, the fourth and so on run to their ends again, to be compared; each third is none of these.
    """
    ends = Journal()

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        ends.append(None)
        return y

    with override or contextlib.nullcontext():
        for _ in range(3):
            ends.clear()
            ran = Ran()
            with observed_by(ran):
                y = wrapped(**options)(fn)(leaf(3))
                y.sum().backward()
            assert (ran.regions, ran.recomputations) == (1, 1)
    return len(ends) - 1


@VARIANTS
@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop(early_stop: bool, use_reentrant: bool) -> None:
    assert ends_in_recomputations(early_stop=early_stop, use_reentrant=use_reentrant) == (not early_stop)
    check(one_block, wrapped(early_stop=early_stop, use_reentrant=use_reentrant))


def test_set_checkpoint_early_stop() -> None:
    """The context decides for the forward passes inside of it; None leaves it to `early_stop`."""
    set_to = ours.set_checkpoint_early_stop
    assert ends_in_recomputations(set_to(False), early_stop=True) == 1
    assert ends_in_recomputations(set_to(True), early_stop=False) == 0
    assert ends_in_recomputations(set_to(None), early_stop=False) == 1
    with set_to(False):
        with pytest.raises(KeyError), set_to(True):
            raise KeyError
        assert ends_in_recomputations() == 1, "as it was before the inner one"
    assert ends_in_recomputations() == 0


# -- preserve_rng_state ----------------------------------------------------------------------------------------------


@VARIANTS
def test_preserve_rng_state(use_reentrant: bool) -> None:
    """Without it a recomputation draws new numbers, as torch's does: the same ones, and the stream moves on as far."""

    def make() -> Case:
        return Case(lambda x: (x.sin() * torch.rand(64)).exp().sin(), (leaf(64),))

    check(make, wrapped(use_reentrant=use_reentrant, preserve_rng_state=True))
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": False}
    theirs, new = run(make, wrapped(upstream, **options)), run(make, wrapped(**options))
    assert_same(theirs, new)
    assert new.recomputations == 1
    plain = run(make)
    assert not torch.equal(plain.gradients["input 0"], new.gradients["input 0"])
    assert not torch.equal(plain.state["torch"], new.state["torch"])


def test_other_state_is_preserved_without_the_rng() -> None:
    def make() -> Case:
        return Case(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU()), (leaf(8, 16),))

    check(make, wrapped(preserve_rng_state=False))
