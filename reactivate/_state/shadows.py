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
from reactivate._state.memory import memory_of
from reactivate._state.small import Bytes, has_bits, is_small
from reactivate._state.steps import last_step_of
from reactivate._torch.autograd import set_versions
from reactivate._torch.modes import (
    copy_all,
    copy_unseen,
    equal_unseen,
    is_dispatch_mode_active,
    is_function_mode_active,
    run_unseen,
)

version_of = attrgetter("_version")
_FEW_BYTES = 64  # up to which a copy costs no more than a look at the version


class Shadow:
    """A copy of a tensor.

    Attributes:
        tensor: the tensor, weakly.
        version, address, step: of the tensor when it was copied; somebody may give it other memory (`tensor.data = new`), and
            a fused optimizer steps it without a new version.
        content: the copy.
    """

    __slots__ = ("address", "content", "step", "tensor", "version")

    def __init__(self, tensor: Tensor, reference: ref[Tensor]) -> None:
        self.tensor = reference
        self.version: int = tensor._version
        self.address = _address_of(tensor)
        self.step = last_step_of(tensor)
        self.content = copy_unseen(tensor)

    def is_current(self, tensor: Tensor, version: int) -> bool:
        """Return whether `tensor`, which has this version, holds what was copied."""
        return self.version == version and self.address == _address_of(tensor) and self.step == last_step_of(tensor)


def _address_of(tensor: Tensor) -> int | None:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
        return None
    return tensor.data_ptr()


MOST_CHANNELS = 1 << 16
"""The number of elements up to which a vector may be a running statistic, which is written to unseen."""

_FEW_CHANNELS = 1 << 12  # up to which a copy is cheaper than a look

_current: dict[int, Shadow] = {}  # by the id of the tensor
rewound_memory: dict[int, int] = {}
"""{storage: the version that its tensor has outside of the recomputation} of all memory that is rewound now."""


def current_shadow(tensor: Tensor) -> Shadow:
    """Return the shadow of `tensor` as it is now."""
    key = id(tensor)
    shadow = _current.get(key)
    if shadow is not None and shadow.tensor() is tensor:
        if shadow.is_current(tensor, tensor._version):
            return shadow
        reference = shadow.tensor
    else:
        reference = ref(tensor, functools.partial(_current.pop, key))
    shadow = _current[key] = Shadow(tensor, reference)
    return shadow


_written: dict[int, ref[Tensor]] = {}  # tensors that some region wrote to without a copy being there, by their ids


def is_known_written(tensor: Tensor) -> bool:
    """Return whether a region wrote to `tensor` before."""
    reference = _written.get(id(tensor)) if _written else None
    return reference is not None and reference() is tensor


def written_before(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return those of the tensors that a region wrote to before."""
    return filter(is_known_written, tensors) if _written else ()


def note_written(tensor: Tensor) -> None:
    """Keep a copy of `tensor` from the next region on."""
    key = id(tensor)
    _written[key] = ref(tensor, functools.partial(_written.pop, key))


def _compared_shadow(tensor: Tensor) -> Shadow:
    """Return the shadow of a vector that may be written to unseen, after a look at the bytes."""
    shadow = current_shadow(tensor)
    if not run_unseen(torch.equal, tensor.detach().view(torch.uint8), shadow.content.view(torch.uint8)):
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
        groups, copies: the others, and copies of them: one tensor for all of one kind.
        small: what the small ones held, None if there are none.
    """

    __slots__ = ("copies", "groups", "shadows", "small", "tensors", "versions", "written")

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
            elif tensor.numel() > _FEW_CHANNELS and tensor.is_cpu and _is_plain(tensor):
                compared.append(tensor)
            else:
                silent.append(tensor)
        self.shadows = list(map(current_shadow, counted))
        groups = _grouped(silent)
        self.groups = [*groups, *([tensor] for tensor in compared)]
        self.copies = [*map(_copy_group, groups), *([_compared_shadow(tensor).content] for tensor in compared)]
        self.small = Bytes(small) if small else None
        self.tensors = [*counted, *chain.from_iterable(self.groups), *small]
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
        yield from (tensor for group in self.groups for tensor in group)
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
        for copies in self.copies:
            yield from copies
        if self.small is not None:
            yield self.small.content


def _is_vector(tensor: Tensor) -> bool:
    return tensor.ndim == 1 and tensor.is_floating_point()


def _versions_of(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(version_of, tensors))
    except RuntimeError:  # inference tensors have none
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


# -- groups of tensors that are copied with one op -------------------------------------------------------------------


def _grouped(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of one kind: dtype, device."""
    if not tensors:
        return []
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        is_plain = tensor.ndim == 1 and _is_plain(tensor) and not tensor.is_inference()
        key = (tensor.dtype, tensor.device) if is_plain else id(tensor)
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _copy_group(tensors: list[Tensor]) -> list[Tensor]:
    """Return a copy of each; of several one tensor with all of them behind each other."""
    if len(tensors) == 1:
        return [copy_unseen(tensors[0])]
    if not is_dispatch_mode_active() and not is_function_mode_active():
        return [torch.cat(tensors)]  # they require no gradient
    return [copy_unseen(tensor) for tensor in tensors]


def _write_group(tensors: list[Tensor], copies: list[Tensor]) -> None:
    """Write copies back; gradients are off."""
    if len(copies) < len(tensors):
        copy_all(tensors, list(copies[0].split([len(tensor) for tensor in tensors])))
        return
    for tensor, copy in zip(tensors, copies):
        _write(tensor, copy)


def _write(tensor: Tensor, content: Tensor) -> None:
    """Write a copy back; gradients are off."""
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(content)
    elif tensor.shape != content.shape:
        tensor.resize_(content.shape).copy_(content)
    elif tensor.layout is torch.strided and tensor.numel() > 1 and 0 in tensor.stride():
        _memory_of(tensor).copy_(_memory_of(content.as_strided(tensor.size(), tensor.stride())))
    else:
        tensor.copy_(content)


def _memory_of(tensor: Tensor) -> Tensor:
    """Return the elements of an expanded tensor, each once."""
    size = [1 if stride == 0 else length for length, stride in zip(tensor.size(), tensor.stride())]
    return tensor.as_strided(size, tensor.stride())


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
        self._writes: list[tuple[Tensor, Tensor]] = []  # (tensor, what it holds outside)
        self._previous: list[tuple[Tensor, Shadow | None]] = []
        self._memory: list[tuple[int, int | None]] = []
        self._present = [run_unseen(_copy_group, group) for group in state.groups]
        self._small = None if state.small is None else Bytes(state.small.tensors)
        changed: list[tuple[Tensor, Shadow]] = []
        for tensor, shadow, version in zip(state.tensors, state.shadows, self._versions):
            if not shadow.is_current(tensor, version):
                changed.append((tensor, shadow))
        written = [*(tensor for tensor, _ in changed), *(item.tensor for item in state.written)]
        for tensor in written:
            self._writes.append((tensor, copy_unseen(tensor)))  # all of them first: they may share memory
        self._mark_memory(set(map(id, written)))
        self._is_rewound = bool(written or state.groups)
        try:
            if self._is_rewound:
                run_unseen(self._write, changed)
            if self._small is not None and state.small is not None and not self._small.are(state.small):
                state.small.put()
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
                _write(written.tensor, written.left.content)
        for tensor, shadow in changed:
            self._previous.append((tensor, _current.get(id(tensor))))
            _write(tensor, shadow.content)
            _current[id(tensor)] = shadow
        for group, copies, present in zip(state.groups, state.copies, self._present):
            if not _are_equal(copies, present):
                _write_group(group, copies)

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
        for tensor, content in self._writes:
            _write(tensor, content)
        for tensor, previous in self._previous:
            if previous is not None:
                _current[id(tensor)] = previous
            else:
                _current.pop(id(tensor), None)
        written = {id(tensor) for tensor, _ in self._writes}
        now = _versions_of(state.tensors)
        for tensor, shadow, version, before in zip(state.tensors, state.shadows, now, self._versions):
            if version != before and id(tensor) not in written:  # unchanged since the forward, written to by this one
                _write(tensor, shadow.content)
        for group, present in zip(state.groups, self._present):
            # Memory for reading only is left alone; on an accelerator to ask would be to wait.
            if not (group[0].is_cpu and _are_equal(_copy_group(group), present)):
                _write_group(group, present)


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether the bytes are known to be equal; on an accelerator to ask would be to wait."""
    return all(
        one.is_cpu and _is_plain(one) and _is_plain(other) and equal_unseen(_bits(one), _bits(other))
        for one, other in zip(some, others)
    )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and has_bits(tensor)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
