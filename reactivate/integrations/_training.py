"""A policy on the model of a host: applied when training begins, removed when it ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from reactivate._model.apply import apply
from reactivate._model.handle import Handle
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations._first_call import PlanAtFirstCall
from reactivate.integrations.recipe._text import parse_policy
from reactivate.planner.budget import parse
from reactivate.planner.plan import Plan


class Training:
    """A policy, a plan or a budget, and the model on which it is while that is trained.

    Args:
        asked_by: the class or function that a user called, for errors.
        policy: a policy, or its text as the command line takes it.
        plan: a file that `Plan.save` wrote.
        budget: as for `reactivate.plan`.

    Raises:
        UsageError: not exactly one of the three is given, or it cannot be understood.
    """

    def __init__(
        self,
        asked_by: str,
        policy: Policy | str | None,
        plan: str | os.PathLike[str] | None,
        budget: float | str | None,
    ) -> None:
        given = [name for name, value in (("policy", policy), ("plan", plan), ("budget", budget)) if value is not None]
        if len(given) != 1:
            raise UsageError(
                f"{asked_by} takes one of policy=, plan= and budget=; got {' and '.join(given) or 'none of them'}. Write, "
                f"say, {asked_by}(policy='full()')."
            )
        self.asked_by = asked_by
        self._budget = None if budget is None else parse(budget).text
        if plan is not None:
            policy = Plan.load(Path(plan))
        self._policy = parse_policy(policy, f"{asked_by}(policy=...)") if isinstance(policy, str) else policy
        self._handle: Handle | None = None
        self._planning: PlanAtFirstCall | None = None

    def begin(self, model: Module, optimizer: Optimizer | None = None) -> None:
        """Apply the policy; with a budget, plan at the first call of the model.

        Args:
            model: as the host has it, in its wrappers.
            optimizer: of the model, for a budget.
        """
        self.end()
        model = without_wrappers(model)
        if self._policy is not None:
            self._handle = apply(model, self._policy)
        else:
            assert self._budget is not None
            self._planning = PlanAtFirstCall(self.asked_by, model, self._budget, optimizer)

    @property
    def handle(self) -> Handle | None:
        """The handle of what is applied now; None before the beginning, after the end and until a plan is made."""
        return self._handle if self._planning is None else self._planning.handle

    def end(self) -> None:
        """Make the model what it was before `begin`. A second time does nothing."""
        handle = self.handle
        if self._planning is not None:
            self._planning.stop()
        self._planning = self._handle = None
        if handle is not None:
            with handle:  # leaves a policy that the model had before
                pass

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handle": None, "_planning": None}  # a copy has no part in this training


def without_wrappers(model: Module) -> Module:
    """Return the model in the wrappers of data parallelism and `torch.compile`.

    Examples:
        >>> import torch
        >>> from reactivate.integrations._training import without_wrappers
        >>> model = torch.nn.Linear(2, 2)
        >>> without_wrappers(torch.compile(model)) is model
        True
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := model._modules.get("_orig_mod"), Module):
            model = compiled
        else:
            return model
