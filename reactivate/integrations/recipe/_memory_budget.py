"""A memory budget in torchtitan's sense, which becomes a plan.

It is a share of what recomputation can save: 0 stands for the least memory with which the step runs, 1 for the memory of
the step without checkpointing. In torchtitan the compiler's partitioner reads it so, of one compiled graph's activations;
here it is the peak of the whole step.
"""

from __future__ import annotations

from torch.nn import Module

from reactivate.errors import PlanInfeasible, UsageError
from reactivate.integrations.recipe._base import Example
from reactivate.planner.api import plan
from reactivate.planner.plan import Plan


def planned(model: Module, share: float, example: Example | None) -> Plan:
    """Return the plan for a share of what recomputation can save.

    Args:
        model: the model.
        share: from 0 to 1.
        example: one call of it.

    Raises:
        UsageError: there is no example, or see `reactivate.plan`.
    """
    if example is None:
        raise UsageError(
            f"recipe: memory_budget={share} becomes a plan, and a plan is made for a batch; got none. Write "
            "recipe.apply(model, source, batch), with loss= if the model does not return its loss."
        )
    whole = plan(model, example.args, example.kwargs, budget="100%", loss=example.loss)
    least_bytes, plain_bytes = _least_bytes(whole), whole.plain.peak_bytes
    return whole.at(least_bytes + round(share * (plain_bytes - least_bytes)))


def _least_bytes(plan: Plan) -> int:
    try:
        return plan.at(1).budget_bytes
    except PlanInfeasible as error:
        return error.least_bytes
