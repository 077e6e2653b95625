"""The tensors that a region can read as state, as they were when it began."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from reactivate._snapshot.group_copy import GroupCopy, bits_of, grouped, is_plain
from reactivate._snapshot.shadows import Shadow, current_shadow, current_shadows, note_written
from reactivate._snapshot.small_copy import KINDS, SmallCopy, Whereabouts, is_small
from reactivate._torch.modes import run_unseen
from reactivate._xla.fence import fences

version_of, _tensors_of = attrgetter("_version"), attrgetter("tensors")


_FEW_BYTES = 64  # up to which a copy costs no more than a look at the version

MOST_CHANNELS = 1 << 16
"""The number of elements up to which a vector may be a running statistic, which is written to unseen."""


def _compared_shadow(tensor: Tensor) -> Shadow:
    """Return the shadow of a vector that may be written to unseen, after a look at the bytes."""
    shadow = current_shadow(tensor)
    if shadow.geometry is not None and shadow.geometry.is_given_back:  # there are no bytes
        return shadow
    if not run_unseen(torch.equal, bits_of(tensor.detach()), bits_of(shadow.content)):
        del current_shadows[id(tensor)]
        shadow = current_shadow(tensor)
    return shadow


class Written(NamedTuple):
    """A tensor that a forward wrote to without a copy being there: a recomputation starts from what the forward left.

    Attributes:
        tensor: the tensor.
        version: its version when the region began.
        left: what the forward left in a parameter; None of others, which are read where they are.
    """

    tensor: Tensor
    version: int
    left: Shadow | None

    def is_left(self) -> bool:
        """Return whether the tensor holds what the forward left."""
        return self.left is None or self.left.is_current(self.tensor, self.tensor._version)


class SmallLayout(NamedTuple):
    """Which of the tensors that an earlier region noted were small, and where these were.

    Attributes:
        numbers: of the small ones.
        total: how many there were.
        places: where the small ones were.
    """

    numbers: Sequence[int]
    total: int
    places: Whereabouts

    def again(self, tensors: Sequence[Tensor]) -> SmallCopy | None:
        """Return a copy of the small ones, None if these are others, or somewhere else by now.

        What has an address in the memory of the CPU is still there, and of the same form it is as large.
        """
        if len(tensors) != self.total or fences():
            return None
        small = tensors if len(self.numbers) == self.total else [tensors[number] for number in self.numbers]
        if not KINDS.issuperset(map(type, small)):
            return None
        found = SmallCopy(small, self.places, is_kept=True)
        return found if found.places is self.places else None


class TensorStates:
    """The tensors that one region can read as state, as they were when it began.

    Args:
        tensors: the tensors.
        layout: which of them were small when an earlier region began: those are not sorted out again.
        may_write_unseen: returns whether code writes to tensors without a new version: then no version is relied on.

    Attributes:
        tensors: those with a version that can be relied on, then the others, then the small ones.
        versions: theirs; 0 of inference tensors.
        written: those of which there was no copy when the forward wrote to them.
        shadows: the current shadows of the first, when the region began.
        groups: the others, and copies of them.
        small: what the small ones held, None if there are none.
        layout: which were small, and where, for regions to come; None if that would not help them.
    """

    __slots__ = ("groups", "layout", "shadows", "small", "tensors", "versions", "written")

    def __init__(
        self, tensors: Iterable[Tensor], layout: SmallLayout | None = None, may_write_unseen: Callable[[], bool] = bool
    ) -> None:
        found = list(tensors)
        self.written: Sequence[Written] = ()
        self.small: SmallCopy | None = None if layout is None else layout.again(found)
        if layout is None or self.small is None:
            found = list({id(tensor): tensor for tensor in found}.values())
            numbers = [] if fences() else [number for number, tensor in enumerate(found) if _is_few_bytes(tensor)]
            self.small = SmallCopy([found[number] for number in numbers], is_kept=True) if numbers else None
            layout = None if self.small is None else SmallLayout(numbers, len(found), self.small.places)
        self.layout = layout if layout is not None and layout.places.is_simple else None
        if layout is not None and len(layout.numbers) == layout.total:
            self.shadows: Sequence[Shadow] = ()
            self.groups: Sequence[GroupCopy] = ()
            self.tensors = found
        else:
            known = () if layout is None else set(layout.numbers)
            others = [tensor for number, tensor in enumerate(found) if number not in known]
            self._sort_out(others, may_write_unseen)
        self.versions = versions_of(self.tensors)

    def _sort_out(self, tensors: Sequence[Tensor], may_write_unseen: Callable[[], bool]) -> None:
        """Choose the kind of copy of each tensor that is not small, by what tells that it was written to."""
        by_version: list[Tensor] = []
        by_bytes: list[Tensor] = []
        by_nothing: list[Tensor] = []
        known, is_unseen = fences(), bool(tensors) and may_write_unseen()
        for tensor in tensors:
            if tensor.is_inference() or (known and tensor.device.type in known):
                by_nothing.append(tensor)
            elif not (is_unseen or (is_vector(tensor) and tensor.numel() <= MOST_CHANNELS)):
                by_version.append(tensor)
            elif tensor.is_cpu and is_plain(tensor):
                by_bytes.append(tensor)
            else:
                by_nothing.append(tensor)
        self.shadows = list(map(current_shadow, by_version))
        groups = list(map(GroupCopy, grouped(by_nothing))) if by_nothing else []
        self.groups = groups + [GroupCopy([tensor], [_compared_shadow(tensor).content]) for tensor in by_bytes]
        small = () if self.small is None else self.small.tensors
        self.tensors = [*by_version, *chain.from_iterable(map(_tensors_of, self.groups)), *small]

    def note_writes(self, tensors: Iterable[tuple[Tensor, int]]) -> None:
        """Take down what the forward wrote to: a recomputation may write to it again, and what it wrote is undone.

        Of a parameter a copy is made now, and at the beginning of every region from the next one on: a function that
        normalises its weights does so in every forward, and the next forward may come before this backward.

        Args:
            tensors: each with the version that it had when the region began.
        """
        self.written = [
            Written(tensor, version, current_shadow(tensor) if tensor.requires_grad and tensor.is_leaf else None)
            for tensor, version in tensors
        ]
        for tensor, _, left in self.written:
            if left is not None:
                note_written(tensor)

    def covers(self, tensor: Tensor) -> bool:
        """Return whether there is a copy of `tensor`."""
        return any(item is tensor for item in self.tensors)

    def put_aside(self) -> Iterator[Tensor]:
        """Return the tensors whose present bytes a recomputation that began now would put aside."""
        yield from (tensor for group in self.groups for tensor in group.tensors)
        yield from (tensor for tensor, *_ in self.written)
        yield from () if self.small is None else self.small.tensors
        for tensor, shadow in zip(self.tensors, self.shadows):
            if not shadow.is_current(tensor, tensor._version):
                yield tensor

    def are_shadows_current(self) -> bool:
        """Return whether the tensors with a version that can be relied on hold what they held."""
        return all(shadow.is_current(tensor, tensor._version) for tensor, shadow in zip(self.tensors, self.shadows))

    def noted_versions(self) -> list[int]:
        """Return the versions of `tensors`, and behind them those of `written`, as the region found them."""
        return [*self.versions, *(item.version for item in self.written)]

    def held(self) -> Iterable[Tensor]:
        """Return the copies."""
        for shadow in self.shadows:
            yield shadow.content
        for *_, left in self.written:
            if left is not None:
                yield left.content
        for group in self.groups:
            yield from group.contents
        if self.small is not None and self.small.kept is not None:
            yield run_unseen(_bytes_in, self.small.kept)


def _bytes_in(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _is_few_bytes(tensor: Tensor) -> bool:
    return is_small(tensor) and (is_vector(tensor) or tensor.nbytes <= _FEW_BYTES)


def is_vector(tensor: Tensor) -> bool:
    """Return whether a tensor has the form of running statistics."""
    return tensor.ndim == 1 and tensor.is_floating_point() and not tensor.is_nested


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(version_of, tensors))
    except RuntimeError:  # inference tensors have none
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


NO_TENSORS = TensorStates(())
