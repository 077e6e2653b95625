"""Activation checkpointing for PyTorch.

Drop activations in the forward pass, get them back in the backward pass, with every bit of every gradient unchanged.
"""

from typing import Any

from reactivate import dropin, errors, guards, integrations, policies, recipe, report, storage
from reactivate._checkpoint import checkpoint
from reactivate._engine.current import current_region, is_recomputing
from reactivate._engine.sharing import shared_recompute
from reactivate._inspect.comparison import Comparison
from reactivate._inspect.explain import explain
from reactivate._inspect.explanation import Explanation
from reactivate._inspect.verify import Verdict, verify
from reactivate._loss.chunked import chunked_cross_entropy
from reactivate._model.apply import apply
from reactivate._model.handle import Handle
from reactivate._site import site
from reactivate._text.words import did_you_mean
from reactivate._types import Recompute, Save, Site
from reactivate.errors import ReactivateError
from reactivate.planner.adaptive import AdaptivePlan
from reactivate.planner.api import plan
from reactivate.planner.memory_guard import guard_memory
from reactivate.planner.plan import Plan

__all__ = [
    "AdaptivePlan",
    "Comparison",
    "Explanation",
    "Handle",
    "Plan",
    "ReactivateError",
    "Recompute",
    "Save",
    "Site",
    "Verdict",
    "apply",
    "checkpoint",
    "chunked_cross_entropy",
    "current_region",
    "dropin",
    "errors",
    "explain",
    "guard_memory",
    "guards",
    "integrations",
    "is_recomputing",
    "plan",
    "policies",
    "recipe",
    "report",
    "shared_recompute",
    "site",
    "storage",
    "verify",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in policies.__all__:
        raise AttributeError(f"reactivate has no {name!r}. Policies are in a namespace: reactivate.policies.{name}.")
    hint = "" if name.startswith("__") else did_you_mean(name, __all__)
    raise AttributeError(f"reactivate has no {name!r}.{hint}")
