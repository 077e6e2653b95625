"""The shapes of a call: what of its arguments decides on the memory of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._inspect.step import leaves_of
from reactivate._torch.ops import flatten, unflatten

STEPS = 16  # classes along a dimension, from nothing to the size that was profiled


def call_inputs(args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the tensors of a call by their names."""
    return leaves_of("args", tuple(args)) | leaves_of("kwargs", dict(kwargs or {}))


@dataclass(frozen=True)
class CallShapes:
    """The tensors of a call by name, dtype and shape, and what else makes it another one.

    Attributes:
        kinds: (name, dtype, whether it requires a gradient) of each tensor.
        sizes: their shapes.
        flags: arguments that are None, true, false or a text; last, whether the model trains.
    """

    kinds: tuple[tuple[str, str, bool], ...]
    sizes: tuple[tuple[int, ...], ...]
    flags: tuple[object, ...]

    @classmethod
    def of(cls, model: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallShapes:
        """The shapes of a call of `model`."""
        leaves = call_inputs(args, kwargs)
        others = [leaf for leaf in flatten((args, dict(kwargs)))[0] if not isinstance(leaf, Tensor)]
        flags = [leaf for leaf in others if leaf is None or isinstance(leaf, (bool, str))]
        return cls(
            tuple((name, str(leaf.dtype), leaf.requires_grad) for name, leaf in leaves.items()),
            tuple(tuple(leaf.shape) for leaf in leaves.values()),
            (*flags, model.training),
        )

    def holds(self, other: CallShapes) -> bool:
        """Return whether every dimension of `other` is at most as large as here, and all else is equal."""
        return self.is_like(other) and all(
            its <= mine for one, two in zip(self.sizes, other.sizes) for mine, its in zip(one, two)
        )

    def is_like(self, other: CallShapes) -> bool:
        """Return whether all but the sizes is equal."""
        return (self.kinds, self.flags, self._ranks) == (other.kinds, other.flags, other._ranks)

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(map(len, self.sizes))

    def class_in(self, profiled: CallShapes) -> tuple[object, ...]:
        """Return the class: each dimension in sixteenths of the one that was profiled, rounded up."""
        if not profiled.is_like(self):
            return self.sizes
        return tuple(
            -(-mine * STEPS // max(its, 1))
            for one, two in zip(self.sizes, profiled.sizes)
            for mine, its in zip(one, two)
        )

    def over(self, other: CallShapes) -> CallShapes:
        """Return the shapes of which each dimension is the larger one of the two."""
        return replace(self, sizes=tuple(tuple(map(max, mine, its)) for mine, its in zip(self.sizes, other.sizes)))

    def padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call in these shapes: what they hold, and zeros behind it."""
        if tuple(tuple(leaf.shape) for leaf in call_inputs(args, kwargs).values()) == self.sizes:
            return args, kwargs
        sizes = iter(self.sizes)
        return _padded(tuple(args), sizes), _padded(dict(kwargs), sizes)

    def __str__(self) -> str:
        return ", ".join(map(str, self.sizes)) or "no tensors"

    def in_words(self) -> str:
        """Return all of it, for a message."""
        tensors = (f"{name}: {dtype}{list(size)}" for (name, dtype, _), size in zip(self.kinds, self.sizes))
        return ", ".join([*tensors, *map(repr, self.flags)])


def _padded(value: Any, sizes: Iterator[tuple[int, ...]]) -> Any:
    """Take the sizes in the order in which `leaves_of` finds the tensors."""
    leaves, structure = flatten(value)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[index] = _padded_tensor(leaf, next(sizes))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            parts = {item.name: _padded(getattr(leaf, item.name), sizes) for item in fields(leaf)}
            leaves[index] = replace(leaf, **parts)
    return unflatten(leaves, structure)


def _padded_tensor(tensor: Tensor, size: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) == size:
        return tensor
    found = tensor.new_zeros(size)
    found[tuple(map(slice, tensor.shape))] = tensor.detach()
    return found.requires_grad_(tensor.requires_grad)
