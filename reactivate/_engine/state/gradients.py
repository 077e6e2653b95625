"""Gradients that a backward inside of a forward accumulates: a recomputation runs that backward again, for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_

from torch import Tensor

from reactivate._engine.state.known import Known
from reactivate._torch.modes import copy_unseen

_GRADIENT, _IS_LEAF, _VERSION = attrgetter("grad"), attrgetter("is_leaf"), attrgetter("_version")
_known = Known()  # leaves that some forward accumulated a gradient of


class Gradients:
    """The `.grad` of leaves when a forward began; of those, the ones that a backward inside of it has moved.

    A gradient is copied if an earlier forward is known to have moved that of the same leaf.

    Attributes:
        moved: (leaf, a copy of its gradient before the forward) where the forward itself changed the gradient.
        unknown: those gradients of which there is no copy, with their versions.
    """

    __slots__ = ("_before", "_copies", "_leaves", "_present", "_versions", "moved", "unknown")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._leaves = leaves = list(filter(_IS_LEAF, tensors))
        self._before: list[Tensor | None] = list(map(_GRADIENT, leaves))
        self._versions = _versions_of(self._before)
        self._copies: dict[int, Tensor] = {}
        if _known:
            for leaf, gradient in zip(self._leaves, self._before):
                if gradient is not None and _known.has(leaf):
                    self._copies[id(leaf)] = copy_unseen(gradient)
        self.moved: Sequence[tuple[Tensor, Tensor | None]] = ()
        self.unknown: Sequence[tuple[Tensor, int]] = ()

    def finish(self) -> bool:
        """Find what moved, and let go of the rest: the forward is over. Return whether anything moved."""
        self.look()
        self._leaves, self._before, self._versions, self._copies = [], [], [], {}
        return bool(self.moved)

    def is_quiet(self) -> bool:
        """Return whether the forward is over and has moved none."""
        return not (self._leaves or self.moved)

    def look(self) -> None:
        """Find what has moved by now, as long as the forward runs: a backward inside may need a recomputation."""
        if not self._leaves:
            return
        now = list(map(_GRADIENT, self._leaves))
        versions = _versions_of(now)
        if not all(map(is_, now, self._before)) or versions != self._versions:
            self._find_moved(now, versions)

    def _find_moved(self, now: list[Tensor | None], versions: list[int | None]) -> None:
        moved: list[tuple[Tensor, Tensor | None]] = []
        unknown: list[tuple[Tensor, int]] = []
        rows = zip(self._leaves, now, self._before, versions, self._versions)
        for leaf, gradient, before, version, version_before in rows:
            if gradient is not before or version != version_before:
                _known.note(leaf)
                moved.append((leaf, self._copies.get(id(leaf))))
                if before is not None and version_before is not None and id(leaf) not in self._copies:
                    unknown.append((before, version_before))
        self.moved, self.unknown = moved, unknown

    def __enter__(self) -> None:
        self.look()
        self._present = [(leaf, leaf.grad) for leaf, _ in self.moved]
        for leaf, before in self.moved:
            leaf.grad = None if before is None else copy_unseen(before)

    def __exit__(self, *error: object) -> None:
        for leaf, gradient in self._present:
            leaf.grad = gradient
        self._present = []


def _versions_of(gradients: Sequence[Tensor | None]) -> list[int | None]:
    if gradients and gradients[0] is not None and gradients[-1] is not None:  # then mostly all are there
        try:
            return list(map(_VERSION, gradients))
        except AttributeError:
            pass
    return [None if item is None else item._version for item in gradients]
