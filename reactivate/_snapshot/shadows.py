"""Shadows: copies of tensors that are state, which regions share as long as the tensors do not change.

A buffer, a tensor in an attribute: to read it, under any name and through any view, is to read its memory. So
its old bytes are written back into that memory for a recomputation, and the present bytes afterwards. Nothing is put in
the place of the tensor, and its version counter is rewound with it.

There is one current shadow of each tensor, with the version at which it was taken. At the start of a region an unchanged
version costs one integer comparison, and the region refers to the shadow; a changed one costs a copy. The current shadow
lives as long as the tensor, or until a policy is removed from a model. Each region keeps the shadows that were current
when it began, also a region that does not write: another one may write before its backward.

Some writes change no version: batch norm's kernels write so to running statistics, and inference tensors count none.
`TensorStates` says which copies there are of such tensors (`_snapshot/tensor_states.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor
from torch.nn import UninitializedBuffer, UninitializedParameter

from reactivate._snapshot.caches import WeakIdentitySet
from reactivate._snapshot.geometry import elements_of, geometry_of
from reactivate._snapshot.group_copy import put
from reactivate._snapshot.kinds import SMALL_BYTES
from reactivate._snapshot.steps import last_step_of

UNINITIALIZED = frozenset({UninitializedBuffer, UninitializedParameter})  # which hold nothing yet


class Shadow:
    """A copy of a tensor.

    Attributes:
        version, step: of the tensor when it was copied; a fused optimizer steps it without a new version.
        geometry: where its elements were, since it may be given other memory (`tensor.data = new`); None if that cannot
            be put back.
        content: the copy.
    """

    __slots__ = ("content", "geometry", "step", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version: int = tensor._version
        self.geometry = geometry_of(tensor)
        self.step = last_step_of(tensor)
        self.content = elements_of(tensor)

    def is_current(self, tensor: Tensor, version: int) -> bool:
        """Return whether `tensor`, which has this version, holds what was copied."""
        if self.version != version or self.step != last_step_of(tensor):
            return False
        return geometry_of(tensor) is None if self.geometry is None else self.geometry.is_of(tensor)

    def put(self, tensor: Tensor) -> None:
        """Let `tensor` hold what was copied; gradients are off."""
        put(tensor, self.content, self.geometry)


current_shadows: dict[int, Shadow] = {}  # by the id of the tensor
_references: dict[int, ref[Tensor]] = {}  # to the tensors of these


def current_shadow(tensor: Tensor) -> Shadow:
    """Return the shadow of `tensor` as it is now."""
    key = id(tensor)
    reference = _references.get(key)
    if reference is None or reference() is not tensor:
        current_shadows.pop(key, None)
        _references[key] = ref(tensor, functools.partial(_forget, key))
    shadow = current_shadows.get(key)
    if shadow is None or not shadow.is_current(tensor, tensor._version):
        shadow = current_shadows[key] = Shadow(tensor)
    return shadow


def _forget(key: int, reference: object = None) -> None:
    current_shadows.pop(key, None)
    _references.pop(key, None)


def forget_shadows() -> None:
    """Let go of all current shadows but those that regions refer to: each tensor gets another one if it is needed."""
    current_shadows.clear()
    _references.clear()


_written = WeakIdentitySet()  # tensors that some region wrote to without a copy being there
note_written, is_known_written = _written.add, _written.has
"""Keep a copy of a tensor from the next region on; return whether a region wrote to one before."""


def written_before(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return those of the tensors that a region wrote to before."""
    return filter(is_known_written, tensors) if _written else ()


def is_state(tensor: Tensor) -> bool:
    """Return whether a copy of the tensor is kept, for the case that something writes to it."""
    if type(tensor) in UNINITIALIZED:
        return False
    if tensor.requires_grad:
        return tensor.is_inference()
    if tensor.is_inference() or (tensor.ndim == 1 and tensor.is_floating_point()):
        return True
    return tensor.layout is torch.strided and (tensor.nbytes <= SMALL_BYTES or is_known_written(tensor))
