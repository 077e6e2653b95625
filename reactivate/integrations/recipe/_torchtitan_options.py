"""The options that torchtitan has had under one name in all of its versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch.nn import Module

from reactivate._options import CheckMode
from reactivate._types import Policy
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.guards import DEFAULT
from reactivate.integrations.recipe._base import Example, Recipe, Settings
from reactivate.integrations.recipe._layers import Layers, layers_of, recompute
from reactivate.planner.api import plan
from reactivate.planner.plan import Plan
from reactivate.policies import none

FORCED = "force_recompute_mm_shapes_by_fqns"
BUDGET = ("memory_budget", "visualize_memory_budget_pareto")
NAMES = "a list of parts of the paths of Linear modules, such as ['moe.router.gate']"
SHARE = 0.5  # torchtitan's default


@dataclass(frozen=True, repr=False, kw_only=True)
class TorchtitanOptions(Recipe):
    """Options that torchtitan's configurations have in common. A subclass says what it calls its modes."""

    full_mode: ClassVar[str]
    budget_mode: ClassVar[str]

    mode: Any
    memory_budget: Annotated[float | None, "a number from 0 to 1"] = None
    visualize_memory_budget_pareto: Annotated[bool, "False"] = False
    preserve_rng_state: Annotated[bool, "True or False"] = True
    determinism_check: Annotated[Literal["default", "none"], "'default' or 'none'"] = "default"
    debug: Annotated[bool, "True or False"] = False

    @property
    def stops_early(self) -> bool:
        """False, as in torchtitan where it has no option for it."""
        return False

    def selective(self, layers: Layers) -> Policy:
        """Return the policy of the selective mode."""
        raise NotImplementedError

    def policy_for(self, model: Module, example: Example | None = None) -> Policy:
        if self.mode == "none":
            return none()
        if self.mode == self.budget_mode:
            return _planned(model, self._share, example)
        layers = layers_of(model)
        return recompute(layers) if self.mode == self.full_mode else self.selective(layers)

    def settings(self) -> Settings:
        guards = DEFAULT if self.preserve_rng_state else DEFAULT.without("rng")
        is_plan = self.mode == self.budget_mode  # it holds what it promises under the settings it was simulated with
        check: CheckMode = "metadata" if is_plan else "first"
        if self.debug or self.determinism_check == "none":
            check = "every" if self.debug else "none"
        return Settings(guards, is_plan or self.stops_early, check)

    def check_options(self) -> None:
        """See to it that the options fit together.

        Raises:
            UsageError: they do not.
        """
        if self.debug and self.determinism_check == "none":
            raise UsageError(
                "recipe: debug=True compares every op of a recomputation, and determinism_check='none' compares nothing. "
                "Leave one out."
            )
        if self.mode != self.budget_mode:
            self._refuse_budget()
        elif self.visualize_memory_budget_pareto:
            raise UsageError(
                "recipe: visualize_memory_budget_pareto=True is not supported because a recipe writes no files; it takes "
                "False. Plan.frontier of what Recipe.policy_for returns has the points, and Plan.save draws them."
            )
        elif not 0 <= self._share <= 1:
            raise UsageError(
                f"recipe: memory_budget={self.memory_budget} is not allowed. It takes a number from 0, the least memory "
                "with which the step runs, to 1, that of the step without checkpointing."
            )

    def _refuse_budget(self) -> None:
        for name in BUDGET:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise UsageError(
                    f"recipe: {name}={value!r} is an option of mode={self.budget_mode!r}, and mode is {self.mode!r}. Set "
                    "that mode, or leave the option out."
                )

    @property
    def _share(self) -> float:
        return SHARE if self.memory_budget is None else self.memory_budget


def _planned(model: Module, share: float, example: Example | None) -> Plan:
    """Return the plan for a share, from 0 to 1, of what recomputation can save.

    0 stands for the least memory with which the step runs, 1 for the memory of the step without checkpointing. In torchtitan
    the compiler's partitioner reads it so, of one compiled graph's activations; here it is the peak of the whole step.

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
