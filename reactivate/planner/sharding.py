"""Models that `fully_shard` has sharded, on their way into a plan."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn import Module

from reactivate._modules.paths import is_below
from reactivate._text.words import described
from reactivate._torch.modules import is_sharded, prepare_sharding, sharded_class, sharding_state
from reactivate.errors import UnsupportedError, UsageError
from reactivate.planner.place import is_alone


def begin_sharded(model: Module) -> None:
    """Bring the parameters of a sharded model to where they are between two steps: each rank has its part of them.

    Raises:
        UnsupportedError: this torch does not show how they are sharded.
    """
    if not is_sharded(model):
        return
    kind = sharded_class()
    tops: list[tuple[str, Module]] = []
    for path, module in model.named_modules():
        if isinstance(module, kind):
            if sharding_state(module) is None:
                raise UnsupportedError(
                    f"plan: {path or 'the model'} is sharded by fully_shard, and this torch does not show how. Plan the "
                    "model first, then shard it: the plan can be applied before or after that."
                )
            module.reshard()
            if not any(is_below(path, above) for above, _ in tops):
                tops.append((path, module))
    if not any(parameter.is_meta for parameter in model.parameters()):
        for _, module in tops:
            prepare_sharding(module)


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
    for name, value in others.items():
        if value is not None:
            raise UnsupportedError(
                f"plan: group= is not supported with {name}=, with which ranks try unlike numbers of steps. Plan without it, "
                "or on one rank, and load the plan on all: Plan.save, Plan.load."
            )


_NOBODY = "fake"  # the backend of a group whose other ranks are not there
