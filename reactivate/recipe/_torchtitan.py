"""torchtitan's fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torch.nn import Module

from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT
from reactivate.policies import none
from reactivate.recipe._base import OP_OR_NUMBER, Recipe, Settings
from reactivate.recipe._layers import every, layers_of, recompute
from reactivate.recipe._selective_op import selective_op

_MODES = (
    "'none', 'full' or 'selective' (a memory budget is a setting of the compiler's: "
    "torch._functorch.config.activation_memory_budget)"
)
_FORCED = "force_recompute_mm_shapes_by_fqns"
_NAMES = "a list of parts of the paths of Linear modules, such as ['moe.router.gate']"


@dataclass(frozen=True, repr=False)
class Torchtitan(Recipe):
    """Fields of torchtitan: of 0.1 to 0.2, and those of 0.3 with the name of its class of checkpointing as `mode`."""

    whose = "torchtitan"

    mode: Annotated[Literal["none", "full", "selective"], _MODES]
    selective_ac_option: Annotated[str | int | None, OP_OR_NUMBER] = None
    per_op_sac_force_recompute_mm_shapes_by_fqns: Annotated[Sequence[str] | None, _NAMES] = None
    force_recompute_mm_shapes_by_fqns: Annotated[Sequence[str] | None, _NAMES] = None
    preserve_rng_state: Annotated[bool, "True or False"] = True
    determinism_check: Annotated[Literal["default", "none"], "'default' or 'none'"] = "default"
    early_stop: Annotated[bool, "True or False"] = True
    debug: Annotated[bool, "True or False"] = False

    def __post_init__(self) -> None:
        self._check_mode()
        self._check_forced()
        if self.debug and self.determinism_check == "none":
            raise UsageError(
                "recipe: debug=True compares every op of a recomputation, and determinism_check='none' compares nothing. "
                "Leave one out."
            )

    def _check_mode(self) -> None:
        option = self.selective_ac_option
        if option is not None and option != "op" and not re.fullmatch("[1-9][0-9]*", str(option)):
            raise UsageError(f"recipe: selective_ac_option={option!r} is not allowed. It takes {OP_OR_NUMBER}.")
        if option is not None and self.mode != "selective":
            raise UsageError(
                f"recipe: selective_ac_option={option!r} is an option of mode='selective', and mode is {self.mode!r}. "
                "Set that mode, or leave the option out."
            )
        if self.mode == "selective" and option is None and self.force_recompute_mm_shapes_by_fqns is None:
            raise UsageError(
                f"recipe: mode='selective' needs selective_ac_option: {OP_OR_NUMBER}. (Left out, it is '2' in torchtitan "
                "up to 0.2 and 'op' from 0.3 on.)"
            )

    def _check_forced(self) -> None:
        forced = self._forced()
        if len(forced) > 1:
            raise UsageError(f"recipe: {' and '.join(forced)} are an old and a new name for one thing. Leave one out.")
        if forced and not self._is_op():
            raise UsageError(
                f"recipe: {next(iter(forced))} is an option of mode='selective' with selective_ac_option='op'; got "
                f"mode={self.mode!r}, selective_ac_option={self.selective_ac_option!r}. Set these, or leave it out."
            )

    def _forced(self) -> dict[str, Sequence[str]]:
        """{field: names} for those of the two fields for forced recomputation that are given."""
        names = {name: getattr(self, name) for name in ("per_op_sac_" + _FORCED, _FORCED)}
        return {name: value for name, value in names.items() if value is not None}

    def _is_op(self) -> bool:
        is_since_3 = self.selective_ac_option is None and self.force_recompute_mm_shapes_by_fqns is not None
        return self.mode == "selective" and (self.selective_ac_option == "op" or is_since_3)

    def policy_for(self, model: Module) -> Policy:
        if self.mode == "none":
            return none()
        layers = layers_of(model)
        if self.mode == "full":
            return recompute(layers)
        if self._is_op():
            field, forced = next(iter(self._forced().items()), ("", None))
            return selective_op(layers, forced, field)
        return recompute(every(layers, int(self.selective_ac_option or 0), "selective_ac_option"))

    def settings(self) -> Settings:
        return Settings(
            DEFAULT if self.preserve_rng_state else DEFAULT.without("rng"),
            self.early_stop,
            "values" if self.debug else "first" if self.determinism_check == "default" else "none",
        )
