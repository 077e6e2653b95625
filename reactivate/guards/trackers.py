"""Trackers of named random number streams, as tensor-parallel libraries have them, recomputed as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from reactivate._setting import Rewound
from reactivate._snapshot.state_lock import STATE_LOCK, Scope
from reactivate._text.words import described
from reactivate._torch.modes import is_same_state
from reactivate._types import Call, Guard
from reactivate.errors import UsageError

_CURRENT = "_current_state_name"
"""Megatron's tracker notes under this name which stream is forked now: what a fork inside of it begins from."""


class Tracker(Protocol):
    """An RNG tracker: the part that Megatron's and TransformerEngine's have in common.

    One that has more state gives and takes it whole, by methods `recompute_state` and `load_recompute_state` as modules; two
    such states say by `is_same(other)` whether nothing was drawn in between. `guards.RngTracker` does.
    """

    def get_states(self) -> dict[str, Any]:
        """{name: a state tensor, or a generator}."""

    def set_states(self, states: dict[str, Any]) -> None:
        """Set what `get_states` gave."""


class TrackerGuard(Guard):
    """Recomputes with the streams of a tracker as they were.

    Contents are cloned, also where the tracker gives out live tensors or generators (those of CUDA graphs), so that a
    later draw does not change what was kept. A generator that was registered with a graph stays the same object.

    Args:
        tracker: the tracker, or a function that returns it: Megatron's `get_cuda_rng_tracker`, TransformerEngine's
            `CudaRNGStatesTracker`. `guards.RngTracker` needs no guard: the default ones know it.

    Raises:
        UsageError: it is neither.

    Examples:
        >>> import reactivate
        >>> class Tracker:
        ...     def __init__(self): self.states = {"dropout": torch.Generator().manual_seed(1)}
        ...     def get_states(self): return dict(self.states)
        ...     def set_states(self, states): self.states = states
        >>> tracker = Tracker()
        >>> guards = reactivate.guards.DEFAULT.adding(reactivate.guards.TrackerGuard(tracker))
        >>> def f(x):
        ...     return x * torch.rand(4, generator=tracker.states["dropout"]) * x
        >>> reactivate.checkpoint(f, guards=guards)(torch.ones(4, requires_grad=True)).sum().backward()
    """

    name = "trackers"

    def __init__(self, tracker: Tracker | Callable[[], Tracker]) -> None:
        if not callable(tracker) and not hasattr(tracker, "get_states"):
            raise UsageError(
                "TrackerGuard takes a tracker, an object with `get_states` and `set_states`, or a function that returns one; "
                f"got {described(tracker)}."
            )
        self._tracker = tracker
        self._known: Any = None

    def _get(self) -> Any:
        given: Any = self._tracker
        return given if hasattr(given, "get_states") else given()

    def _read(self) -> Any:
        tracker = self._get()
        if hasattr(tracker, "recompute_state"):
            return tracker.recompute_state()
        states = {name: _content(state) for name, state in tracker.get_states().items()}
        return _TrackerStates(states, getattr(tracker, _CURRENT, None))

    def _write(self, contents: Any) -> None:
        tracker = self._get()
        if hasattr(tracker, "recompute_state"):
            tracker.load_recompute_state(contents)
            return
        tracker.set_states({name: _put(*content) for name, content in contents.states.items()})
        if hasattr(tracker, _CURRENT):
            setattr(tracker, _CURRENT, contents.current)

    def before(self, call: Call) -> Any:
        now = self._read()
        if self._known is None or not now.is_same(self._known):  # all regions between two draws share one snapshot
            self._known = now
        return self._known

    def recompute(self, snapshot: Any) -> AbstractContextManager[Any]:
        rewound = Rewound(self._read, self._write, snapshot, lambda now, snapshot: now.is_same(snapshot))
        return _in_turn(rewound)

    def position(self, call: Call) -> Callable[[], None]:
        """Return what brings the streams to where they are now."""
        return functools.partial(self._write, self._read())


@contextmanager
def _in_turn(rewound: Rewound) -> Iterator[None]:
    """Set back streams that all threads share, for one recomputation at a time."""
    STATE_LOCK.take_turn_if(lambda: Scope.EVERYTHING if rewound.differs() else Scope.NOTHING)
    with rewound:
        yield


class _TrackerStates(NamedTuple):
    """The streams of a tracker.

    Attributes:
        states: {name: (generator, a copy of its state), or (None, a copy of the state)}.
        current: the stream that is forked now, if the tracker says.
    """

    states: dict[str, tuple[Any, Any]]
    current: Any

    def is_same(self, other: _TrackerStates) -> bool:
        """Return whether nothing was drawn in between."""
        if self.states.keys() != other.states.keys() or self.current != other.current:
            return False
        pairs = ((self.states[name], other.states[name]) for name in self.states)
        return all(one[0] is two[0] and is_same_state(one[1], two[1]) for one, two in pairs)


def _content(state: Any) -> tuple[Any, Any]:
    if isinstance(state, torch.Generator):
        return state, state.get_state().clone()
    return None, state.clone() if isinstance(state, torch.Tensor) else state


def _put(generator: Any, state: Any) -> Any:
    if generator is None:
        return state.clone() if isinstance(state, torch.Tensor) else state
    generator.set_state(state)
    return generator
