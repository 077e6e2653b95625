"""Regions of the drop-ins for training frameworks: their options, and what happens at their boundaries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from reactivate._backends import synchronize
from reactivate._options import make_options
from reactivate._region.options import Options
from reactivate._region.run import runner_of
from reactivate._run import run_region
from reactivate._torch.dynamo import leave_out_of_graphs
from reactivate._types import DEVICE, Call, Guard, Storage
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT, Guards, TrackerGuard


def call_region(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], guards: Guards, inputs: Storage
) -> Any:
    """Call a function as a region."""
    return call_with(make_options(guards, True, "first", None, inputs), function, args, kwargs)


def call_with(options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function as a region with these options; a module inside of its hooks."""
    runner, called = runner_of(function)
    if options.inputs is not DEVICE:
        return _call_outside_of_graphs(runner, options, called, args, kwargs)
    return run_region(runner, options, called, *args, **kwargs)


def _call_outside_of_graphs(runner: Any, options: Options, called: Any, args: Any, kwargs: Any) -> Any:
    return run_region(runner, options, called, *args, **kwargs)


leave_out_of_graphs(_call_outside_of_graphs, "what a region is called with goes to a storage")


def is_first_of(args: tuple[Any, ...], call: str) -> Callable[[torch.Tensor], bool]:
    """Return what tells the first argument, which is to be distributed, from other tensors. It holds no tensor.

    Args:
        args: of the call.
        call: what was written, for the message.

    Raises:
        UsageError: the first argument is no tensor.
    """
    if not args or not isinstance(args[0], torch.Tensor):
        raise UsageError(
            f"{call} distributes args[0], a tensor; got {type(args[0]).__name__ if args else 'no arguments'}. Pass False, or "
            "the tensor first."
        )
    first = id(args[0])
    return lambda tensor: id(tensor) == first


_trackers: WeakValueDictionary[int, TrackerGuard] = WeakValueDictionary()


def guard_of(tracker: Any) -> TrackerGuard:
    """Return the guard of a tracker, or of a function that returns it.

    All regions that are alive have one, and so share its snapshots. The last of them takes it along, and with it the tracker.
    """
    guard = _trackers.get(id(tracker))
    if guard is None:
        guard = _trackers[id(tracker)] = TrackerGuard(tracker)
    return guard


def with_tracker(tracker: Any) -> Guards:
    """Return the default guards, and one for an RNG tracker that has streams."""
    return DEFAULT if tracker is None or not tracker.get_states() else DEFAULT.adding(guard_of(tracker))


class Synchronized(Guard):
    """Waits for the accelerator where the forward of a region and its recomputations begin and end.

    Args:
        logger: gets how long they take; None logs nothing.
    """

    name = "boundaries"

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger

    def before(self, call: Call) -> Any:
        return self._begin()

    def leave(self, token: Any, error: BaseException | None) -> None:
        if error is None:
            self._end(token, "forward")

    @contextmanager
    def recompute(self, snapshot: Any) -> Iterator[None]:
        begun = self._begin()
        yield
        self._end(begun, "recomputation")

    def _begin(self) -> float:
        synchronize()
        return time.perf_counter()

    def _end(self, begun: float, kind: str) -> None:
        synchronize()
        if self._logger is not None:
            self._logger.info("checkpoint: %s took %.3f ms", kind, 1e3 * (time.perf_counter() - begun))


class Chosen:
    """A storage for some of the inputs of a region; the others stay.

    Args:
        storage: where these go.
        chooses: whether a tensor is one of these. It must hold no tensor: the region holds it until the backward.
    """

    takes_names = True

    def __init__(self, storage: Storage, chooses: Callable[[torch.Tensor], bool]) -> None:
        self.storage = storage
        self.is_collective = getattr(storage, "is_collective", False)
        self._chooses = chooses

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chosen) and self.storage == other.storage

    def __hash__(self) -> int:
        return hash(self.storage)

    def __repr__(self) -> str:
        return repr(self.storage)

    @property
    def traffic(self) -> Any:
        """Counts of the storage."""
        return getattr(self.storage, "traffic", None)

    def save(self, tensor: torch.Tensor, name: str = "") -> Any:
        """Take `tensor` in, if it is one of these."""
        if not self._chooses(tensor):
            return tensor
        takes_names = getattr(self.storage, "takes_names", False)
        return self.storage.save(tensor, name) if takes_names else self.storage.save(tensor)  # type: ignore[call-arg]

    def load(self, handle: Any) -> torch.Tensor:
        """Return the tensor of a handle."""
        return self.storage.load(handle)
