"""torchax: a key of JAX's as the state of the random numbers, one for each thread.

Imported only where torchax is. Its device module has the functions that are looked for, but they do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from reactivate._backends.base import Backend


class TorchaxBackend(Backend):
    """The device type "jax"."""

    def is_initialized(self) -> bool:
        environment = _torchax().env  # None until `torchax.default_env()` makes it
        return environment is not None and hasattr(environment._property, "content")  # which is of one thread

    def read_rng(self) -> Sequence[Any]:
        return [_torchax().env.param.prng]

    def write_rng(self, states: Sequence[Any]) -> None:
        _torchax().env.param.prng = states[0]

    def is_same_rng(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        return first[0] is second[0]  # each draw puts another in its place


def _torchax() -> Any:
    return sys.modules["torchax"]


BACKEND = TorchaxBackend("jax", None)
