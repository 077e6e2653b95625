"""The reducers of `DistributedDataParallel`, after a step that an error has ended: torch has no public name for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from reactivate._torch.ways import fastest

_reset_state, _rebuild_buckets = fastest(
    "a reducer of gradients, ready for another step",
    "torch._C._distributed_c10d.Reducer._reset_state",
    "torch._C._distributed_c10d.Reducer._rebuild_buckets",
    probe=lambda reset, rebuild: callable(reset) and callable(rebuild),
    lost="`guard_memory` for models in `DistributedDataParallel`",
)


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """Let a reducer order its buckets by when gradients came, if it is about to: its next forward would, on all ranks."""
    if _rebuild_buckets(model.reducer):
        model._has_rebuilt_buckets = True


def has_rebuilt_buckets(model: DistributedDataParallel) -> bool:
    """Return whether it has."""
    return bool(model._has_rebuilt_buckets)


def reset_reducer(model: DistributedDataParallel) -> None:
    """Make a reducer ready for a step, whatever the last one came to. All ranks have to do it."""
    _reset_state(model.reducer)
    model._has_rebuilt_buckets = False


def without_rebuilding(model: DistributedDataParallel) -> AbstractContextManager[None]:
    """Leave the buckets as they are inside of the context."""
    return _replaced(model, _WithoutRebuilding)


def without_reducing(model: DistributedDataParallel) -> AbstractContextManager[None]:
    """Keep the reducer from waiting for gradients, inside of the context: for a step whose gradients it will not see."""
    return _replaced(model, _Idle)


@contextmanager
def _replaced(model: DistributedDataParallel, kind: type[_WithoutRebuilding]) -> Iterator[None]:
    reducer = model.reducer
    model.reducer = kind(reducer)  # type: ignore[assignment]
    try:
        yield
    finally:
        model.reducer = reducer


class _WithoutRebuilding:
    """A reducer that does not rebuild its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class _Idle(_WithoutRebuilding):
    """A reducer to which no gradients come."""

    def prepare_for_forward(self) -> None:
        """Do nothing."""

    def prepare_for_backward(self, outputs: list[Any]) -> None:
        """Do nothing: it would wait for gradients, in the next backward if none came in this one."""
