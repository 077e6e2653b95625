"""The ranks that run a guarded step together: they agree whether it has to run again, and no rank waits for good.

A rank that runs out of memory is missing in the collectives that the others have come to, or will come to. So it catches
up with them: it runs the step once more, with every block recomputed, and leaves out the collectives that it had issued
before. The result is dropped: right before an optimizer begins, or at the end of the step, each rank says whether it was
short. If one was, all put back what the step did and run it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from reactivate._inspect.collectives import skipped_collective
from reactivate._inspect.sharded import resetting_sharding
from reactivate._model.apply import apply, paused
from reactivate._passes.current import is_recomputed
from reactivate._text.words import described
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.modules import (
    has_rebuilt_buckets,
    has_unreduced_gradients,
    rebuild_buckets,
    reset_reducer,
    without_rebuilding,
)
from reactivate._torch.ops import group_name_of, issued
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.planner.distributed import on_host
from reactivate.planner.target import is_alone

Value = TypeVar("Value")

_TO_ONE_RANK = ("send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops", "monitored_barrier_")


class RankWasShort(BaseException):
    """A rank ran out of memory in this step, which is put back and run again. No `except Exception` takes it."""


class CannotCatchUp(Exception):
    """A rank cannot take part in the collectives of the others any more; says why."""


class GuardedRanks:
    """The ranks of a guarded step.

    Args:
        group: these ranks; None: all that there are, which may be this one alone.

    Raises:
        UsageError: `group` is no group that this process is in.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
            raise UsageError(
                f"retry_on_oom: group= takes a process group that this process is in; got {described(group)}."
            )
        self._group = group
        self._on_host: tuple[Any, dist.ProcessGroup] | None = None

    @property
    def are_many(self) -> bool:
        """Return whether there are others to agree with."""
        return not is_alone() if self._group is None else dist.get_world_size(self._group) > 1

    def any_short(self, is_short: bool) -> bool:
        """Return whether one of the ranks was short. Every rank must come to this call."""
        number = torch.tensor([int(is_short)])
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._agreeing())
        return bool(number.item())

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order. Every rank must come to this call."""
        if not self.are_many:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._agreeing())
        return found

    def _agreeing(self) -> dist.ProcessGroup:
        group: Any = dist.group.WORLD if self._group is None else self._group
        if self._on_host is None or self._on_host[0] is not group:
            self._on_host = group, on_host(group)
        return self._on_host[1]


class RankStep:
    """One run of a guarded step, on this rank.

    Args:
        modules: those that the step can reach.
    """

    def __init__(self, ranks: GuardedRanks, modules: Sequence[Module]) -> None:
        self._ranks = ranks
        self._has_agreed = self._is_reset = False
        self._catching_up: _CatchUpMode | None = None
        self._wrappers = [item for item in modules if isinstance(item, DistributedDataParallel)]
        for wrapper in self._wrappers:
            rebuild_buckets(wrapper)  # as its next forward would, so that this is not among the collectives of the step
        self._had_rebuilt = list(map(has_rebuilt_buckets, self._wrappers))
        self._has_unreduced = has_unreduced_gradients(modules)
        self._reset_sharding = resetting_sharding(modules)
        self._before = issued() if ranks.are_many else {}

    def agree(self) -> None:
        """Agree whether a rank was short: the first time that this run comes here.

        Raises:
            RankWasShort: one was.
        """
        if not self._ranks.are_many or self._has_agreed:
            return
        if self._catching_up is not None:
            self._catching_up.is_over = True
        if self._ranks.any_short(self._catching_up is not None):
            raise RankWasShort
        self._has_agreed = True

    def reset(self) -> None:
        """Let what communicates for a model be ready for another step, after one that an error may have ended."""
        if not self._is_reset:
            self._is_reset = True
            self._has_rebuilt = self._had_rebuilt != list(map(has_rebuilt_buckets, self._wrappers))
        self._reset_sharding()
        for wrapper in self._wrappers:
            reset_reducer(wrapper)

    def cannot_undo(self) -> str:
        """Say what cannot be put back; empty if all can."""
        return "fully_shard has gradients of earlier steps that it has not reduced" if self._has_unreduced else ""

    def catch_up(self, run: Callable[[], object], model: Module, policy: Policy) -> None:
        """Take part in the collectives that the other ranks wait for, and tell them that this one was short.

        Args:
            model: its model, which has a plan.
            policy: for the model meanwhile.

        Raises:
            CannotCatchUp: that cannot be.
            Exception: whatever the step raises.
        """
        reason = self._reason_against()
        if reason:
            raise CannotCatchUp(reason)
        now = issued()
        self._catching_up = _CatchUpMode({name: number - self._before.get(name, 0) for name, number in now.items()})
        with ExitStack() as stack:
            stack.enter_context(paused(model))
            stack.enter_context(apply(model, policy))
            for wrapper in self._wrappers:
                stack.enter_context(without_rebuilding(wrapper))
            stack.enter_context(self._catching_up)
            try:
                run()
            except RankWasShort:
                return
        raise CannotCatchUp("the step has come to its end in another way than before")

    def _reason_against(self) -> str:
        if self._has_agreed:
            return "the other ranks have gone on, and their optimizers with them"
        if any(wrapper.static_graph for wrapper in self._wrappers):
            return "DistributedDataParallel(static_graph=True) counts on every backward to end"
        if self._has_rebuilt:
            return "DistributedDataParallel has rebuilt its buckets in this step"
        return ""


class _CatchUpMode(DispatchMode):
    """Leaves out the collectives that this rank has issued before.

    Args:
        issued: how many these are, by the names of their groups.
    """

    def __init__(self, issued: dict[str, int]) -> None:
        super().__init__()
        self.is_over = False
        self._left = Counter(issued)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # tensors of tensors: their ops come here, too
            return NotImplemented
        group = None if self.is_over else group_name_of(func, args, kwargs)
        if group is None:
            return func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name in _TO_ONE_RANK:
            raise CannotCatchUp(f"the step sends to single ranks ({name}), which is not counted")
        if is_recomputed():
            raise CannotCatchUp(f"a recomputation has a collective ({name}), so that another plan has other ones")
        if self._left[group] > 0:
            self._left[group] -= 1
            return skipped_collective(func, args, kwargs)
        before = issued().get(group)
        result = func(*args, **kwargs)
        if before is None or issued()[group] != before + 1:
            raise CannotCatchUp(f"the collectives of group {group!r} are not counted one by one")
        return result
