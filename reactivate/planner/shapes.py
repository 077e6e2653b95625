"""The shapes of a call: what of its arguments decides on the memory of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._inspect.step import leaves_of
from reactivate._torch.ops import flatten

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
        return self._is_like(other) and all(
            its <= mine for one, two in zip(self.sizes, other.sizes) for mine, its in zip(one, two)
        )

    def _is_like(self, other: CallShapes) -> bool:
        return (self.kinds, self.flags, self._ranks) == (other.kinds, other.flags, other._ranks)

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(map(len, self.sizes))

    def class_in(self, profiled: CallShapes) -> tuple[object, ...]:
        """Return the class: each dimension in sixteenths of the one that was profiled, rounded up."""
        if not profiled._is_like(self):
            return self.sizes
        return tuple(
            -(-mine * STEPS // max(its, 1))
            for one, two in zip(self.sizes, profiled.sizes)
            for mine, its in zip(one, two)
        )

    def __str__(self) -> str:
        return ", ".join(map(str, self.sizes)) or "no tensors"
