"""Named streams of random numbers: those of `RngTracker`, and trackers of Megatron's and TransformerEngine's kind."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from oracle import assert_bitwise
from ranks import errors_of, listed
from several import each
from streams_cases import CASES
from torch import Tensor
from tracker_of_megatron import CpuRngStatesTracker, GraphSafeTracker

import reactivate
from reactivate import policies
from reactivate._snapshot.generators import python_stream, torch_stream
from reactivate._snapshot.random_streams import STREAMS
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, ContextPair, RngTracker, TrackerGuard, tensor_parallel_seeds

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.mark.parametrize("name", listed(CASES))
def test_on_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    errors = errors_of("streams_cases", name, tmp_path_factory)
    assert not errors, "\n".join(errors)


# -- dropout in and around forks and regions -----------------------------------------------------------------------------


def drop(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5).exp()


def outside_and_inside(tracker: Any, wrap: Wrap) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        h = drop(x)
        with tracker.fork("a"):
            h = drop(h)
        with tracker.fork("b"):
            h = drop(h)
        with tracker.fork("a"):
            h = drop(h)
        return drop(h)

    return wrap(fn)


def region_inside_of_a_fork(tracker: Any, wrap: Wrap) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        h = drop(x)
        with tracker.fork("b"):
            h = drop(h)
        return drop(h)

    def around(x: Tensor) -> Tensor:
        with tracker.fork("a"):
            h = wrap(fn)(drop(x))
            return drop(wrap(fn)(h))

    return around


def fork_inside_of_a_fork_and_back(tracker: Any, wrap: Wrap) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        with tracker.fork("a"):
            h = drop(x)
            with tracker.fork("b"):
                h = drop(h)
                with tracker.fork("a"):
                    h = drop(h)
                h = drop(h)
            return drop(h)

    return wrap(fn)


def the_stream_of_the_fork_around(tracker: Any, wrap: Wrap) -> Callable[[Tensor], Tensor]:
    """The region forks the stream that it is called in: it goes on with that."""

    def fn(x: Tensor) -> Tensor:
        with tracker.fork("a"):
            return drop(drop(x))

    def around(x: Tensor) -> Tensor:
        with tracker.fork("a"):
            return wrap(fn)(drop(x))

    return around


def region_in_a_region(tracker: Any, wrap: Wrap) -> Callable[[Tensor], Tensor]:
    inner = outside_and_inside(tracker, wrap)

    def fn(x: Tensor) -> Tensor:
        with tracker.fork("b"):
            h = drop(x)
        return drop(inner(h))

    return wrap(fn)


MODELS = [
    outside_and_inside,
    region_inside_of_a_fork,
    fork_inside_of_a_fork_and_back,
    the_stream_of_the_fork_around,
    region_in_a_region,
]


def trained(make: Any, tracker: Any, wrap: Wrap, backward_in: str | None) -> list[Tensor]:
    torch.manual_seed(7)
    for index, name in enumerate("ab"):
        tracker.add(name, 10 + index)
    hidden = MappingProxyType({"down": tracker})  # where no walk over objects looks
    x = torch.ones(64, requires_grad=True)
    model = make(_Behind(lambda: hidden["down"]), wrap)
    losses = [model(x * scale).sum() for scale in (1, 2)]
    for loss in losses:
        with nullcontext() if backward_in is None else tracker.fork(backward_in):
            torch.rand(2)
            loss.backward()
    assert x.grad is not None
    found = [x.grad, torch.rand(4)]
    for name in "ab":
        with tracker.fork(name):
            found.append(torch.rand(4))
    return found


class _Behind:
    """A tracker that is found anew for each use, as libraries find theirs."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[], Any]) -> None:
        self._find = find

    def fork(self, name: str) -> Any:
        return self._find().fork(name)


@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("backward_in", [None, "a", "b"])
@pytest.mark.parametrize("make", MODELS)
def test_our_streams(make: Any, backward_in: str | None, early_stop: bool) -> None:
    plain = trained(make, RngTracker(), lambda fn: fn, backward_in)
    ours = trained(make, RngTracker(), lambda fn: reactivate.checkpoint(fn, early_stop=early_stop), backward_in)
    for index, (one, other) in enumerate(zip(plain, ours, strict=True)):
        assert_bitwise(one, other, str(index))


@pytest.mark.parametrize("backward_in", [None, "b"])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("notes_current", [True, False], ids=["of Megatron", "of TransformerEngine"])
def test_streams_of_others(make: Any, backward_in: str | None, notes_current: bool) -> None:
    def run(wrap: Callable[[Any], Wrap]) -> list[Tensor]:
        tracker = CpuRngStatesTracker(notes_current)
        return trained(make, tracker, wrap(tracker), backward_in)

    def guarded(tracker: Any) -> Wrap:
        return lambda fn: reactivate.checkpoint(fn, guards=DEFAULT.adding(TrackerGuard(lambda: tracker)))

    for one, other in zip(run(lambda tracker: lambda fn: fn), run(guarded), strict=True):
        assert_bitwise(one, other, "with its guard")


def test_generators_of_graphs_stay_the_same_objects() -> None:
    def once(wrap: Callable[[GraphSafeTracker], Wrap]) -> list[Tensor]:
        tracker = GraphSafeTracker()
        tracker.add("a", 3)
        generator = tracker.states_["a"]
        holder = MappingProxyType({"down": tracker})
        x = torch.ones(8, requires_grad=True)
        out = wrap(tracker)(lambda x: (x.sin() * holder["down"].draw("a", 8)).exp() * holder["down"].draw("a", 8))(x)
        tracker.draw("a", 3)
        out.sum().backward()
        assert tracker.states_["a"] is generator
        assert x.grad is not None
        return [x.grad, tracker.draw("a", 5)]

    plain = once(lambda tracker: lambda fn: fn)
    guards = once(lambda tracker: lambda fn: reactivate.checkpoint(fn, guards=DEFAULT.adding(TrackerGuard(tracker))))
    for one, other in zip(plain, guards, strict=True):
        assert_bitwise(one, other, "drawn")


def test_our_tracker_through_the_guard_for_others() -> None:
    """A library that takes any tracker has it twice: by the default guards, and by its own."""

    def once(wrap: Callable[[RngTracker], Wrap]) -> list[Tensor]:
        tracker = RngTracker()
        return trained(region_inside_of_a_fork, tracker, wrap(tracker), "b")

    plain = once(lambda tracker: lambda fn: fn)
    ours = once(lambda tracker: lambda fn: reactivate.checkpoint(fn, guards=DEFAULT.adding(TrackerGuard(tracker))))
    for one, other in zip(plain, ours, strict=True):
        assert_bitwise(one, other, "drawn")


def test_a_tracker_that_regions_do_not_know_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(outside_and_inside, RngTracker(), lambda fn: fn, None)
    monkeypatch.setattr("reactivate.guards.rng.trackers", ())

    def unguarded(fn: Any) -> Any:
        return reactivate.checkpoint(fn, check="none")

    assert not torch.equal(plain[0], trained(outside_and_inside, RngTracker(), unguarded, None)[0])


def test_random_calls_that_are_kept_shift_no_later_ones() -> None:
    def once(wrap: Wrap) -> list[Tensor]:
        return trained(outside_and_inside, RngTracker(), wrap, None)

    plain = once(lambda fn: fn)
    ours = once(lambda fn: reactivate.checkpoint(fn, policy=policies.save_ops("dropout")))
    for one, other in zip(plain, ours, strict=True):
        assert_bitwise(one, other, "drawn")


# -- the tracker itself ------------------------------------------------------------------------------------------------


def numbers(tracker: RngTracker, name: str, count: int) -> Tensor:
    with tracker.fork(name):
        return torch.rand(count)


def test_a_stream_is_one_sequence_however_it_is_forked() -> None:
    tracker = RngTracker()
    tracker.add("a", 3)
    tracker.add("b", 4)
    torch.manual_seed(0)
    found = [numbers(tracker, "a", 16)]
    with tracker.fork("a"):
        found.append(torch.rand(16))
        with tracker.fork("b"):
            torch.rand(5)
            found.append(numbers(tracker, "a", 16))
        found.append(torch.rand(16))
        found.append(numbers(tracker, "a", 16))
    generator = torch.Generator().manual_seed(3)
    assert_bitwise(torch.cat(found), torch.cat([torch.rand(16, generator=generator) for _ in range(5)]), "a")
    assert_bitwise(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(0)), "torch's own")


def test_an_error_in_a_fork_ends_it() -> None:
    tracker = RngTracker()
    tracker.add("a", 3)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="here"), tracker.fork("a"):
        torch.rand(2)
        raise ValueError("here")
    assert_bitwise(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(0)), "torch's own")


def test_states_are_copies_and_can_be_saved() -> None:
    tracker = RngTracker()
    tracker.add("a", 3)
    torch.save(tracker.get_states(), file := io.BytesIO())
    expected = numbers(tracker, "a", 4)
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    tracker.set_states(states)
    states["a"]["cpu"].zero_()
    tracker.get_states()["a"]["cpu"].zero_()
    assert_bitwise(numbers(tracker, "a", 4), expected, "from the states")


def test_states_inside_of_a_fork_are_those_of_now() -> None:
    tracker = RngTracker()
    tracker.add("a", 3)
    with tracker.fork("a"):
        torch.rand(16)
        states = tracker.get_states()
        expected = torch.rand(4)
        tracker.set_states(states)
        assert_bitwise(torch.rand(4), expected, "inside")
    tracker.set_states(states)
    assert_bitwise(numbers(tracker, "a", 4), expected, "outside")


def test_refusals() -> None:
    tracker = RngTracker()
    tracker.add("a", 3)
    with pytest.raises(UsageError, match="'a' has the seed 3 already"):
        tracker.add("b", 3)
    with tracker.fork("a"):
        with pytest.raises(UsageError, match="inside of fork"):
            tracker.reset()
        with pytest.raises(UsageError, match="no state of that stream"):
            tracker.set_states({})
    tracker.reset()
    assert tracker.get_states() == {}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda tracker: pickle.loads(pickle.dumps(tracker))])
def test_regions_know_copies(again: Callable[[RngTracker], RngTracker]) -> None:
    def once(wrap: Wrap) -> list[Tensor]:
        return trained(region_in_a_region, again(RngTracker()), wrap, None)

    for one, other in zip(once(lambda fn: fn), once(reactivate.checkpoint), strict=True):
        assert_bitwise(one, other, "drawn")


def test_a_tracker_that_is_gone_is_not_held() -> None:
    from reactivate.guards import named_streams

    before = len(named_streams.trackers)
    tracker = RngTracker()
    assert len(named_streams.trackers) == before + 1
    del tracker
    assert len(named_streams.trackers) == before


@pytest.mark.parametrize("forks", [True, False])
def test_what_explain_counts(forks: bool) -> None:
    """The states that the tracker has are there anyway; those that it had are kept by the region alone."""
    tracker = RngTracker()
    tracker.add("a", 3)
    tracker.add("b", 4)
    hidden = MappingProxyType({"down": tracker})

    def fn(x: Tensor) -> Tensor:
        with hidden["down"].fork("a") if forks else nullcontext():
            return x.sin().exp()

    explained = reactivate.explain(reactivate.checkpoint(fn), (torch.ones(64, requires_grad=True),))
    assert explained.kept_bytes == 64 * 4 + (torch.get_rng_state().nbytes if forks else 0)


def test_seeds_are_those_of_megatron() -> None:
    assert tensor_parallel_seeds(1, 0) == {
        "data-parallel-rng": 1,
        "model-parallel-rng": 2719,
        "expert-parallel-rng": 1025,
    }
    assert tensor_parallel_seeds(1, 3, expert_rank=2, expert_tensor_rank=1)["expert-parallel-rng"] == 1 + 1024 + 200 + 1


class FakeModule:
    """A device module with one generator, in use only when it is told."""

    def __init__(self) -> None:
        self.generator, self.is_used = torch.Generator(), False

    def is_initialized(self) -> bool:
        return self.is_used

    def device_count(self) -> int:
        return 1

    def get_rng_state(self, device: int = 0) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: int = 0) -> None:
        self.generator.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)


def test_devices_that_come_into_use_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from reactivate._backends.base import Backend
    from reactivate.guards import named_streams

    module = FakeModule()
    monkeypatch.setattr(named_streams, "backends", lambda: (Backend("fake", module),))
    tracker = RngTracker()
    tracker.add("a", 3)
    numbers(tracker, "a", 2)
    module.is_used = True
    module.generator.manual_seed(1)
    expected = torch.Generator().manual_seed(3)
    for _ in range(2):
        with tracker.fork("a"):
            assert_bitwise(
                torch.rand(4, generator=module.generator), torch.rand(4, generator=expected), "of the stream's seed"
            )
    own = torch.Generator().manual_seed(1)
    assert_bitwise(torch.rand(4, generator=module.generator), torch.rand(4, generator=own), "the device's own")


def test_numpy_that_is_imported_between_two_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * float(numpy.random.rand())).sin()

    def gradient(region: Any) -> Any:
        numpy.random.seed(0)
        x = torch.ones(4, requires_grad=True)
        region(x).sum().backward()
        return x.grad

    plain = gradient(fn)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numpy.random")
        STREAMS._use([torch_stream(), python_stream()])
        STREAMS.lacks_numpy = True
        reactivate.checkpoint(torch.sin)(torch.ones(4, requires_grad=True)).sum().backward()
        assert STREAMS.lacks_numpy
    assert torch.equal(gradient(reactivate.checkpoint(fn)), plain)
    assert not STREAMS.lacks_numpy


@each(
    ("make", "words"),
    [
        (lambda: ContextPair(None), "takes a function that returns .*; got None"),
        (lambda: ContextPair((nullcontext(), nullcontext())), r"got a tuple of 2\. Write ContextPair\(lambda: "),
        (lambda: TrackerGuard(3), "takes a tracker, .* or a function that returns one; got 3"),
        (lambda: RngTracker().set_states(3), "takes what get_states returned, a dict of streams; got 3"),
        (lambda: RngTracker().set_states({"dropout": 3}), "got a dict of 1"),
        (lambda: tensor_parallel_seeds("x", 0), "seed= takes a whole number; got 'x'"),
        (lambda: tensor_parallel_seeds(1, 0, expert_rank=None), "expert_rank= takes a whole number; got None"),
    ],
)
def test_wrong_values_are_refused_in_words(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
    assert tensor_parallel_seeds(numpy.int64(1), rank=0) == tensor_parallel_seeds(1, rank=0, expert_tensor_rank=0)
