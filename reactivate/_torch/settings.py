"""Context variables in which modules of torch keep their settings: no state of a user's function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from reactivate._torch.private_api import resolve_private

_ConfigModule: Any = resolve_private(
    "telling the settings of torch's compilers from the context variables of a program",
    "torch.utils._config_module.ConfigModule",
    without=(),  # nothing is of that class
    lost="after a compilation, each region looks at the compiler's settings too: it takes longer",
)
_known: dict[ContextVar[Any], bool] = {}


def is_setting(variable: ContextVar[Any]) -> bool:
    """Return whether a variable is a setting of torch's: a compiler that has run keeps thousands of items in these."""
    found = _known.get(variable)
    if found is None:
        _known.update(dict.fromkeys(_settings(), True))
        found = _known.setdefault(variable, False)
    return found


def _settings() -> Iterator[ContextVar[Any]]:
    """Yield the context variables of all modules of settings that are imported."""
    for module in list(sys.modules.values()):
        if isinstance(module, _ConfigModule):
            overrides = (getattr(entry, "user_override", None) for entry in module._config.values())
            yield from (item for item in (*vars(module).values(), *overrides) if type(item) is ContextVar)
