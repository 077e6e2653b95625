"""Several ranks: those that plan one step together, and models that `fully_shard` has sharded.

Each rank plans with its own numbers, and all of them make the same exchanges: what they decide together they gather
first, and decide from the same values. An error on one rank reaches the others in the place of the next value, so that
all raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn import Module

from reactivate._text.words import described
from reactivate._torch.modules import are_on_host, is_sharded, prepare_sharding, sharded_class, sharding_state
from reactivate._torch.ops import issued
from reactivate.errors import UnsupportedError, UsageError
from reactivate.planner.target import is_alone

Value = TypeVar("Value")


def on_host(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that works on the host: an accelerator would have to finish its work first.

    Every rank must come to this call.
    """
    if dist.get_backend(group) == "gloo":
        return group
    return _on_host(group)


def _on_host(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    found: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return found


class Ranks:
    """The ranks of a process group, or this one alone.

    Args:
        group: the group; None: this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._are_told = group is None  # that one of them has failed

    @property
    def is_alone(self) -> bool:
        """Return whether there are no other ranks."""
        return self._group is None

    def apart(self) -> Ranks:
        """Return the same ranks in a group of their own, on the host. Every rank must come to this call.

        Its collectives wait for no accelerator, and are not among those of a step.
        """
        return self if self._group is None else Ranks(_on_host(self._group))

    def issued(self) -> int:
        """Return how many collectives there were in the group."""
        return 0 if self._group is None else issued()[self._group.group_name]

    @property
    def number(self) -> int:
        """Return the number of this one, from 0 on."""
        return 0 if self._group is None else dist.get_rank(self._group)

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in their order. Every rank must come to this call.

        Raises:
            UsageError: another rank has failed.
        """
        if self._group is None:
            return [value]
        found = self._exchanged(("value", value))
        errors = {rank: text for rank, (kind, text) in enumerate(found) if kind == "error"}
        if errors:
            self._are_told = True
            rank, text = next(iter(errors.items()))
            raise UsageError(f"plan: rank {rank} of the {len(found)} that plan together raised {text}")
        return [item for _, item in found]

    def check_same(self, name: str, value: Any) -> None:
        """See to it that all ranks have the same value.

        Raises:
            UsageError: they do not.
        """
        found = self.gather(value)
        other = next((rank for rank, item in enumerate(found) if item != found[0]), None)
        if other is None:
            return
        self._are_told = True
        raise UsageError(
            f"plan: {name} of rank {other} differs from that of rank 0: {_difference(found[other], found[0])}. All ranks of "
            "group= need the same plan, so they must plan the same model in the same way."
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, an error on one rank is one on all of them: at their next exchange, or within the timeout of the group."""
        try:
            yield
            self.gather(None)
        except BaseException as error:
            if not self._are_told:
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        self._are_told = True
        try:
            self._exchanged(("error", f"{type(error).__name__}: {error}"))
        except RuntimeError:  # the others are gone: this rank's own error is the one to see
            return

    def _exchanged(self, item: tuple[str, Any]) -> list[tuple[str, Any]]:
        found: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(found, item, group=self._group)
        except BaseException:
            self._are_told = True
            raise
        return found


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{len(one)} for {len(other)}"
        return next(_difference(mine, its) for mine, its in zip(one, other) if mine != its)
    return f"{one!r} for {other!r}"


# -- sharded models ---------------------------------------------------------------------------------------------------


def begin_sharded(model: Module) -> None:
    """Bring the parameters of a sharded model to where they are between two steps: each rank has its part of them.

    Raises:
        UnsupportedError: this torch does not show how they are sharded; or they are on the meta device and are to lie in the
            memory of the host.
    """
    if not is_sharded(model):
        return
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    if is_meta and are_on_host(model.modules()):
        raise UnsupportedError(
            f"plan: fully_shard keeps the parameters of this {type(model).__name__} on the host (CPUOffloadPolicy), and a "
            "model on the meta device is planned in the memory of one device. Shard it without offload_policy= for the plan: "
            "its peak then has the parameters, their gradients and the optimizer in it. Or plan on the ranks of the job: "
            "plan(..., group=torch.distributed.group.WORLD)."
        )
    kind = sharded_class()
    for path, module in model.named_modules():
        if isinstance(module, kind):
            if sharding_state(module) is None:
                raise UnsupportedError(
                    f"plan: {path or 'the model'} is sharded by fully_shard, and this torch does not show how. Plan the "
                    "model first, then shard it: the plan can be applied before or after that."
                )
            module.reshard()
    if not is_meta:
        prepare_sharding(model.modules())


def check_group(model: Module, group: Any, **others: Any) -> None:
    """See to it that the ranks of a group can plan together, and that those of a sharded model do.

    Raises:
        UsageError: they do not, or `group` is none.
        UnsupportedError: one of the other arguments goes only without a group.
    """
    if group is None:
        if is_sharded(model) and not is_alone() and dist.get_backend() != _NOBODY:
            raise UsageError(
                f"plan: this {type(model).__name__} is sharded by fully_shard, and a recomputation may gather parameters, so "
                "all ranks need the same plan. Call plan on each of them, with the group of those that run the step "
                "together: plan(..., group=torch.distributed.group.WORLD)."
            )
        return
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise UsageError(f"plan: group= takes a process group that this process is in; got {described(group)}.")
    if dist.get_backend(group) == _NOBODY:
        raise UsageError(
            "plan: group= takes ranks that make this call together; those of this group are not there (its backend is "
            f"{_NOBODY!r}). Leave group= out: the plan is that of this rank."
        )
    for name, value in others.items():
        if value is not None:
            raise UnsupportedError(
                f"plan: group= is not supported with {name}=, with which ranks try unlike numbers of steps. Plan without it, "
                "or on one rank, and load the plan on all: Plan.save, Plan.load."
            )


_NOBODY = "fake"  # the backend of a group whose other ranks are not there
