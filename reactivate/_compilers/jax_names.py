"""Names of JAX and torchax, as versions of them have them: torchax 0.0.6 to 0.0.14, JAX 0.7 to 0.10.

Only public ones, with one exception: of which environment a tensor is, torchax tells by no other name.
"""

from __future__ import annotations

import functools
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor


def is_tracing() -> bool:
    """Return whether JAX traces on this thread; False where torchax, or JAX, is not imported, or not wholly yet."""
    if not hasattr(sys.modules.get("torchax"), "tensor"):
        return False
    state, at_rest = _states()
    return bool(state() != at_rest)


@functools.cache
def _states() -> tuple[Any, Any]:
    """Return the function for the state of JAX's traces, and its result where nothing is traced: on a new thread."""
    try:
        state = importlib.import_module("jax.extend.core").get_opaque_trace_state
    except AttributeError:  # until JAX 0.7
        state = importlib.import_module("jax.core").get_opaque_trace_state
    with ThreadPoolExecutor(1) as pool:
        return state, pool.submit(state).result()


def jax() -> Any:
    """Return the module."""
    return sys.modules["jax"]


def is_of_jax(tensor: Tensor) -> bool:
    """Return whether a tensor is torchax's: an array, or a view of one."""
    kinds = sys.modules["torchax"].tensor
    return isinstance(tensor, (kinds.Tensor, kinds.View))


def root_of(tensor: Any) -> Any:
    """Return of a view, wherever it writes to; otherwise the tensor itself."""
    while hasattr(tensor, "parent"):
        tensor = tensor.parent
    return tensor


class Array:
    """The array in a tensor of torchax.

    Args:
        owner: the tensor, no view.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def read(self) -> Any:
        """Return the array."""
        return self.owner.jax()

    def write(self, array: Any) -> None:
        """Put another array in its place."""
        self.owner.apply_jax_(lambda _: array)


class Key:
    """The key of random numbers in an environment of torchax.

    Args:
        environment: torchax's.
    """

    def __init__(self, environment: Any) -> None:
        self.owner = environment.param

    def read(self) -> Any:
        """Return the key."""
        return self.owner.prng

    def write(self, key: Any) -> None:
        """Put another key in its place."""
        self.owner.prng = key


def environment_of(tensor: Any) -> Any:
    """Return the environment of a tensor, the default one where the tensor does not tell."""
    return getattr(tensor, "_env", None) or sys.modules["torchax"].default_env()
