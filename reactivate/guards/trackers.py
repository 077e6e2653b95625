"""Named streams of random numbers, as tensor-parallel code keeps them: one for what ranks share, one for each rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from reactivate._backends import Backend, accelerator
from reactivate._engine.state.turns import undisturbed
from reactivate._torch.modes import is_same_state
from reactivate._types import Call, Guard
from reactivate.errors import UsageError
from reactivate.guards._base import Rewound


class Tracker(Protocol):
    """An RNG tracker: the part that Megatron's and TransformerEngine's have in common."""

    def get_states(self) -> dict[str, Any]:
        """{name: a state tensor, or a generator}."""

    def set_states(self, states: dict[str, Any]) -> None:
        """Set what `get_states` gave."""


class TrackerGuard(Guard):
    """Recomputes with the streams of a tracker as they were.

    Contents are cloned, also where the tracker gives out live tensors or generators, so that a later draw does not
    change what was kept.

    Args:
        tracker: the tracker, or a function that returns it.

    Example:
        >>> import reactivate
        >>> tracker = reactivate.guards.RngTracker()
        >>> tracker.add("dropout", seed=1)
        >>> guards = reactivate.guards.DEFAULT.adding(reactivate.guards.TrackerGuard(tracker))
        >>> def f(x):
        ...     with tracker.fork("dropout"):
        ...         return torch.nn.functional.dropout(x) * x
        >>> reactivate.checkpoint(f, guards=guards)(torch.ones(4, requires_grad=True)).sum().backward()
    """

    name = "trackers"

    def __init__(self, tracker: Tracker | Callable[[], Tracker]) -> None:
        self._tracker = tracker
        self._known: dict[str, Any] | None = None

    def _get(self) -> Tracker:
        given: Any = self._tracker
        tracker: Tracker = given if hasattr(given, "get_states") else given()
        return tracker

    def before(self, call: Call) -> Any:
        now = _contents(self._get().get_states())
        if self._known is None or not _are_same(now, self._known):  # all regions between two draws share one snapshot
            self._known = now
        return self._known

    def recompute(self, snapshot: Any) -> AbstractContextManager[Any]:
        return undisturbed(Rewound(lambda: _contents(self._get().get_states()), self._write, snapshot))

    def skip(self, call: Call, token: Any) -> Callable[[], None] | None:
        now = _contents(self._get().get_states())
        return None if _are_same(now, token) else functools.partial(self._write, now)

    def _write(self, contents: dict[str, Any]) -> None:
        tracker = self._get()
        live = tracker.get_states()
        states: dict[str, Any] = {}
        for name, content in contents.items():
            generator = live.get(name)
            if isinstance(generator, torch.Generator):
                generator.set_state(content)
                states[name] = generator
            else:
                states[name] = content.clone() if isinstance(content, torch.Tensor) else content
        tracker.set_states(states)


def _contents(states: dict[str, Any]) -> dict[str, Any]:
    return {name: _content(state) for name, state in states.items()}


def _content(state: Any) -> Any:
    if isinstance(state, torch.Generator):
        return state.get_state().clone()
    return state.clone() if isinstance(state, torch.Tensor) else state


def _are_same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(is_same_state(some[name], others[name]) for name in some)


class RngTracker:
    """Named streams of random numbers, on the CPU and on the current accelerator device.

    Example:
        >>> import torch, reactivate
        >>> tracker = reactivate.guards.RngTracker()
        >>> tracker.add("model-parallel", seed=3)
        >>> with tracker.fork("model-parallel"):
        ...     first = torch.rand(2)
        >>> with tracker.fork("model-parallel"):
        ...     second = torch.rand(2)
        >>> bool((first != second).all())
        True
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """Start a stream.

        Raises:
            UsageError: there is a stream of that name.
        """
        if name in self._states:
            raise UsageError(f"There is a stream {name!r} already. There are: {', '.join(self._states)}.")
        now = _read()
        torch.manual_seed(seed)
        self._states[name] = _read()
        _write(now)

    def get_states(self) -> dict[str, torch.Tensor]:
        """{name: state}."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Set all streams to what `get_states` gave."""
        self._states = dict(states)

    @contextlib.contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """A context in which torch draws from the stream `name`.

        Raises:
            UsageError: there is no stream of that name.
        """
        if name not in self._states:
            raise UsageError(f"There is no stream {name!r}. There are: {', '.join(self._states) or 'none'}.")
        now = _read()
        _write(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _read()
            _write(now)


def _read() -> torch.Tensor:
    """The states of the CPU's and the current accelerator device's generator, one behind the other."""
    device = _device()
    state = torch.get_rng_state()
    return state if device is None else torch.cat([state, device.read_current_rng().cpu()])


def _write(state: torch.Tensor) -> None:
    device = _device()
    size = torch.default_generator.get_state().numel()
    torch.set_rng_state(state[:size])
    if device is not None:
        device.write_current_rng(state[size:].clone())  # torch.Generator reads a part of a storage out of bounds


def _device() -> Backend | None:
    backend = accelerator()
    return backend if backend is not None and backend.is_initialized() else None
