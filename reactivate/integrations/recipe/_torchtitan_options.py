"""The options that torchtitan has had under one name in all of its versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch.nn import Module

from reactivate.errors import UsageError
from reactivate.guards import DEFAULT
from reactivate.integrations.recipe._base import Example, Recipe, Settings
from reactivate.integrations.recipe._memory_budget import planned
from reactivate.planner.plan import Plan

FORCED = "force_recompute_mm_shapes_by_fqns"
NAMES = "a list of parts of the paths of Linear modules, such as ['moe.router.gate']"
SHARE = 0.5  # torchtitan's default


@dataclass(frozen=True, repr=False, kw_only=True)
class TorchtitanOptions(Recipe):
    """Options that torchtitan's configurations have in common."""

    mode: Any
    memory_budget: Annotated[float | None, "a number from 0 to 1"] = None
    visualize_memory_budget_pareto: Annotated[bool, "False"] = False
    preserve_rng_state: Annotated[bool, "True or False"] = True
    determinism_check: Annotated[Literal["default", "none"], "'default' or 'none'"] = "default"
    debug: Annotated[bool, "True or False"] = False

    def check_options(self, budget_mode: str) -> None:
        """See to it that the options fit together.

        Args:
            budget_mode: the mode that a memory budget is an option of.

        Raises:
            UsageError: they do not.
        """
        if self.debug and self.determinism_check == "none":
            raise UsageError(
                "recipe: debug=True compares every op of a recomputation, and determinism_check='none' compares nothing. "
                "Leave one out."
            )
        if self.mode != budget_mode:
            self._refuse_budget(budget_mode)
        elif self.visualize_memory_budget_pareto:
            raise UsageError(
                "recipe: visualize_memory_budget_pareto=True is not supported because a recipe writes no files; it takes "
                "False. Plan.frontier of what Recipe.policy_for returns has the points, and Plan.save draws them."
            )
        elif not 0 <= self.share <= 1:
            raise UsageError(
                f"recipe: memory_budget={self.memory_budget} is not allowed. It takes a number from 0, the least memory "
                "with which the step runs, to 1, that of the step without checkpointing."
            )

    def _refuse_budget(self, budget_mode: str) -> None:
        given = {
            "memory_budget": self.memory_budget,
            "visualize_memory_budget_pareto": self.visualize_memory_budget_pareto,
        }
        for name, value in given.items():
            if value is not None and value is not False:
                raise UsageError(
                    f"recipe: {name}={value!r} is an option of mode={budget_mode!r}, and mode is {self.mode!r}. Set that "
                    "mode, or leave the option out."
                )

    @property
    def share(self) -> float:
        """The memory budget."""
        return SHARE if self.memory_budget is None else self.memory_budget

    def plan_for(self, model: Module, example: Example | None) -> Plan:
        """Return the plan that the memory budget becomes."""
        return planned(model, self.share, example)

    def settings_with(self, early_stop: bool) -> Settings:
        """Return the settings, of which torchtitan's versions have all but one."""
        return Settings(
            DEFAULT if self.preserve_rng_state else DEFAULT.without("rng"),
            early_stop,
            "every" if self.debug else "first" if self.determinism_check == "default" else "none",
        )

    def settings_of_plan(self) -> Settings:
        """Return the settings under which a plan holds what it promises: those that it was simulated with."""
        settings = self.settings_with(early_stop=True)
        return settings if settings.check != "first" else Settings(settings.guards, True, "metadata")


def without(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return `given` without some fields."""
    return {name: value for name, value in given.items() if name not in names}
