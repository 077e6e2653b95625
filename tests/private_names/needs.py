"""The checks of private names of torch, by name: files that are named `needs_of_*.py` register them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from reactivate import _torch
from reactivate._torch import private_api

CHECKS: dict[str, Callable[[], None]] = {}
FILES = [importlib.import_module(f"reactivate._torch.{item.name}") for item in pkgutil.iter_modules(_torch.__path__)]
PARTS = [item for item in FILES if item is not private_api]
room: Any = SimpleNamespace(**{name: value for part in PARTS for name, value in vars(part).items()})


def needs(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The attributes asked for below are all that the package asks of `names`."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register
