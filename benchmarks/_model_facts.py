"""All that a model is made of, to be compared before and after something that must leave it alone."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

_DEPTH = 6  # of containers and objects inside of attributes
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


def facts_of(model: Module) -> dict[str, Hashable]:
    """Return every attribute of every module and of its class, gradients, and the states of random generators.

    A tensor is known by its identity, its memory, its version and its bits, a container by what is in it, any other object by
    its identity and its attributes.
    """
    found: dict[str, Hashable] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path or 'model'}.{name}"] = _fact(value, _DEPTH)
        kind = type(module)
        for name, value in list(vars(kind).items()):
            found[f"class {kind.__qualname__}.{name}"] = id(value) if callable(value) else _fact(value, 2)
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = _fact(parameter.grad, 1)
    found["random numbers of torch"] = _bits(torch.get_rng_state())
    found["random numbers of Python"] = hash(random.getstate())
    found["gradients are on"] = torch.is_grad_enabled()
    return found


def changes(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> list[str]:
    """List what is other than it was, by name."""
    names = dict.fromkeys([*before, *after])
    missing = object()
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]


def _bits(tensor: Tensor) -> Hashable:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _fact(value: Any, depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        place = id(value), value.data_ptr(), tuple(value.shape), value.stride(), value._version, value.requires_grad
        hooks = _fact(getattr(value, "_backward_hooks", None), 2)
        return *place, _bits(value), hooks, _fact(vars(value), depth - 1) if depth > 1 and vars(value) else None
    if isinstance(value, type) or depth == 0 or isinstance(value, Module):
        return "object", id(value)
    if isinstance(value, Mapping):
        return id(value), tuple((repr(key), _fact(item, depth - 1)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return id(value), tuple(_fact(item, depth - 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return id(value), tuple(sorted(map(repr, value)))
    inside = vars(value) if hasattr(value, "__dict__") and not callable(value) else {}
    return id(value), tuple((name, _fact(item, depth - 1)) for name, item in inside.items())
