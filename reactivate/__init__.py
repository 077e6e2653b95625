"""Activation checkpointing for PyTorch.

Drop activations in the forward pass, get them back in the backward pass, with every bit of every gradient unchanged.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reactivate import dropin, errors, guards, integrations, loss, policies, storage
    from reactivate._checkpoint import checkpoint
    from reactivate._inspect.explain import compare, explain
    from reactivate._inspect.verify import verify
    from reactivate._model.apply import apply
    from reactivate._model.handle import Handle
    from reactivate._passes.current import current_region
    from reactivate._passes.recomputing import is_recomputing
    from reactivate._region.sharing import shared_recompute
    from reactivate._site import site
    from reactivate._types import Recompute, Save, Site
    from reactivate.planner.api import plan
    from reactivate.planner.memory_guard import retry_on_oom
    from reactivate.planner.plan import Plan

__all__ = [
    "Handle",
    "Plan",
    "Recompute",
    "Save",
    "Site",
    "apply",
    "checkpoint",
    "compare",
    "current_region",
    "dropin",
    "errors",
    "explain",
    "guards",
    "integrations",
    "is_recomputing",
    "loss",
    "plan",
    "policies",
    "retry_on_oom",
    "shared_recompute",
    "site",
    "storage",
    "verify",
]

__version__ = "0.1.0"

# A name is imported when it is first used (PEP 562), so that a program only waits for what it uses. Names that are not in
# this table are modules of the package.
_MODULES = {
    "Handle": "_model.handle",
    "Plan": "planner.plan",
    "Recompute": "_types",
    "Save": "_types",
    "Site": "_types",
    "apply": "_model.apply",
    "checkpoint": "_checkpoint",
    "compare": "_inspect.explain",
    "current_region": "_passes.current",
    "explain": "_inspect.explain",
    "is_recomputing": "_passes.recomputing",
    "plan": "planner.api",
    "retry_on_oom": "planner.memory_guard",
    "shared_recompute": "_region.sharing",
    "site": "_site",
    "verify": "_inspect.verify",
}

# Rooms whose classes functions return, and which the reference names.
_ROOMS = ("planner", "report")

_NAMESPACES = ("policies", "storage", "loss", "errors", "guards", "dropin", "integrations")


if not TYPE_CHECKING:  # to which a module with a `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            module = import_module(f"reactivate.{_MODULES.get(name, name)}")
            # Bound here, so that this function runs once for each name.
            value = globals()[name] = getattr(module, name) if name in _MODULES else module
            return value
        if name in _ROOMS:
            return import_module(f"reactivate.{name}")
        if name.startswith("__"):
            raise AttributeError(f"reactivate has no {name!r}.")
        if name == "offload":  # as it is often called
            raise AttributeError("reactivate has no 'offload'. Storages are in a namespace: reactivate.storage.")
        words = import_module("reactivate._text.words")
        for room in _NAMESPACES:
            if name in import_module(f"reactivate.{room}").__all__ and name not in words.RENAMED:
                raise AttributeError(f"reactivate has no {name!r}. It is in a namespace: reactivate.{room}.{name}.")
        raise AttributeError(f"reactivate has no {name!r}.{words.did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
