"""`dropin.transformer_engine`: its signature, on a small stand-in of the package, whose layers are those of `fp8_linear`."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from fp8_linear import State, phases
from journal import Journal
from oracle import Case, Watched, assert_same, run
from test_fp8_state import ORDERS, Block, Changing, Nested, Twice, assert_same as assert_all_same, calls, train
from torch import Tensor, nn

from reactivate import dropin
from reactivate._passes.observing import observed_by
from reactivate.errors import RecomputeMismatchError, UnsupportedError, UsageError
from reactivate.guards import DEFAULT, RngTracker

checkpoint = dropin.transformer_engine.checkpoint


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Put a package in the place of TransformerEngine that has its names; return its `distributed`."""
    names = ["", ".pytorch", ".pytorch.distributed", ".pytorch.quantization"]
    modules = {f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    theirs = modules["transformer_engine.pytorch.distributed"]

    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the package's own function")

    theirs.checkpoint = checkpoint  # type: ignore[attr-defined]
    theirs.get_activation_recompute_contexts = phases  # type: ignore[attr-defined]
    modules["transformer_engine.pytorch"].checkpoint = checkpoint  # type: ignore[attr-defined]
    modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager = State  # type: ignore[attr-defined]
    State.reset()
    yield theirs
    State.reset()


# -- the signature -----------------------------------------------------------------------------------------------------


def test_the_signature_and_its_defaults() -> None:
    parameters = inspect.signature(checkpoint).parameters
    defaults = {name: item.default for name, item in parameters.items() if item.kind is item.KEYWORD_ONLY}
    assert defaults == {
        "distribute_saved_activations": False,
        "tp_group": None,
        "get_rng_state_tracker": None,
        "use_reentrant": True,
        "context_fn": torch.utils.checkpoint.noop_context_fn,
        "determinism_check": "default",
        "debug": False,
    }
    assert [*parameters][:2] == ["function", "args"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_bitwise(use_reentrant: bool) -> None:
    def make() -> Case:
        module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8))
        return Case(module, (torch.randn(4, 8, requires_grad=True),))

    plain = run(make)
    ours = run(make, lambda fn: partial(checkpoint, fn, use_reentrant=use_reentrant))
    assert_same(plain, ours)
    assert (ours.regions, ours.recomputations) == (1, 1)
    assert ours.kept_bytes < plain.kept_bytes


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_function_that_saves_in_bulk_keyword_arguments_and_inputs_without_gradient(use_reentrant: bool) -> None:
    class Bulk(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, None, weight, x)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, _, weight, _ = ctx.saved_tensors
            assert ctx.saved_tensors[0] is not None
            return grad @ weight.t(), x.t() @ grad

    def make() -> Case:
        weight = torch.randn(8, 8, requires_grad=True)

        def fn(x: Tensor, *, scale: float, rest: dict[str, Any]) -> Any:
            return Bulk.apply(x.sin() * scale, weight).exp(), rest["mask"] * 2

        rest = {"mask": torch.rand(4, 8)}
        return Case(fn, (torch.randn(4, 8),), {"scale": 0.5, "rest": rest}, leaves={"weight": weight})

    plain = run(make)
    ours = run(make, lambda fn: partial(checkpoint, fn, use_reentrant=use_reentrant))
    assert_same(plain, ours)
    assert (ours.regions, ours.recomputations) == (1, 1)


def test_without_a_gradient_it_is_the_plain_call() -> None:
    ran = Watched()
    with torch.no_grad(), observed_by(ran):
        assert torch.equal(checkpoint(torch.sin, torch.ones(2)), torch.ones(2).sin())
    assert ran.regions == 0


# -- 8-bit layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [Block, Changing, Twice, Nested])
def test_layers(kind: type[Block], order: str, use_reentrant: bool, package: ModuleType) -> None:
    """With the package's own pair of contexts, whose queue is in the right order for one of the orders alone."""
    pair = {} if use_reentrant else {"context_fn": package.get_activation_recompute_contexts}
    run_layers = partial(train, kind, order=ORDERS[order], around=kind is not Changing)
    plain, _ = run_layers(lambda fn: fn)
    ours, ran = run_layers(lambda fn: partial(checkpoint, fn, use_reentrant=use_reentrant, **pair))
    assert_all_same(plain, ours)
    assert ran.recomputations >= calls(ORDERS[order])
    assert State.queues == []


@pytest.mark.parametrize("order", ORDERS)
def test_its_pair_of_contexts_in_the_drop_in_for_torch(order: str, package: ModuleType) -> None:
    pair = package.get_activation_recompute_contexts
    plain, _ = train(Changing, lambda fn: fn, ORDERS[order], around=False)
    run_torchs = partial(dropin.torch.checkpoint, use_reentrant=False, context_fn=pair)
    ours, ran = train(Changing, lambda fn: partial(run_torchs, fn), ORDERS[order], around=False)
    assert_all_same(plain, ours)
    assert ran.recomputations == calls(ORDERS[order])


def test_the_autocast_of_the_forward_holds_where_no_walk_finds_it(package: ModuleType) -> None:
    state: Any = Journal()  # which no recomputation rewinds
    state.append((False, "none"))
    seen = Journal()

    class Manager:
        @staticmethod
        def get_autocast_state() -> Any:
            return state[-1]

        @staticmethod
        def set_autocast_state(value: Any) -> None:
            state.append(value)

    sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager = Manager  # type: ignore[attr-defined]

    def fn(x: Tensor) -> Tensor:
        seen.append(state[-1])
        return x.sin().exp()

    state.append((True, "delayed"))
    out = checkpoint(fn, torch.ones(2, requires_grad=True)).sum()
    state.append((False, "none"))
    out.backward()
    assert seen == [(True, "delayed")] * 2
    assert state[-1] == (False, "none")


def test_a_manager_without_these_methods_is_refused(package: ModuleType) -> None:
    sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager = object  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="has none of get_autocast_state"):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True))


# -- the other options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_tracker_of_named_streams(use_reentrant: bool) -> None:
    gradients = []
    for is_checkpointed in (False, True):
        tracker = RngTracker()
        tracker.add("model-parallel-rng", seed=3)

        def fn(x: Tensor, tracker: RngTracker = tracker) -> Tensor:
            with tracker.fork("model-parallel-rng"):
                return nn.functional.dropout(x).sin() * torch.rand(4)

        def get(tracker: RngTracker = tracker) -> RngTracker:
            return tracker

        x = torch.ones(4, requires_grad=True)
        call = (
            partial(checkpoint, fn, get_rng_state_tracker=get, use_reentrant=use_reentrant) if is_checkpointed else fn
        )
        outs = [call(x * scale).sum() for scale in (1, 2)]
        for out in reversed(outs):
            out.backward()
        gradients.append([x.grad, tracker.get_states()["model-parallel-rng"]["cpu"]])
        gone = weakref.ref(tracker)
        del tracker, fn, get, call, outs, out
        assert gone() is None
    for one, other in zip(*gradients):
        assert torch.equal(one, other)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_contexts_of_the_users(use_reentrant: bool) -> None:
    entered = Journal()

    class Note:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *error: object) -> None:
            pass

    x = torch.ones(2, requires_grad=True)
    out = checkpoint(torch.sin, x, use_reentrant=use_reentrant, context_fn=lambda: (Note("one"), Note("two")))
    out.sum().backward()
    assert entered == ["one", "two"]


def test_debug_and_determinism_check() -> None:
    flips = Journal()

    def fn(x: Tensor) -> Tensor:
        flips.append(0)
        return (x.sin() if len(flips) % 2 else x[:1].cos().expand(2)).exp()

    for options in ({"debug": True}, {}):
        flips.clear()
        out = checkpoint(fn, torch.ones(2, requires_grad=True), **options).sum()
        with pytest.raises(RecomputeMismatchError):
            out.backward()
    with pytest.raises(UsageError, match="determinism_check should be one of"):
        checkpoint(fn, torch.ones(2, requires_grad=True), determinism_check="sometimes")


def test_nothing_to_distribute() -> None:
    """The cases of what is distributed: `sharded_cases`."""
    with pytest.raises(UsageError, match="got no arguments"):
        checkpoint(torch.ones, distribute_saved_activations=True)
    with pytest.raises(UsageError, match="init_process_group"):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True), distribute_saved_activations=True)


# -- install -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("whole_heap")
def test_install_replaces_the_function_wherever_it_is_bound(package: ModuleType) -> None:
    theirs = package.checkpoint
    imported = {"checkpoint": theirs}
    ran = Watched()
    with dropin.transformer_engine.install() as handle:
        assert imported["checkpoint"] is package.checkpoint is sys.modules["transformer_engine.pytorch"].checkpoint  # type: ignore[attr-defined]
        assert dropin.transformer_engine.install() is handle
        with pytest.raises(UsageError, match="installed already, with guards="):
            dropin.transformer_engine.install(guards=DEFAULT.without("rng"))
        with observed_by(ran):
            imported["checkpoint"](torch.sin, torch.ones(2, requires_grad=True)).sum().backward()
        assert "installed" in repr(handle) and handle.regions == 1
    assert ran.recomputations == 1
    assert imported["checkpoint"].__module__ == theirs.__module__
    with pytest.raises(AssertionError, match="own function"):
        package.checkpoint(torch.sin)
    with pytest.raises(UsageError, match="taken back already"):
        handle.remove()


def test_install_without_the_package_is_refused() -> None:
    if "transformer_engine" not in sys.modules:
        with pytest.raises(UsageError, match="cannot be imported"):
            dropin.transformer_engine.install()
