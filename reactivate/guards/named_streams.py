"""Named streams of random numbers, as tensor-parallel code needs them: one for what ranks share, one for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from numbers import Integral
from typing import Any
from weakref import ref

import torch

from reactivate._backends import backends
from reactivate._text.words import described
from reactivate.errors import UsageError

MODEL_PARALLEL = "model-parallel-rng"
DATA_PARALLEL = "data-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"

_State = dict[str, Any]
"""{device type: the states of its generators} and {"seed": that of the stream}. Never modified once it is made."""

trackers: set[ref[RngTracker]] = set()  # mostly empty, and then a region need look no further


def tensor_parallel_seeds(
    seed: int, rank: int, *, expert_rank: int = 0, expert_tensor_rank: int | None = None
) -> dict[str, int]:
    """Return the seeds of the streams of one tensor-parallel rank, {name of a stream: seed}, as Megatron defines them.

    `data-parallel-rng` is the same on all ranks of a tensor-parallel group, and has the seed of torch's own generator;
    `model-parallel-rng` is another one on each; `expert-parallel-rng` is another one for each rank that has experts.

    Args:
        seed: of the training; for pipeline stages Megatron adds 100 for each stage before.
        rank: in the tensor-parallel group.
        expert_rank: in the expert-parallel group.
        expert_tensor_rank: in the tensor-parallel group of the experts; `rank` if None.

    Raises:
        UsageError: an argument is no whole number.

    Source: `model_parallel_cuda_manual_seed` of megatron-core 0.16.

    Examples:
        >>> import reactivate
        >>> reactivate.guards.tensor_parallel_seeds(1234, rank=1)
        {'data-parallel-rng': 1234, 'model-parallel-rng': 3953, 'expert-parallel-rng': 2259}
    """
    given = {"seed": seed, "rank": rank, "expert_rank": expert_rank, "expert_tensor_rank": expert_tensor_rank}
    for name, value in given.items():
        if not isinstance(value, Integral) and not (value is None and name == "expert_tensor_rank"):
            raise UsageError(f"tensor_parallel_seeds: {name}= takes a whole number; got {described(value)}.")
    expert_tensor_rank = rank if expert_tensor_rank is None else expert_tensor_rank
    return {
        DATA_PARALLEL: seed,
        MODEL_PARALLEL: seed + 2718 + rank,
        EXPERT_PARALLEL: seed + 1024 + 100 * expert_rank + expert_tensor_rank,
    }


class StreamStates:
    """The streams of a tracker, as they were.

    Attributes:
        current: the one that torch's generators draw from; None if that is no stream of the tracker.
        states: of all streams; that of `current` is out of date.
    """

    __slots__ = ("_tracker", "current", "states")

    def __init__(self, tracker: RngTracker) -> None:
        self._tracker = tracker
        self.current, self.states = tracker._current, dict(tracker._states)

    def is_same(self, other: StreamStates) -> bool:
        """Return whether nothing was drawn in between."""
        if self.current != other.current or self.states.keys() != other.states.keys():
            return False
        return all(self.states[name] is other.states[name] for name in self.states)

    def held(self) -> list[Any]:
        """Return the states that have no other holder: those that the tracker has are there anyway."""
        theirs = set(map(id, self._tracker._states.values()))
        return [state for state in self.states.values() if id(state) not in theirs]


class RngTracker:
    """Named streams of random numbers, on the CPU and on every device that is in use.

    Regions know each tracker: a recomputation draws from its streams what the forward drew, and advances none of them. Each
    stream is one sequence, however it is forked: a fork inside of a fork of the same stream goes on with it.

    A device whose first use is inside of a fork goes on with its own stream until the fork ends.

    Examples:
        >>> import torch, reactivate
        >>> tracker = reactivate.guards.RngTracker()
        >>> for name, seed in reactivate.guards.tensor_parallel_seeds(1234, rank=0).items():
        ...     tracker.add(name, seed)
        >>> def block(x):
        ...     with tracker.fork():
        ...         return torch.nn.functional.dropout(x) * x
        >>> reactivate.checkpoint(block)(torch.ones(4, requires_grad=True)).sum().backward()
    """

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._current: str | None = None  # whose state torch's generators have now
        trackers.add(ref(self, trackers.discard))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        trackers.add(ref(self, trackers.discard))  # a copy, which regions have to know as well

    def add(self, name: str, seed: int) -> None:
        """Start a stream.

        Raises:
            UsageError: there is a stream of that name, or of that seed, which would draw the same numbers.
        """
        if name in self._states:
            raise UsageError(f"There is a stream {name!r} already. There are: {', '.join(self._states)}.")
        same = next((other for other, state in self._states.items() if state["seed"] == seed), None)
        if same is not None:
            raise UsageError(f"The stream {same!r} has the seed {seed} already: {name!r} would draw the same numbers.")
        self._states[name] = {"seed": seed, "cpu": torch.Generator().manual_seed(seed).get_state()}

    def reset(self) -> None:
        """Forget all streams.

        Raises:
            UsageError: inside of a fork.
        """
        if self._current is not None:
            raise UsageError(
                f"reset() is inside of fork({self._current!r}), which ends with that stream: call it after."
            )
        self._states = {}

    def get_states(self) -> dict[str, _State]:
        """Return copies of the states, {name: {"seed": ..., device type: ...}}, which can be saved."""
        found = dict(self._states)
        if self._current is not None:
            found[self._current] = _read(found[self._current]["seed"])
        return deepcopy(found)

    def set_states(self, states: dict[str, _State]) -> None:
        """Set all streams to what `get_states` gave.

        Raises:
            UsageError: they are something else; or inside of a fork of a stream that is not among them.
        """
        if not isinstance(states, Mapping) or not all(
            isinstance(one, Mapping) and "seed" in one for one in states.values()
        ):
            raise UsageError(f"set_states takes what get_states returned, a dict of streams; got {described(states)}.")
        if self._current is not None and self._current not in states:
            raise UsageError(f"set_states is inside of fork({self._current!r}), and has no state of that stream.")
        self._states = deepcopy(dict(states))
        if self._current is not None:
            _write(self._states[self._current])

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """A context in which torch draws from the stream `name`, on the CPU and on devices.

        Raises:
            UsageError: there is no stream of that name.
        """
        if name not in self._states:
            raise UsageError(f"There is no stream {name!r}. There are: {', '.join(self._states) or 'none'}.")
        outer = self._current
        around = _read(0 if outer is None else self._states[outer]["seed"])
        if outer is not None:
            self._states[outer] = around
        _write(self._states[name])
        self._current = name
        try:
            yield
        finally:
            self._states[name] = _read(self._states[name]["seed"])
            _write(around if outer is None else self._states[outer])
            self._current = outer

    def recompute_state(self) -> StreamStates:
        """Return what a recomputation has to see again: the streams that are not drawn from now, and which one is."""
        return StreamStates(self)

    def load_recompute_state(self, state: StreamStates) -> None:
        """Go back to what `recompute_state` gave. Torch's generators are the affair of other guards."""
        self._current, self._states = state.current, dict(state.states)


def _read(seed: int) -> _State:
    state: _State = {"seed": seed, "cpu": torch.get_rng_state()}
    for backend in backends():
        if backend.is_initialized():
            state[backend.device_type] = backend.read_rng()
    return state


def _write(state: _State) -> None:
    torch.set_rng_state(state["cpu"])
    for backend in backends():
        if backend.is_initialized():
            if backend.device_type in state:
                backend.write_rng(state[backend.device_type])
            else:
                backend.seed_rng(state["seed"])
