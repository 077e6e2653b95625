"""The recipe and the enablement of TransformerEngine's autocast: those of the forward, in a recomputation."""

from __future__ import annotations

import sys
from typing import Any

from reactivate._setting import Rewound
from reactivate._types import Call, Guard
from reactivate.errors import UnsupportedError

# Where the class has been, the newest place first; and what its methods have been called.
_MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
_METHODS = (("get_autocast_state", "set_autocast_state"), ("get_fp8_autocast_state", "set_fp8_autocast_state"))


class AutocastState(Guard):
    """Recomputes under the autocast of the forward, which ends before the backward; nothing without TransformerEngine."""

    name = "fp8"

    def before(self, call: Call) -> Any:
        methods = _methods()
        return None if methods is None else (*methods, methods[0]())

    def recompute(self, snapshot: Any) -> Rewound:
        return Rewound(*snapshot)


def _methods() -> Any:
    """Return what reads the state and what writes it; None without TransformerEngine."""
    module = next((sys.modules[name] for name in _MODULES if name in sys.modules), None)
    if module is None:
        return None
    manager = module.FP8GlobalStateManager
    for names in _METHODS:
        if all(hasattr(manager, name) for name in names):
            return tuple(getattr(manager, name) for name in names)
    raise UnsupportedError(
        f"The autocast of this TransformerEngine cannot be restored in a recomputation: {module.__name__}."
        f"FP8GlobalStateManager has none of {', '.join(name for names in _METHODS for name in names)}. Use another version."
    )
