"""Differences of the results of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Results = Mapping[str, Any]


def first_difference(one: Results, other: Results) -> str | None:
    """Return the first difference in words, None if there is none."""
    for name, first in one.items():
        if name not in other:
            return f"{name} is missing"
        second = other[name]
        if (first is None) != (second is None):
            return f"{name} is {'extra' if first is None else 'missing'}"
        if first is not None and not _is_same(first, second):
            return f"{name} is different{_by_how_much(first, second)}"
    extra = [name for name in other if name not in one]
    return f"{extra[0]} is extra" if extra else None


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return repr(one) == repr(other)  # a random state: nested tuples, dicts and arrays
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    # Of a NaN too the bits count; where there is no memory to look at, what `torch.equal` says.
    if one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if type(one) is not Tensor:
        return torch.equal(one, other)
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _by_how_much(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not one.is_floating_point() or one.shape != other.shape:
        return ""
    return f", by up to {(one.double() - other.double()).abs().max().item():.3g}"
