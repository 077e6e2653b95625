"""From a budget to a plan: profile a step, solve, prove.

`reactivate.plan` is the way in. `devices` has what named devices can do.
"""

from importlib import import_module
from typing import Any

_NAMED = ("adaptive", "contents", "runner")
"""Files whose classes the reference names: imported when they are used."""


def __getattr__(name: str) -> Any:
    if name in _NAMED:
        return import_module(f"reactivate.planner.{name}")
    raise AttributeError(f"reactivate.planner has no {name!r}.")
