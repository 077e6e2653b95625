"""The name of a call inside of a unit: of one of torch's modules without parts, or of a function.

A function's calls are numbered in the module in which they are made, so that a number does not depend on what else is saved.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.nn import Module

from reactivate._types import Site


class CallName(NamedTuple):
    """A call inside of a unit.

    Attributes:
        path: below the unit: the module that is called, or the one in which a function is called.
        op: the function, by the name that `save_ops` takes; "" for the call of the module.
        number: of the call among those of the function in that module.
    """

    path: str
    op: str = ""
    number: int = 0


def is_torchs_leaf(module: Module) -> bool:
    """Return whether a module is one of torch's own without modules inside: its call is looked at as a whole."""
    return type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())


def name_of_function_call(site: Site, unit: str) -> CallName:
    """Return the name of a function's call, and count it: ask once for each call.

    Args:
        site: the call.
        unit: the path of the unit.
    """
    path = site.path[len(unit) :].removeprefix(".")
    key = ("planned", site.path, site.op)
    number = site.counts.get(key, 0)
    site.counts[key] = number + 1
    return CallName(path, site.op or "", number)
