"""`torch.compile`: as a peer, whose partitioner has a budget of its own, a share of what it would save; and of plans.

Every way has code of its own to compile: torch finds what it compiled by the code object, and would take the graphs of
one budget for those of another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from _frontier_models import Subject
from _frontier_peers import Call, Way
from _subjects import OURS
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

WHOLE, BLOCKS = "torch.compile, whole model", "torch.compile, by block"
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


def compiled_peers(subject: Subject, backend: str) -> list[Way]:
    """The whole model, and block by block, at each of `BUDGETS`."""
    ways = []
    for system, make in ((WHOLE, _whole), (BLOCKS, partial(_by_block, subject))):
        for budget in BUDGETS:
            ways.append(Way(system, f"budget {budget:g}", partial(make, backend), partial(_with_budget, budget), True))
    return ways


def compiled_plans(subject: Subject, backend: str) -> list[Way]:
    """Ways to compile a planned model: as a whole, or block by block, with nothing said of memory."""
    makes = ((WHOLE, _whole), (BLOCKS, partial(_by_block, subject)))
    first = partial(_with_budget, 1.0)
    return [Way(f"{OURS} in {system}", "", partial(make, backend), first, True) for system, make in makes]


def _whole(backend: str, model: nn.Module) -> Call:
    return partial(torch.compile(_own_code(), backend=backend, dynamic=False), model)


def _by_block(subject: Subject, backend: str, model: nn.Module) -> Call:
    """One function for all blocks, so that equal ones are compiled once."""
    compiled = torch.compile(_own_code(), backend=backend, dynamic=False)
    for block in subject.blocks_of(model):
        block.forward = partial(compiled, block.forward)  # type: ignore[method-assign]
    return model


def _own_code() -> Call:
    def call(model: Call, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return FunctionType(call.__code__.replace(co_name="call"), call.__globals__, "call")


def _with_budget(budget: float, step: Callable[[], object]) -> None:
    with functorch_config.patch(activation_memory_budget=budget), dynamo_config.patch(recompile_limit=64):
        step()
