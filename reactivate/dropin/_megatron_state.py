"""State that is Megatron's where that is installed: the tensor-parallel group, the RNG tracker, and whether a region runs."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

from reactivate._setting import set_to
from reactivate._types import Call, Guard
from reactivate.errors import UsageError


class _Parallel(NamedTuple):
    group: Any = None
    tracker: Any = None


_NOTHING = _Parallel()
_parallel: ContextVar[_Parallel] = ContextVar("reactivate.dropin.megatron.parallel", default=_NOTHING)
open_regions: ContextVar[int] = ContextVar("reactivate.dropin.megatron.open_regions", default=0)
"""The number of regions that the calling code is inside of."""


def parallel(*, group: Any = None, tracker: Any = None) -> AbstractContextManager[None]:
    """Say what Megatron's own state says where it is installed, for the calls inside of the context.

    Args:
        group: the tensor-parallel process group, for `distribute_saved_activations`.
        tracker: the RNG tracker. A `guards.RngTracker` needs not be named.

    Examples:
        >>> import torch, reactivate
        >>> from reactivate.dropin import megatron
        >>> with megatron.parallel(tracker=reactivate.guards.RngTracker()):
        ...     megatron.checkpoint(torch.sin, False, torch.ones(2, requires_grad=True)).sum().backward()
    """
    return set_to(_parallel, _Parallel(group, tracker))


class _Checkpointing(Guard):
    """Counts the regions that the calling code is inside of, also if one ends by an exception."""

    name = "boundaries"

    def before(self, call: Call) -> Any:
        open_regions.set(open_regions.get() + 1)
        return ()

    def leave(self, token: Any, error: BaseException | None) -> None:
        open_regions.set(open_regions.get() - 1)

    def recompute(self, snapshot: Any) -> AbstractContextManager[None]:
        return set_to(open_regions, open_regions.get() + 1)


CHECKPOINTING = _Checkpointing()


def tensor_parallel_group() -> Any:
    """Return the tensor-parallel group.

    Raises:
        UsageError: there is none.
    """
    group = _parallel.get().group
    state = sys.modules.get("megatron.core.parallel_state")
    if group is None and state is not None and state.model_parallel_is_initialized():
        group = state.get_tensor_model_parallel_group()
    if group is None:
        raise UsageError(
            "distribute_saved_activations=True needs the tensor-parallel group: initialize Megatron's model parallelism, or "
            "say with dropin.megatron.parallel(group=...)."
        )
    return group


def rng_tracker() -> Any:
    """Return the RNG tracker, None if there is none."""
    tracker = _parallel.get().tracker
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    return random.get_cuda_rng_tracker() if tracker is None and random is not None else tracker
