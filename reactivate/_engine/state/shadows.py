"""Shadows: copies of tensors that are state, from which a recomputation gets their bytes back in the same memory.

A buffer, a tensor in an attribute: whoever reads it, under whatever name and through whatever view, reads its memory. So
its old bytes are written back into that memory for a recomputation, and the present bytes afterwards. Nothing is put in
the place of the tensor, and its version counter is rewound with it.

There is one current shadow of each tensor, with the version at which it was taken. At the start of a region an unchanged
version costs one integer comparison, and the region refers to the shadow; a changed one costs a copy. A region refers to
the shadows it started from whether it writes or not: between two writers a region may only read.

Some writers move no version: batch norm's kernels write to running statistics, and inference tensors count none. Small
ones are copied for every region (see `small`), on an accelerator all of them with one op; larger ones are compared with
their shadow, where that needs no synchronisation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from reactivate._backends import fences
from reactivate._engine.state.geometry import elements_of, geometry_of, is_moved
from reactivate._engine.state.groups import Group, bits_of, grouped, is_plain, put
from reactivate._engine.state.known import Known
from reactivate._engine.state.memory import memory_of
from reactivate._engine.state.small import Bytes, is_small
from reactivate._engine.state.steps import last_step_of
from reactivate._torch.autograd import set_versions
from reactivate._torch.modes import run_unseen

version_of, _tensors_of = attrgetter("_version"), attrgetter("tensors")
_FEW_BYTES = 64  # up to which a copy costs no more than a look at the version


class Shadow:
    """A copy of a tensor.

    Attributes:
        version, address, step: of the tensor when it was copied; somebody may give it other memory (`tensor.data = new`), and
            a fused optimizer steps it without a new version.
        geometry: where its elements were; None if that cannot be put back.
        content: the copy.
    """

    __slots__ = ("address", "content", "geometry", "step", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version: int = tensor._version
        self.geometry = geometry_of(tensor)
        self.address = _address_of(tensor)
        self.step = last_step_of(tensor)
        self.content = elements_of(tensor)

    def is_current(self, tensor: Tensor, version: int) -> bool:
        """Return whether `tensor`, which has this version, holds what was copied."""
        return self.version == version and self.address == _address_of(tensor) and self.step == last_step_of(tensor)

    def put(self, tensor: Tensor) -> None:
        """Let `tensor` hold what was copied; gradients are off."""
        put(tensor, self.content, self.geometry)


def _address_of(tensor: Tensor) -> int | None:
    is_kind = type(tensor) is Tensor or is_moved(tensor)
    if not is_kind or tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        return None  # as `has_geometry` says; this runs for every region
    return tensor.data_ptr()


MOST_CHANNELS = 1 << 16
"""The number of elements up to which a vector may be a running statistic, which is written to unseen."""

_FEW_CHANNELS = 1 << 12  # up to which a copy is cheaper than a look

_current: dict[int, Shadow] = {}  # by the id of the tensor
_references: dict[int, ref[Tensor]] = {}  # to the tensors of these
rewound_memory: dict[int, int] = {}
"""{storage: the version that its tensor has outside of the recomputation} of all memory that is rewound now."""


def current_shadow(tensor: Tensor) -> Shadow:
    """Return the shadow of `tensor` as it is now."""
    key = id(tensor)
    reference = _references.get(key)
    if reference is None or reference() is not tensor:
        _current.pop(key, None)
        _references[key] = ref(tensor, functools.partial(_forget, key))
    shadow = _current.get(key)
    if shadow is None or not shadow.is_current(tensor, tensor._version):
        shadow = _current[key] = Shadow(tensor)
    return shadow


def _forget(key: int, reference: object = None) -> None:
    _current.pop(key, None)
    _references.pop(key, None)


_written = Known()  # tensors that some region wrote to without a copy being there


def is_known_written(tensor: Tensor) -> bool:
    """Return whether a region wrote to `tensor` before."""
    return _written.has(tensor)


def written_before(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return those of the tensors that a region wrote to before."""
    return filter(is_known_written, tensors) if _written else ()


def note_written(tensor: Tensor) -> None:
    """Keep a copy of `tensor` from the next region on."""
    _written.note(tensor)


def _compared_shadow(tensor: Tensor) -> Shadow:
    """Return the shadow of a vector that may be written to unseen, after a look at the bytes."""
    shadow = current_shadow(tensor)
    if shadow.geometry is not None and shadow.geometry.is_given_back:  # there are no bytes
        return shadow
    if not run_unseen(torch.equal, bits_of(tensor.detach()), bits_of(shadow.content)):
        del _current[id(tensor)]
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


class TensorStates:
    """The tensors that one region can read as state, as they were when it began.

    Attributes:
        tensors: those with a version that can be relied on, then the others, then the small ones.
        versions: theirs; 0 of inference tensors.
        written: those of which there was no copy when the forward wrote to them.
        shadows: the current shadows of the first, when the region began.
        groups: the others, and copies of them.
        small: what the small ones held, None if there are none.
    """

    __slots__ = ("groups", "shadows", "small", "tensors", "versions", "written")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        counted: list[Tensor] = []
        compared: list[Tensor] = []
        silent: list[Tensor] = []
        small: list[Tensor] = []
        known = fences()
        for tensor in tensors:
            if not known and is_small(tensor) and (_is_vector(tensor) or tensor.nbytes <= _FEW_BYTES):
                small.append(tensor)
            elif tensor.is_inference() or (known and tensor.device.type in known):
                silent.append(tensor)
            elif not _is_vector(tensor) or tensor.numel() > MOST_CHANNELS:
                counted.append(tensor)
            elif tensor.numel() > _FEW_CHANNELS and tensor.is_cpu and is_plain(tensor):
                compared.append(tensor)
            else:
                silent.append(tensor)
        self.shadows = list(map(current_shadow, counted))
        self.groups = list(map(Group, grouped(silent))) if silent else []
        self.groups += [Group([tensor], [_compared_shadow(tensor).content]) for tensor in compared]
        self.small = Bytes(small) if small else None
        self.tensors = [*counted, *chain.from_iterable(map(_tensors_of, self.groups)), *small]
        self.versions = _versions_of(self.tensors)
        self.written: Sequence[Written] = ()

    def note_writes(self, tensors: Iterable[tuple[Tensor, int]]) -> None:
        """Let a recomputation write once more, without a trace, to what the forward wrote to.

        Of a parameter a copy is made now, and at the beginning of every region from the next one on: who moves it once,
        to normalise it, does so in every forward, perhaps in another one before this backward.

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

    def is_current(self) -> bool:
        """Return whether the tensors are known to hold what they held."""
        if self.groups or (self.small is not None and not Bytes(self.small.tensors).are(self.small)):
            return False
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
        if self.small is not None:
            yield self.small.content


def _is_vector(tensor: Tensor) -> bool:
    return tensor.ndim == 1 and tensor.is_floating_point() and not tensor.is_nested


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(version_of, tensors))
    except RuntimeError:  # inference tensors have none
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


NO_TENSORS = TensorStates(())

# -- a recomputation -------------------------------------------------------------------------------------------------


class RewoundTensors:
    """Tensors with the bytes and versions that they had when a region began, for as long as the context lasts."""

    __slots__ = ("_is_rewound", "_memory", "_present", "_previous", "_small", "_state", "_versions", "_writes")

    def __init__(self, state: TensorStates) -> None:
        self._state = state

    def __enter__(self) -> None:
        state = self._state
        self._versions = _versions_of(self._tensors())
        self._writes: list[
            tuple[Tensor, Tensor, Any, Any]
        ] = []  # (tensor, what it holds outside and where, its memory)
        self._previous: list[tuple[Tensor, Shadow | None]] = []
        self._memory: list[tuple[int, int | None]] = []
        self._present = [run_unseen(Group, group.tensors) for group in state.groups]
        self._small = None if state.small is None else Bytes(state.small.tensors)
        changed: list[tuple[Tensor, Shadow]] = []
        for tensor, shadow, version in zip(state.tensors, state.shadows, self._versions):
            if not shadow.is_current(tensor, version):
                changed.append((tensor, shadow))
        written = [*(tensor for tensor, _ in changed), *(item.tensor for item in state.written)]
        for tensor in written:  # all of them first: they may share memory
            found = geometry_of(tensor)
            self._writes.append((tensor, elements_of(tensor), found, None if found is None else tensor.detach()))
        self._is_rewound = bool(written or state.groups)
        try:
            if self._is_rewound:
                run_unseen(self._write, changed)
            if self._small is not None and state.small is not None and not self._small.are(state.small):
                self._small.keep_memory(state.small)
                state.small.put()
            self._mark_memory(set(map(id, written)))
            self._set_versions(state.noted_versions())
        except BaseException:
            self.__exit__()
            raise

    def _mark_memory(self, written: set[int]) -> None:
        """Note that saved tensors in this memory are in what is rewound."""
        count = len(self._state.shadows)
        for index, (tensor, version) in enumerate(zip(self._tensors(), self._versions)):
            if index >= count or id(tensor) in written:
                key = memory_of(tensor)
                if key is not None:
                    self._memory.append((key, rewound_memory.get(key)))
                    rewound_memory[key] = version

    def _tensors(self) -> list[Tensor]:
        return [*self._state.tensors, *(item.tensor for item in self._state.written)]

    @torch.no_grad()
    def _write(self, changed: Sequence[tuple[Tensor, Shadow]]) -> None:
        state = self._state
        for written in state.written:
            self._previous.append((written.tensor, _current.pop(id(written.tensor), None)))
            if written.left is not None and not written.is_left():
                written.left.put(written.tensor)
        for tensor, shadow in changed:
            self._previous.append((tensor, _current.get(id(tensor))))
            shadow.put(tensor)
            _current[id(tensor)] = shadow
        for group, present in zip(state.groups, self._present):
            if not group.are(present):
                present.keep_memory(group)
                group.put()

    def _set_versions(self, versions: Sequence[int]) -> None:
        tensors = self._tensors()
        if tensors and _versions_of(tensors) != versions:
            counted = [pair for pair in zip(tensors, versions) if not pair[0].is_inference()]
            set_versions([tensor for tensor, _ in counted], [version for _, version in counted])

    def __exit__(self, *error: object) -> None:
        for key, before in reversed(self._memory):
            if before is None:
                rewound_memory.pop(key, None)
            else:
                rewound_memory[key] = before
        count = len(self._state.shadows)
        if self._is_rewound or _versions_of(self._state.tensors[:count]) != self._versions[:count]:
            run_unseen(self._put_back)
        if self._small is not None:
            self._small.put()
        self._set_versions(self._versions)
        self._writes, self._previous, self._memory, self._present = [], [], [], []  # a traceback may hold this context
        self._small = None

    @torch.no_grad()
    def _put_back(self) -> None:
        state = self._state
        for tensor, content, geometry, memory in self._writes:
            put(tensor, content, geometry, memory)
        for tensor, previous in self._previous:
            if previous is not None:
                _current[id(tensor)] = previous
            else:
                _current.pop(id(tensor), None)
        written = {id(tensor) for tensor, *_ in self._writes}
        now = _versions_of(state.tensors)
        for tensor, shadow, version, before in zip(state.tensors, state.shadows, now, self._versions):
            if version != before and id(tensor) not in written:  # unchanged since the forward, written to by this one
                shadow.put(tensor)
        for present in self._present:
            # Memory for reading only is left alone; on an accelerator to ask would be to wait.
            if not (present.tensors[0].is_cpu and Group(present.tensors).are(present)):
                present.put()
