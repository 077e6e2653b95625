"""Activation checkpointing for PyTorch.

Drop activations in the forward pass, get them back in the backward pass, with every bit of every gradient unchanged.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reactivate import dropin, errors, guards, integrations, policies, recipe, report, storage
    from reactivate._checkpoint import checkpoint
    from reactivate._inspect.comparison import Comparison
    from reactivate._inspect.explain import explain
    from reactivate._inspect.explanation import Explanation
    from reactivate._inspect.verify import Verdict, verify
    from reactivate._loss.chunked import chunked_cross_entropy
    from reactivate._model.apply import apply
    from reactivate._model.handle import Handle
    from reactivate._passes.current import current_region, is_recomputing
    from reactivate._region.sharing import shared_recompute
    from reactivate._site import site
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

# A name is imported when it is first used (PEP 562), so that a program only waits for what it uses. Names that are not in
# this table are modules of the package.
_MODULES = {
    "AdaptivePlan": "planner.adaptive",
    "Comparison": "_inspect.comparison",
    "Explanation": "_inspect.explanation",
    "Handle": "_model.handle",
    "Plan": "planner.plan",
    "ReactivateError": "errors",
    "Recompute": "_types",
    "Save": "_types",
    "Site": "_types",
    "Verdict": "_inspect.verify",
    "apply": "_model.apply",
    "checkpoint": "_checkpoint",
    "chunked_cross_entropy": "_loss.chunked",
    "current_region": "_passes.current",
    "explain": "_inspect.explain",
    "guard_memory": "planner.memory_guard",
    "is_recomputing": "_passes.current",
    "plan": "planner.api",
    "shared_recompute": "_region.sharing",
    "site": "_site",
    "verify": "_inspect.verify",
}


if not TYPE_CHECKING:  # to which a module with a `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            module = import_module(f"reactivate.{_MODULES.get(name, name)}")
            # Bound here, so that this function runs once for each name.
            value = globals()[name] = getattr(module, name) if name in _MODULES else module
            return value
        if name.startswith("__"):
            raise AttributeError(f"reactivate has no {name!r}.")
        if name in import_module("reactivate.policies").__all__:
            raise AttributeError(
                f"reactivate has no {name!r}. Policies are in a namespace: reactivate.policies.{name}."
            )
        did_you_mean = import_module("reactivate._text.words").did_you_mean
        raise AttributeError(f"reactivate has no {name!r}.{did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
