"""torchtitan's fields, up to 0.2."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from torch.nn import Module

from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations.recipe._base import OP_OR_NUMBER, Example, Settings
from reactivate.integrations.recipe._layers import every, layers_of, recompute
from reactivate.integrations.recipe._selective_op import selective_op
from reactivate.integrations.recipe._torchtitan_classes import CLASSES, TorchtitanClasses
from reactivate.integrations.recipe._torchtitan_options import FORCED, NAMES, TorchtitanOptions, without
from reactivate.policies import none

_MODES = "'none', 'full', 'selective' or 'memory_budget'; since 0.3 'FullAC', 'SelectiveAC' or 'MemoryBudgetAC'"
_FORCED = "per_op_sac_" + FORCED
_BUDGET = ("memory_budget", "visualize_memory_budget_pareto")
_SELECTIVE = ("selective_ac_option", _FORCED)
# What torchtitan does not look at in a mode, and has in its configuration all the same.
_IGNORED = {
    "none": (*_SELECTIVE, *_BUDGET),
    "full": (*_SELECTIVE, *_BUDGET),
    "memory_budget": (*_SELECTIVE, "early_stop"),
}


@dataclass(frozen=True, repr=False, kw_only=True)
class Torchtitan(TorchtitanOptions):
    """Fields of torchtitan 0.1 to 0.2."""

    whose = "torchtitan"

    mode: Annotated[Literal["none", "full", "selective", "memory_budget"], _MODES]
    selective_ac_option: Annotated[str | int | None, OP_OR_NUMBER] = None
    per_op_sac_force_recompute_mm_shapes_by_fqns: Annotated[Sequence[str] | None, NAMES] = None
    early_stop: Annotated[bool, "True or False"] = False

    @classmethod
    def takes(cls, given: Mapping[str, Any]) -> bool:
        return super().takes(given) and given.get("mode") not in CLASSES and not TorchtitanClasses.takes(given)

    @classmethod
    def prepared(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what of `given` has a meaning: the whole configuration of 0.2.2 has the options of every mode in it."""
        if given.keys() != {item.name for item in fields(cls)}:
            return given
        if given["mode"] == "selective":
            return without(given, _BUDGET if given["selective_ac_option"] == "op" else (*_BUDGET, _FORCED))
        return without(given, _IGNORED.get(str(given["mode"]), ()))

    def __post_init__(self) -> None:
        self._check_option()
        if self._forced is not None and not self._is_op:
            raise UsageError(
                f"recipe: {_FORCED} is an option of mode='selective' with selective_ac_option='op'; got "
                f"mode={self.mode!r}, selective_ac_option={self.selective_ac_option!r}. Set these, or leave it out."
            )
        self.check_options("memory_budget")
        if self.mode == "memory_budget" and self.early_stop:
            raise UsageError(
                "recipe: early_stop=True is an option of mode='full' and mode='selective', and mode is 'memory_budget'. "
                "Leave it out."
            )

    def _check_option(self) -> None:
        option = self.selective_ac_option
        if option is not None and option != "op" and not re.fullmatch("[1-9][0-9]*", str(option)):
            raise UsageError(f"recipe: selective_ac_option={option!r} is not allowed. It takes {OP_OR_NUMBER}.")
        if option is not None and self.mode != "selective":
            raise UsageError(
                f"recipe: selective_ac_option={option!r} is an option of mode='selective', and mode is {self.mode!r}. "
                "Set that mode, or leave the option out."
            )
        if self.mode == "selective" and option is None:
            raise UsageError(
                f"recipe: mode='selective' needs selective_ac_option: {OP_OR_NUMBER}. (Left out, it is '2' in torchtitan "
                "up to 0.2, and 0.3 has 'op' alone: mode='SelectiveAC'.)"
            )

    @property
    def _forced(self) -> Sequence[str] | None:
        return self.per_op_sac_force_recompute_mm_shapes_by_fqns

    @property
    def _is_op(self) -> bool:
        return bool(self.mode == "selective" and self.selective_ac_option == "op")

    def policy_for(self, model: Module, example: Example | None = None) -> Policy:
        if self.mode == "none":
            return none()
        if self.mode == "memory_budget":
            return self.plan_for(model, example)
        layers = layers_of(model)
        if self.mode == "full":
            return recompute(layers)
        if self._is_op:
            return selective_op(layers, self._forced, _FORCED)
        return recompute(every(layers, int(self.selective_ac_option or 0), "selective_ac_option"))

    def settings(self) -> Settings:
        return self.settings_of_plan() if self.mode == "memory_budget" else self.settings_with(self.early_stop)
