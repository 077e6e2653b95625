"""torchtitan's classes of activation checkpointing, since 0.3.

Its configuration is an object of one of the classes `FullAC.Config`, `SelectiveAC.Config` and `MemoryBudgetAC.Config`, or
None. A dump of it has the fields and not the name of the class, and no two classes have the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch.nn import Module

from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations.recipe._base import Example, Settings
from reactivate.integrations.recipe._layers import layers_of, recompute
from reactivate.integrations.recipe._selective_op import selective_op
from reactivate.integrations.recipe._torchtitan_options import FORCED, NAMES, TorchtitanOptions
from reactivate.policies import none

_COMMON = frozenset({"preserve_rng_state", "determinism_check", "debug"})
# The class that a dump is of.
_DUMPS = {
    _COMMON: "FullAC",
    _COMMON | {FORCED}: "SelectiveAC",
    _COMMON | {"memory_budget", "visualize_memory_budget_pareto"}: "MemoryBudgetAC",
}
CLASSES = tuple(_DUMPS.values())
# What its command line calls them.
_COMMANDS = {"full": "FullAC", "selective": "SelectiveAC", "memory-budget": "MemoryBudgetAC"}


@dataclass(frozen=True, repr=False, kw_only=True)
class TorchtitanClasses(TorchtitanOptions):
    """Fields of torchtitan 0.3, and the name of the class as `mode`."""

    whose = "torchtitan 0.3"

    mode: Annotated[
        Literal["FullAC", "SelectiveAC", "MemoryBudgetAC", "none"],
        "'FullAC', 'SelectiveAC', 'MemoryBudgetAC' or 'none'",
    ]
    force_recompute_mm_shapes_by_fqns: Annotated[Sequence[str] | None, NAMES] = None

    @classmethod
    def takes(cls, given: Mapping[str, Any]) -> bool:
        """Return whether `given` names a class, or has what only such a class has, or is the dump of one."""
        if not super().takes(given):
            return False
        return given.get("mode") in (*CLASSES, "memory-budget") or FORCED in given or frozenset(given) in _DUMPS

    @classmethod
    def prepared(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `given` with the class as its mode."""
        mode = given["mode"] if "mode" in given else _DUMPS.get(frozenset(given))
        return dict(given) if mode is None else {**given, "mode": _COMMANDS.get(str(mode), mode)}

    def __post_init__(self) -> None:
        if self.force_recompute_mm_shapes_by_fqns is not None and self.mode != "SelectiveAC":
            raise UsageError(
                f"recipe: {FORCED} is an option of mode='SelectiveAC', and mode is {self.mode!r}. Set that mode, or leave "
                "the option out."
            )
        self.check_options("MemoryBudgetAC")

    def policy_for(self, model: Module, example: Example | None = None) -> Policy:
        if self.mode == "none":
            return none()
        if self.mode == "MemoryBudgetAC":
            return self.plan_for(model, example)
        layers = layers_of(model)
        if self.mode == "FullAC":
            return recompute(layers)
        return selective_op(layers, self.force_recompute_mm_shapes_by_fqns, FORCED)

    def settings(self) -> Settings:
        return self.settings_of_plan() if self.mode == "MemoryBudgetAC" else self.settings_with(early_stop=False)
