"""Installations of the drop-in: when one is there, when it is taken back, and what is refused."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as upstream
from install_cases import block, check_runs_here, with_checkpoint
from oracle import Case, Ran, assert_same, backward_once, run
from torch import Tensor
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from reactivate import dropin
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, Guard
from reactivate.storage import Host

pytestmark = pytest.mark.usefixtures("whole_heap")


def test_a_second_installation_is_the_first() -> None:
    original = upstream.checkpoint
    handle = dropin.install(guards=DEFAULT.without("rng"), storage=Host(least_bytes=0))
    installed = upstream.checkpoint
    assert dropin.install() is handle  # as a cell of a notebook that runs again
    assert dropin.install(guards=DEFAULT.without("rng"), storage=Host(least_bytes=0)) is handle
    assert upstream.checkpoint is installed and dropin.is_installed()
    with dropin.install() as again:
        with dropin.install():
            assert again is handle
        assert upstream.checkpoint is installed
    assert upstream.checkpoint is installed  # as before the `with`
    handle.remove()
    assert upstream.checkpoint is original and not dropin.is_installed()
    with dropin.install() as other:
        assert other is not handle
    assert upstream.checkpoint is original


@pytest.mark.parametrize(("name", "value"), [("guards", DEFAULT.without("rng")), ("storage", Host(least_bytes=0))])
def test_a_second_installation_with_other_settings_is_refused(name: str, value: Any) -> None:
    with dropin.install():
        installed = upstream.checkpoint
        with pytest.raises(UsageError, match=f"installed already, with {name}=.*call remove"):
            dropin.install(**{name: value})
        assert upstream.checkpoint is installed
    assert not dropin.is_installed()


def test_uninstall() -> None:
    original = upstream.checkpoint
    dropin.uninstall()  # nothing to do
    dropin.install()
    dropin.uninstall()
    assert upstream.checkpoint is original is checkpoint
    with dropin.install() as installation:
        dropin.uninstall()
        assert upstream.checkpoint is original and "taken back" in repr(installation)
    assert not dropin.is_installed()


def test_it_counts_the_regions_that_run_through_it() -> None:
    x = torch.ones(4, requires_grad=True)
    with dropin.install() as installation:
        assert installation.regions == 0
        for use_reentrant in (False, True):
            checkpoint(torch.sin, x, use_reentrant=use_reentrant).sum().backward()
        with torch.no_grad():
            checkpoint(torch.sin, x, use_reentrant=False)  # keeps nothing anyway
        checkpoint_sequential([torch.sin, torch.exp, torch.cos], 3, x, use_reentrant=False)
        composable(block())(torch.randn(8, 16, requires_grad=True))
        dropin.torch.checkpoint(torch.sin, x, use_reentrant=False)  # through no installation
        assert installation.regions == 5
    checkpoint(torch.sin, x, use_reentrant=False)
    assert installation.regions == 5 and "5 regions ran" in repr(installation)
    with dropin.install() as other:
        assert other.regions == 0


def test_taking_it_back_twice_is_refused() -> None:
    installation = dropin.install()
    installation.remove()
    original = upstream.checkpoint
    with pytest.raises(UsageError, match="taken back already"):
        installation.remove()
    with dropin.install(), pytest.raises(UsageError, match="taken back already"):
        installation.remove()
    assert upstream.checkpoint is original


def test_references_that_are_hidden_are_refused() -> None:
    """The collector does not look at frozen objects, so that nothing would be found."""
    original = upstream.checkpoint
    gc.freeze()
    try:
        with pytest.raises(UsageError, match="gc.unfreeze"):
            dropin.install()
    finally:
        gc.unfreeze()
    assert upstream.checkpoint is original is checkpoint
    with dropin.install():
        check_runs_here(checkpoint_wrapper)


def test_an_exception_takes_it_back() -> None:
    original = upstream.checkpoint
    with pytest.raises(KeyError), dropin.install():
        raise KeyError
    assert upstream.checkpoint is original is checkpoint


def test_guards_reach_the_regions() -> None:
    """List the messages of every way into the engine, and of no other installation."""

    class Count(Guard):
        name = "count"
        events: tuple[str, ...] = ()

        def before(self, call: Any) -> Any:
            self.events += ("before",)
            return self

        def recompute(self, snapshot: Any) -> Any:
            self.events += ("recomputation",)

    guard = Count()
    with dropin.install(guards=DEFAULT.adding(guard)):
        for wrap in (checkpoint_wrapper, composable, with_checkpoint(lambda: checkpoint)):
            check_runs_here(wrap)
            assert guard.events == ("before", "recomputation")
            guard.events = ()
    with dropin.install():
        check_runs_here(checkpoint_wrapper)
    assert guard.events == ()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_regions_keep_their_engine(use_reentrant: bool) -> None:
    """A graph that is there when it is installed, and when it is taken back, goes on as it began."""

    def across(installation: Callable[[], Any], other: Callable[[], Any]) -> Ran:
        def wrap(fn: Any) -> Any:
            def wrapped(x: Tensor) -> Tensor:
                with installation():
                    return checkpoint(fn, x, use_reentrant=use_reentrant)

            return wrapped

        def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
            with other():
                backward_once(outputs, inputs)

        def make() -> Case:
            return Case(lambda x: (x.sin() * torch.rand(8)).exp().tanh(), (torch.randn(4, 8, requires_grad=True),))

        plain, checkpointed = run(make), run(make, wrap, backward)
        assert_same(plain, checkpointed)
        assert checkpointed.kept_bytes < plain.kept_bytes
        return checkpointed

    theirs = across(contextlib.nullcontext, dropin.install)
    assert (theirs.regions, theirs.recomputations) == (0, 0)
    ours = across(dropin.install, contextlib.nullcontext)
    assert (ours.regions, ours.recomputations) == (1, 1)
