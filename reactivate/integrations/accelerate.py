"""accelerate: `Accelerator.prepare` with a policy."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from reactivate._text.words import described
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations._hosts import check_host
from reactivate.integrations._training import Training

__all__ = ["prepare"]


def prepare(
    accelerator: Any,
    *objects: Any,
    policy: Policy | str | None = None,
    plan: str | os.PathLike[str] | None = None,
    budget: float | str | None = None,
) -> Any:
    """Prepare objects as `Accelerator.prepare` does, and apply a policy to the models among them.

    Paths in the policy are those of the model without the wrappers that accelerate adds. `reactivate.Handle.of(model)` is
    the handle, whose `remove` makes the model plain again.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: models, optimizers, loaders, schedulers.
        policy: a policy (see `reactivate.policies`), a plan, or the text of a policy: "full()".
        plan: a file that `Plan.save` wrote.
        budget: plan at the first training call of the model, for a peak of "8GiB" or "60%" as `reactivate.plan` takes it.
            The model must return the loss, its optimizer must be among the objects, and there may be one process.

    Returns:
        What `Accelerator.prepare` returns.

    Raises:
        UsageError: not exactly one of `policy`, `plan` and `budget` is given, or it cannot be understood; there is no
            model among the objects; `accelerator` cannot prepare; or accelerate is not installed.

    Examples:
        >>> import importlib.util, torch
        >>> from reactivate.integrations.accelerate import prepare
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)))
        >>> if importlib.util.find_spec("accelerate"):
        ...     from accelerate import Accelerator
        ...     model = prepare(Accelerator(cpu=True), model, policy="full()")
    """
    trainings = [Training("prepare", policy, plan, budget) for item in objects if isinstance(item, Module)]
    optimizers = [item for item in objects if isinstance(item, Optimizer)]
    _check(accelerator, trainings, optimizers, budget)
    prepared = accelerator.prepare(*objects)
    models = [item for item in (prepared if len(objects) > 1 else [prepared]) if isinstance(item, Module)]
    for training, model in zip(trainings, models):
        training.begin(model, *optimizers[:1])
    return prepared


def _check(
    accelerator: Any, trainings: list[Training], optimizers: list[Optimizer], budget: float | str | None
) -> None:
    check_host(find_spec("accelerate"), "integrations.accelerate.prepare", "accelerate")
    if not callable(getattr(accelerator, "prepare", None)):
        raise UsageError(f"prepare takes an accelerate.Accelerator first; got {described(accelerator)}.")
    if not trainings:
        raise UsageError("prepare: there is no model among the objects. Write prepare(accelerator, model, policy=...).")
    if budget is not None and (len(trainings), len(optimizers)) != (1, 1):
        raise UsageError(
            f"prepare(budget=...) plans for one model and its optimizer; got {len(trainings)} models and {len(optimizers)} "
            "optimizers. Plan before training, reactivate.plan(model, batch, budget=...), and pass the plan as policy=."
        )
