"""torchtitan's classes of activation checkpointing, since 0.3.

Its configuration is an object of one of the classes `FullAC.Config`, `SelectiveAC.Config` and `MemoryBudgetAC.Config`, or
None. A dump of it has the fields and not the name of the class, and no two classes have the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Annotated, Any, Literal

from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations.recipe._layers import Layers
from reactivate.integrations.recipe._selective_op import selective_op
from reactivate.integrations.recipe._torchtitan_options import BUDGET, FORCED, NAMES, TorchtitanOptions

_COMMON = frozenset({"preserve_rng_state", "determinism_check", "debug"})
# The class that a dump is of.
_DUMPS = {
    _COMMON: "FullAC",
    _COMMON | {FORCED}: "SelectiveAC",
    _COMMON | set(BUDGET): "MemoryBudgetAC",
}
CLASSES = tuple(_DUMPS.values())
# What its command line calls them.
_COMMANDS = {"full": "FullAC", "selective": "SelectiveAC", "memory-budget": "MemoryBudgetAC"}


@dataclass(frozen=True, repr=False, kw_only=True)
class TorchtitanClasses(TorchtitanOptions):
    """Fields of torchtitan 0.3, and the name of the class as `mode`."""

    whose = "torchtitan 0.3"
    full_mode = "FullAC"
    budget_mode = "MemoryBudgetAC"

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
        self.check_options()

    def selective(self, layers: Layers) -> Policy:
        return selective_op(layers, self.force_recompute_mm_shapes_by_fqns, FORCED)


def is_object(source: Any) -> bool:
    """Return whether `source` is an instance of a dataclass."""
    return is_dataclass(source) and not isinstance(source, type)


def fields_of(source: Any) -> dict[str, Any]:
    """Return the fields of a configuration, as mappings and lists; with the class as the mode, where that is one.

    Raises:
        UsageError: it is of a class derived from one of torchtitan's, which may do anything.
    """
    given = asdict(source)
    if "mode" in given:
        return given
    owner, _, kind = type(source).__qualname__.rpartition(".")
    name = owner.rpartition(".")[2]
    if kind == "Config" and name in CLASSES:
        return {**given, "mode": name}
    raise UsageError(
        f"recipe: {type(source).__qualname__} is none of the classes that are known: {', '.join(CLASSES)}, each with its "
        "Config. A class of your own may save other ops: write its policy, as in {'policy': {'first_match': "
        "[{'save_ops': [...]}, 'full']}}."
    )
