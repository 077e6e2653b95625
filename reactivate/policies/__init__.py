"""Policies: functions from a site to an action, or to None where the site does as the call around it.

A policy is any callable `Site -> Action | None`. Those here are frozen values that compose.
"""

from typing import TYPE_CHECKING, Any

from reactivate._text.words import did_you_mean
from reactivate._types import Action, LossByRows, Policy, Recompute, Save, Site
from reactivate.policies.combine import every_nth, exclude, first_match, union
from reactivate.policies.heads import loss_by_rows
from reactivate.policies.layers import full, none, recompute_every, recompute_modules
from reactivate.policies.names import save_modules, save_names
from reactivate.policies.ops import compute_intensive, save, save_ops

__all__ = [
    "Action",
    "LossByRows",
    "Policy",
    "Recompute",
    "Save",
    "Site",
    "compute_intensive",
    "every_nth",
    "exclude",
    "first_match",
    "full",
    "loss_by_rows",
    "none",
    "recompute_every",
    "recompute_modules",
    "save",
    "save_modules",
    "save_names",
    "save_ops",
    "union",
]
__dir__ = __all__.copy


if not TYPE_CHECKING:  # to which a module with a `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        hint = "" if name.startswith("__") else did_you_mean(name, __all__)
        raise AttributeError(f"{__name__} has no {name!r}.{hint}")
