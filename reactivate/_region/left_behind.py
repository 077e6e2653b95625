"""A second look, in calls that are compared: whether a recomputation has left anything behind (Rule 25).

It shares nothing with what puts state back, and asks the modules, torch and Python themselves. So it also sees what that
forgets: statistics that have moved twice, hooks that are there twice, a stream that has gone on.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reactivate._bits import checksum_of
from reactivate._region import errors_text
from reactivate._region.naming import modules_of
from reactivate._snapshot.held import ATOMS
from reactivate._torch.modes import function_modes, run_unseen
from reactivate._torch.modules import is_flat_wrapper

if TYPE_CHECKING:
    from reactivate._region.region import Region


_COMPARED = ATOMS | {type}
"""The classes of attributes that are compared."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class LeftBehind:
    """The state around a region before a recomputation.

    Where other threads run, these may change it meanwhile, and an accelerator's own threads gradients: that is not looked at.

    Args:
        region: the region.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._before = None if threading.active_count() > 1 else self._look()

    def refuse(self) -> None:
        """Raise if the recomputation, which is over, has changed anything for good.

        Raises:
            RecomputeMismatchError: what it has changed.
        """
        if self._before is None or threading.active_count() > 1:
            return
        now = self._look()
        for what, value in self._before.items():
            found = now.get(what, value)  # a sharding library may have another form of a parameter there
            if found is not value and found != value:  # a NaN is unlike itself
                raise self._region.options.exception(errors_text.left_behind(self._region, what))

    def _look(self) -> dict[str, Any]:
        options = self._region.options
        found: dict[str, Any] = {}
        if options.restores_modules:
            for path, module in modules_of(self._region):
                found.update(_of_module(module, path))
        if options.random:
            found.update(run_unseen(dict, _of_streams()))
        if any(guard.name == "ambient" for guard in options.asked):
            found.update(_of_settings())
        return found


def _of_module(module: torch.nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Return (what it is, its value) of the state of one module, without those that it contains."""
    yield f"hooks of `{path}`", [tuple(vars(module).get(name, ())) for name in _HOOKS]
    if is_flat_wrapper(type(module)):
        return
    for name, value in vars(module).items():
        if type(value) in _COMPARED:
            yield f"the attribute `{path}.{name}`", value
    for name, buffer in module._buffers.items():
        if buffer is not None and _is_plain(buffer):
            yield f"the buffer `{path}.{name}`", (id(buffer), run_unseen(_bits_of, buffer))
    for name, parameter in module._parameters.items():
        if parameter is not None and _is_plain(parameter):
            gradient = parameter.grad
            seen = (id(gradient), None if gradient is None else gradient._version)
            yield f"the gradient of `{path}.{name}`", (*seen, parameter.requires_grad)
            hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            yield f"hooks of `{path}.{name}`", [tuple(item or ()) for item in hooks]


def _is_plain(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.layout is torch.strided
    return is_plain and not (tensor.is_quantized or tensor.is_nested)


def _bits_of(tensor: Tensor) -> int:
    return int(checksum_of(tensor)) if tensor.data_ptr() else 0  # there are no elements, or no memory for them


def _of_settings() -> Iterator[tuple[str, Any]]:
    yield "the default dtype", torch.get_default_dtype()
    yield "the choice of deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield (
        "autocast",
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
    )
    yield "function modes", list(map(id, function_modes()))


def _of_streams() -> Iterator[tuple[str, Any]]:
    yield "torch's random numbers", bytes(torch.get_rng_state().numpy())
    yield "Python's random numbers", random.getstate()
    if "numpy.random" in sys.modules:
        yield "NumPy's random numbers", pickle.dumps(sys.modules["numpy.random"].get_state(legacy=False))
