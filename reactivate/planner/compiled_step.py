"""The compiled step of a plan: its model under torch.compile, as one graph.

The memory of a compiled step is that of its graphs. torch's partitioner keeps what the plan keeps, and recomputes what the
plan recomputes; but the graph of the backward hands over the gradients of all parameters when it ends, where eager adds each
to those that are there and frees it. A simulated step in which gradients stay (`TrainingStep.is_compiled`) has the peak of
the graph as it was traced; what the code that a backend generates takes beside, only a run tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from reactivate._text.words import described
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner.budget import Budget, parse
from reactivate.planner.plan import Plan
from reactivate.planner.step import TrainingStep

DEFAULT_BACKEND = "inductor"


def compiled_step(step: TrainingStep, compiled: bool | str) -> TrainingStep:
    """Return the step with its model compiled.

    Args:
        step: the step.
        compiled: true for torch's default backend, or the name of one.

    Raises:
        UsageError: the step is a function of the user's, in which the model is called as it is.
    """
    check_compiled("measure", compiled)
    if step.whole is not None:
        raise UsageError(
            "measure(compiled=...): the step of this plan is a function of yours, which calls the model as it is. Compile "
            "the model in it, and measure without compiled=; or plan with args and loss=."
        )
    torch.compiler.reset()  # it would take the graphs of one plan for those of another
    backend = DEFAULT_BACKEND if compiled is True else compiled
    model: Any = torch.compile(step.model, backend=backend, dynamic=False)  # type: ignore[arg-type]
    return replace(step, model=model)


def check_compiled(asked_by: str, compiled: Any, **others: Any) -> None:
    """Refuse what is neither true, false nor the name of a backend, and what a compiled step cannot have."""
    if not isinstance(compiled, bool) and compiled not in (backends := torch.compiler.list_backends(None)):
        raise UsageError(
            f"{asked_by}(compiled={described(compiled)}): it takes True, False, or the name of a backend of torch.compile: "
            f"{', '.join(map(repr, backends))}."
        )
    for name, value in others.items():
        if compiled and value:
            raise UsageError(f"{asked_by}(compiled={compiled!r}) is not supported with {name}=, {_WHY_NOT[name]}.")


_WHY_NOT = {
    "step": "in which the model is called as it is: pass args and loss=",
    "maximize": "which tries many sizes, each to be compiled: maximize first, then plan with a batch of that size",
    "storages": "since what a compiled region keeps stays on the device",
}


def holding_compiled(found: Plan, compiled: bool | str, plan: Callable[[Budget], Plan]) -> Plan:
    """Return a plan whose compiled step was run and holds the budget.

    Each plan that does not hold is tightened by what it takes too much. What stays when no smaller plan takes less is the
    compiler's: then there is none.

    Args:
        found: the plan for the budget, simulated.
        compiled: as for `compiled_step`.
        plan: from a smaller budget to its plan.

    Raises:
        PlanInfeasible: there is none; says what the smallest one takes.
    """
    asked, least_bytes, tried = found, 0, 0
    while True:
        measured = found.measure(compiled=compiled).measured_bytes
        tried += 1
        if measured <= asked.budget_bytes:
            proof = replace(found.proof, method="compiled", peak_bytes=measured, rounds=tried)
            return replace(found, budget=asked.budget, budget_bytes=asked.budget_bytes, proof=proof)
        least_bytes = min(measured, least_bytes or measured)
        over_bytes = measured - asked.budget_bytes
        try:
            found = plan(parse(min(found.budget_bytes, found.predicted.peak_bytes) - over_bytes))
        except (PlanInfeasible, UsageError):
            raise PlanInfeasible(
                f"plan(budget={asked.budget!r}, compiled={compiled!r}): no compiled step keeps within {asked.budget_bytes} "
                f"bytes; the smallest that was found takes {least_bytes}. The graph of its backward holds the gradients of "
                "all parameters at once: compile block by block, or raise the budget.",
                budget_bytes=asked.budget_bytes,
                least_bytes=least_bytes,
            ) from None
