"""torchax: a key of JAX's as the state of the random numbers, one for each thread.

Imported only where torchax is. Its device module has the functions that are looked for, but they do nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from reactivate._backends.base import Backend


class TorchaxBackend(Backend):
    """The device type "jax"."""

    def is_initialized(self) -> bool:
        # The properties of 0.0.6 are there on one thread only.
        return hasattr(_environment(), "param")

    def read_rng(self) -> Any:
        return [_environment().param.prng]

    def write_rng(self, states: Any) -> None:
        _environment().param.prng = states[0]

    def is_same_rng(self, first: Any, second: Any) -> bool:
        return first[0] is second[0]  # each draw puts another in its place

    def synchronize(self) -> None:
        """Wait for nothing: torch does not know what JAX runs."""


def _environment() -> Any:
    """torchax's environment, None until somebody has asked torchax for it: it has no random numbers before."""
    known = vars(sys.modules["torchax"])
    for name in ("env", "_env"):  # until 0.0.6, and in 0.0.13
        if name in known:
            return known[name]
    make = known.get("default_env")  # missing while torchax is being imported
    return None if make is None else make()


BACKEND = TorchaxBackend("jax", None)
