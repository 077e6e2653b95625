"""torchtitan's fields, up to 0.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations.recipe._base import OP_OR_NUMBER, check_op_or_number
from reactivate.integrations.recipe._layers import Layers, every, recompute
from reactivate.integrations.recipe._selective_op import selective_op
from reactivate.integrations.recipe._torchtitan_classes import CLASSES, TorchtitanClasses
from reactivate.integrations.recipe._torchtitan_options import BUDGET, FORCED, NAMES, TorchtitanOptions

_MODES = "'none', 'full', 'selective' or 'memory_budget'; since 0.3 'FullAC', 'SelectiveAC' or 'MemoryBudgetAC'"
_FORCED = "per_op_sac_" + FORCED
_SELECTIVE = ("selective_ac_option", _FORCED)
# What torchtitan does not look at in a mode, and has in its configuration all the same.
_IGNORED = {
    "none": (*_SELECTIVE, *BUDGET),
    "full": (*_SELECTIVE, *BUDGET),
    "memory_budget": (*_SELECTIVE, "early_stop"),
}


@dataclass(frozen=True, repr=False, kw_only=True)
class Torchtitan(TorchtitanOptions):
    """Fields of torchtitan 0.1 to 0.2."""

    whose = "torchtitan"
    full_mode = "full"
    budget_mode = "memory_budget"

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
        ignored = _IGNORED.get(str(given["mode"]), ())
        if given["mode"] == "selective":
            ignored = BUDGET if given["selective_ac_option"] == "op" else (*BUDGET, _FORCED)
        return {name: value for name, value in given.items() if name not in ignored}

    def __post_init__(self) -> None:
        self._check_option()
        if self.per_op_sac_force_recompute_mm_shapes_by_fqns is not None and self.selective_ac_option != "op":
            raise UsageError(
                f"recipe: {_FORCED} is an option of mode='selective' with selective_ac_option='op'; got "
                f"mode={self.mode!r}, selective_ac_option={self.selective_ac_option!r}. Set these, or leave it out."
            )
        self.check_options()
        if self.mode == "memory_budget" and self.early_stop:
            raise UsageError(
                "recipe: early_stop=True is an option of mode='full' and mode='selective', and mode is 'memory_budget'. "
                "Leave it out."
            )

    def _check_option(self) -> None:
        option = self.selective_ac_option
        check_op_or_number("selective_ac_option", option)
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
    def stops_early(self) -> bool:
        return self.early_stop

    def selective(self, layers: Layers) -> Policy:
        if self.selective_ac_option == "op":
            return selective_op(layers, self.per_op_sac_force_recompute_mm_shapes_by_fqns, _FORCED)
        return recompute(every(layers, int(self.selective_ac_option or 0), "selective_ac_option"))
