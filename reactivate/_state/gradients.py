"""Gradients that a backward inside of a forward accumulates: a recomputation runs that backward again, for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_

from torch import Tensor

_GRADIENT, _IS_LEAF = attrgetter("grad"), attrgetter("is_leaf")


class Gradients:
    """The `.grad` of leaves when a forward began; later, those that a backward inside of it moved.

    Attributes:
        moved: the leaves whose gradient the forward itself changed.
    """

    __slots__ = ("_before", "_leaves", "_present", "_versions", "moved")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._leaves = list(filter(_IS_LEAF, tensors))
        self._before: list[Tensor | None] = list(map(_GRADIENT, self._leaves))
        self._versions = [None if item is None else item._version for item in self._before]
        self.moved: Sequence[Tensor] = ()

    def finish(self) -> None:
        """Find what moved, and let go of the rest: the forward is over."""
        now = list(map(_GRADIENT, self._leaves))
        versions = [None if item is None else item._version for item in now]
        if not all(map(is_, now, self._before)) or versions != self._versions:
            self.moved = [
                leaf
                for leaf, one, other, first, second in zip(self._leaves, now, self._before, versions, self._versions)
                if one is not other or first != second
            ]
        self._leaves, self._before, self._versions = [], [], []

    def __enter__(self) -> None:
        self._present = list(map(_GRADIENT, self.moved))
        for leaf in self.moved:
            leaf.grad = None

    def __exit__(self, *error: object) -> None:
        for leaf, gradient in zip(self.moved, self._present):
            leaf.grad = gradient
        self._present = []
