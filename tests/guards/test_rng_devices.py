"""Generators of devices, and those that trackers have by name: a recomputation draws what the forward drew (Rule 10)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked import Forks
from torch import Tensor

import reactivate
from reactivate._backends.base import Backend
from reactivate.guards import DEFAULT, Rng, RngTracker, TrackerGuard

# -- devices: a module with several, on the CPU -------------------------------------------------------------------------


def unchecked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` without the self-check, which would find what a guard is missing for."""
    return reactivate.checkpoint(fn, check="metadata")


class FakeDevices:
    """A device module with generators of its own, such as `torch.xpu` is one."""

    def __init__(self, count: int, initialized: bool = True) -> None:
        generators = [torch.Generator().manual_seed(index) for index in range(count)]
        self.hidden = MappingProxyType({"down": generators})  # where no walk over a closure finds them
        self.initialized = initialized
        self.current = 0
        self.streams: list[str] = ["default"]

    @property
    def generators(self) -> list[torch.Generator]:
        return self.hidden["down"]

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return len(self.generators)

    def current_device(self) -> int:
        return self.current

    def get_rng_state(self, device: int = 0) -> Tensor:
        assert self.initialized, "looking at the generators initialises the device"
        return self.generators[device].get_state()

    def set_rng_state(self, new_state: Tensor, device: int = 0) -> None:
        self.generators[device].set_state(new_state)

    def rand(self, device: int) -> Tensor:
        self.initialized = True
        return torch.rand(4, generator=self.generators[device])


@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_device_of_a_device_module(count: int) -> None:
    def once(wrap: Callable[..., Any], devices: FakeDevices) -> list[Tensor]:
        x = torch.ones(4, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            h = x.sin()
            for device in range(count):
                h = (h * devices.rand(device)).exp().sin()
            return h

        wrap(fn)(x).sum().backward()
        return [x.grad, *(devices.rand(device) for device in range(count))]

    plain = once(lambda fn: fn, FakeDevices(count))
    devices = FakeDevices(count)
    guards = DEFAULT.adding(Rng(Backend("fake", devices)))
    ours = once(lambda fn: reactivate.checkpoint(fn, guards=guards), devices)
    assert all(torch.equal(*pair) for pair in zip(plain, ours, strict=True))
    with pytest.raises(AssertionError):
        unguarded = once(unchecked, FakeDevices(count))
        assert all(torch.equal(*pair) for pair in zip(plain, unguarded))


def test_a_device_that_is_first_used_inside_of_a_region() -> None:
    class Counted(Backend):
        def first_rng(self) -> Any:
            return [torch.Generator().manual_seed(index).get_state() for index in range(2)]

    def once(wrap: Callable[..., Any], devices: FakeDevices) -> list[Tensor]:
        x = torch.ones(4, requires_grad=True)
        wrap(lambda x: (x.sin() * devices.rand(1)).exp())(x).sum().backward()
        return [x.grad, devices.rand(1)]

    plain = once(lambda fn: fn, FakeDevices(2, initialized=False))
    devices = FakeDevices(2, initialized=False)
    guards = DEFAULT.adding(Rng(Counted("fake", devices)))
    ours = once(lambda fn: reactivate.checkpoint(fn, guards=guards), devices)
    assert all(torch.equal(*pair) for pair in zip(plain, ours, strict=True))


def test_a_device_that_is_not_in_use_is_left_alone() -> None:
    devices = FakeDevices(2, initialized=False)
    x = torch.ones(4, requires_grad=True)
    guards = DEFAULT.adding(Rng(Backend("fake", devices)))
    reactivate.checkpoint(lambda x: x.sin().exp(), guards=guards)(x).sum().backward()
    assert not devices.initialized


REGISTERED = """
import queue, sys, types
import torch, reactivate

late, without, kind = sys.argv[1:]
hidden = queue.SimpleQueue()  # nothing that a region restores by itself
hidden.put(0)

def read(device=0):
    seed = hidden.get()
    hidden.put(seed)
    return seed if kind == "int" else torch.tensor(seed)

def write(seed, device=0):
    hidden.get()
    hidden.put(int(seed))

def draw():
    write(int(read()) + 1)
    return torch.rand(4, generator=torch.Generator().manual_seed(int(read())))

module = types.ModuleType("fake")
module.is_initialized = module.is_available = lambda: True
module.device_count, module.get_rng_state, module.set_rng_state = (lambda: 1), read, write
torch.utils.rename_privateuse1_backend("fake")
if late == "late":  # a region runs before the device has its module
    reactivate.checkpoint(torch.sin)(torch.ones(3, requires_grad=True)).sum().backward()
if without:
    delattr(module, without)
torch._register_device_module("fake", module)
body = (lambda x: x.sin().exp()) if without else (lambda x: (x.sin() * draw()).exp().sin())

def once(wrap):
    write(5)
    x = torch.ones(4, requires_grad=True)
    out = wrap(body)(x)
    first = draw()
    out.sum().backward()
    return [out.detach(), x.grad, first, draw()]

plain, ours = once(lambda fn: fn), once(lambda fn: reactivate.checkpoint(fn, check="metadata"))
assert all(torch.equal(*pair) for pair in zip(plain, ours, strict=True))
"""


@pytest.mark.parametrize("kind", ["int", "tensor"])
@pytest.mark.parametrize("late", ["late", "early"])
@pytest.mark.parametrize("without", ["", "get_rng_state", "device_count"])
def test_a_registered_privateuse1_device(late: str, without: str, kind: str, forks: Forks, tmp_path: Path) -> None:
    """Its generators are restored, whenever it was registered; a module without any is no reason to fail."""
    program = tmp_path / "registered.py"
    program.write_text(REGISTERED, encoding="utf-8")
    found = forks.run(program, late, without, kind)
    assert found.returncode == 0, found.stderr


# -- named trackers ------------------------------------------------------------------------------------------------------


class LiveTracker:
    """Like TransformerEngine's: gives out its live states, which a later draw changes."""

    def __init__(self, live: bool) -> None:
        generators = {"model-parallel": torch.Generator().manual_seed(1), "other": torch.Generator().manual_seed(2)}
        self.hidden = MappingProxyType({"down": generators})  # where no walk over a closure finds them
        self.live = live

    @property
    def generators(self) -> dict[str, torch.Generator]:
        return self.hidden["down"]

    def get_states(self) -> dict[str, Any]:
        if self.live:
            return self.generators
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def set_states(self, states: dict[str, Any]) -> None:
        if self.live:
            self.hidden = MappingProxyType({"down": states})
        else:
            for name, state in states.items():
                self.generators[name].set_state(state)

    def noise(self, name: str) -> Tensor:
        return torch.rand(4, generator=self.generators[name])


@pytest.mark.parametrize("live", [True, False], ids=["live handles", "tensors"])
def test_trackers_of_others(live: bool) -> None:
    def once(wrap: Callable[..., Any], tracker: LiveTracker) -> list[Tensor]:
        x = torch.ones(4, requires_grad=True)
        wrap(lambda x: (x.sin() * tracker.noise("model-parallel")).exp() * tracker.noise("other"))(x).sum().backward()
        return [x.grad, tracker.noise("model-parallel"), tracker.noise("other")]

    plain = once(lambda fn: fn, LiveTracker(live))
    tracker = LiveTracker(live)
    guards = DEFAULT.adding(TrackerGuard(lambda: tracker))
    ours = once(lambda fn: reactivate.checkpoint(fn, guards=guards), tracker)
    assert all(torch.equal(*pair) for pair in zip(plain, ours, strict=True))
    with pytest.raises(AssertionError):
        unguarded = once(unchecked, LiveTracker(live))
        assert all(torch.equal(*pair) for pair in zip(plain, unguarded))


def test_our_tracker() -> None:
    def once(wrap: Callable[..., Any], tracker: RngTracker) -> list[Tensor]:
        torch.manual_seed(9)
        tracker.add("model-parallel", seed=3)
        x = torch.ones(64, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            h = F.dropout(x.sin(), 0.5).exp()
            with tracker.fork("model-parallel"):
                h = F.dropout(h, 0.5).sin()
            return F.dropout(h, 0.5).exp()

        wrap(fn)(x).sum().backward()
        with tracker.fork("model-parallel"):
            after = torch.rand(3)
        return [x.grad, after, torch.rand(3)]

    plain = once(lambda fn: fn, RngTracker())
    tracker = RngTracker()
    guards = DEFAULT.adding(TrackerGuard(tracker))
    for early_stop in (True, False):
        ours = once(
            lambda fn: reactivate.checkpoint(fn, guards=guards, early_stop=early_stop),
            RngTracker.__init__(tracker) or tracker,
        )
        assert all(torch.equal(*pair) for pair in zip(plain, ours, strict=True))


def test_our_tracker_refuses() -> None:
    tracker = RngTracker()
    tracker.add("a", seed=1)
    with pytest.raises(reactivate.errors.UsageError, match="'a' already"):
        tracker.add("a", seed=2)
    with pytest.raises(reactivate.errors.UsageError, match="no stream 'b'. There are: a"), tracker.fork("b"):
        pass


def test_regions_between_two_draws_from_a_tracker_share_one_snapshot() -> None:
    tracker = RngTracker()
    tracker.add("a", seed=1)
    guard = TrackerGuard(tracker)
    first = guard.before(None)  # type: ignore[arg-type]
    assert guard.before(None) is first  # type: ignore[arg-type]
    with tracker.fork("a"):
        torch.rand(1)
    assert guard.before(None) is not first  # type: ignore[arg-type]


def test_a_region_that_draws_from_a_tracker_and_restores_it() -> None:
    def once(wrap: Callable[..., Any], tracker: RngTracker) -> Tensor:
        tracker.add("a", seed=1)

        def fn(x: Tensor) -> Tensor:
            states = tracker.get_states()
            with tracker.fork("a"):
                noise = torch.rand(4)
            tracker.set_states(states)
            return (x.sin() * noise).exp()

        x = torch.ones(4, requires_grad=True)
        out = wrap(fn)(x)
        with tracker.fork("a"):
            torch.rand(4)
        return torch.autograd.grad(out.sum(), x)[0]

    tracker = RngTracker()
    guards = DEFAULT.adding(TrackerGuard(tracker))
    ours = once(lambda fn: reactivate.checkpoint(fn, guards=guards), tracker)
    assert torch.equal(ours, once(lambda fn: fn, RngTracker()))
