"""A plan that is made in training, at the first call of the model, for the arguments of that call.

Before the model's forward the step runs several times, as `reactivate.plan` says, and leaves model, gradients and random
numbers as they were. Then the plan is applied and the call goes on under it. A budget is a promise for the whole step, so
the loss must be in what the model returns: a loss that is computed outside of the model allocates memory that the plan
does not see, and is refused. In a process group the backwards of planning would start collectives: that is refused too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.optim import Optimizer

from reactivate._model.apply import apply
from reactivate._model.handle import Handle
from reactivate.errors import UsageError
from reactivate.planner.api import plan
from reactivate.planner.step import loss_in


class PlanAtFirstCall:
    """Plan for the first training call of a model, and apply the plan.

    Args:
        asked_by: the class or function that a user called, for errors.
        model: it is called with a batch.
        budget: as for `reactivate.plan`.
        optimizer: counts for the budget.

    Attributes:
        handle: that of the plan, once it is made.
    """

    def __init__(self, asked_by: str, model: Module, budget: str, optimizer: Optimizer | None) -> None:
        if distributed.is_available() and distributed.is_initialized():
            raise UsageError(
                f"{asked_by}(budget={budget!r}): a plan cannot be made in training in a process group, whose collectives "
                "the backwards of planning would start. Plan in one process, reactivate.plan(model, batch, "
                f"budget=...).save(path), and write {asked_by}(plan=path)."
            )
        self.handle: Handle | None = None
        self._asked_by = asked_by
        self._budget = budget
        self._optimizer = optimizer
        self._hook = model.register_forward_pre_hook(self._plan, prepend=True, with_kwargs=True)

    def stop(self) -> None:
        """Leave the calls of the model alone."""
        self._hook.remove()

    def _plan(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or not model.training:
            return
        self.stop()
        found = plan(model, args, kwargs, budget=self._budget, loss=self._loss_of, optimizer=self._optimizer)
        self.handle = apply(model, found)

    def _loss_of(self, output: Any) -> Tensor:
        loss = loss_in(output)
        if loss is None:
            raise UsageError(
                f"{self._asked_by}(budget={self._budget!r}): there is no loss in what the model returns, so the memory "
                "that it takes is not known. Return the loss from the model (for a model of transformers: pass labels), or "
                "plan before training with reactivate.plan(model, batch, budget=..., loss=...)."
            )
        return loss
