"""Values frozen for comparison: bits of tensors, plain values, and which names mean one object or one memory."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size)
UNSEEN = ("forward", "handle")
"""Attributes of modules that a wrapper may set."""
LARGEST_NUMBER = 2**31
"""Integers above are taken for addresses, which differ from run to run."""

Frozen = Any


class Freezer:
    """Freezes values; a second meeting of an object, or of its memory, becomes a reference to the first."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}
        self._memory: dict[int, int] = {}

    def freeze(self, value: Any) -> Frozen:
        """Return the value as nested tuples."""
        if isinstance(value, PLAIN) or value is None:
            return _number(value)
        known = self._seen.get(id(value))
        if known is not None:
            return ("seen", known[0])
        self._seen[id(value)] = (len(self._seen), value)
        return self._object(value)

    def _object(self, value: Any) -> Frozen:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return (type(value).__name__, self._module(value))
        if isinstance(value, (list, tuple, deque)):
            return (type(value).__name__, tuple(self.freeze(item) for item in value))
        if isinstance(value, (Mapping, WeakKeyDictionary)):
            return (type(value).__name__, tuple((_key(key), self.freeze(item)) for key, item in value.items()))
        if isinstance(value, (set, frozenset)):
            return ("set", tuple(sorted(repr(_key(item)) for item in value)))
        if isinstance(value, numpy.ndarray):
            return ("array", str(value.dtype), value.shape, value.tobytes())
        if isinstance(value, torch.Generator):
            return ("generator", _digest(value.get_state().numpy().tobytes()))
        if isinstance(value, random.Random):
            return ("generator", hash(value.getstate()))
        if isinstance(value, numpy.random.Generator):
            return ("generator", repr(value.bit_generator.state))
        if isinstance(value, FunctionType):
            cells = value.__closure__ or ()
            return ("function", tuple(self.freeze(_contents(cell)) for cell in cells))
        if type(value).__name__ in ("Holder", "Config", "Box"):
            return (type(value).__name__, self.freeze(vars(value)))
        return type(value).__name__

    def _tensor(self, tensor: Tensor) -> Frozen:
        if is_lazy(tensor):
            return "uninitialized"
        memory = self._memory.setdefault(tensor.untyped_storage().data_ptr(), len(self._memory))
        kind = (type(tensor).__name__, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        return (*kind, memory, bits_of(tensor))

    def _module(self, module: nn.Module) -> Frozen:
        found = []
        for name, value in sorted(vars(module).items()):
            if "hooks" in name and isinstance(value, dict):
                found.append((name, len(value)))
            elif name not in UNSEEN:
                found.append((name, self.freeze(value)))
        return tuple(found)


def bits_of(tensor: Tensor) -> bytes:
    """Return the elements as bytes."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def random_streams() -> Frozen:
    """Return a digest of the states of the process-wide generators."""
    name, keys, *rest = numpy.random.get_state()
    device = torch.get_default_device()
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return (
        *(_digest(state.numpy().tobytes()) for state in states),
        hash(random.getstate()),
        _digest(keys.tobytes() + repr((name, rest)).encode()),
    )


def _number(value: Any) -> Frozen:
    if isinstance(value, float):
        return value.hex()
    return "address" if type(value) is int and abs(value) > LARGEST_NUMBER else value


def _key(key: Any) -> Frozen:
    return _number(key) if isinstance(key, PLAIN) else type(key).__name__


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
