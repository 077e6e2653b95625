"""Items as a moment holds them: tensors with a graph weakly, iterators as copies, everything else as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from reactivate._snapshot.caches import cached_by_class
from reactivate._snapshot.inputs import Constant
from reactivate._snapshot.iterators import copied, holds_iterator, is_iterator
from reactivate._torch.autograd import as_a_result, has_graph
from reactivate._torch.modes import run_unseen


class WeakTensor:
    """A tensor with a graph, held so that the graph can go: strong references would chain the steps of a training run.

    Attributes:
        reference: to the tensor.
        alias: its values, with its version counter and without its graph.
    """

    __slots__ = ("alias", "reference")

    def __init__(self, tensor: Tensor) -> None:
        self.reference = ref(tensor)
        self.alias = tensor.detach()

    def get(self) -> Tensor:
        """Return the tensor, or its values if it is gone: no backward goes through its graph then."""
        original = self.reference()
        if original is not None:
            return original
        if not self.alias.requires_grad:  # a recomputation saves what the forward did
            self.alias = run_unseen(as_a_result, self.alias)
        return self.alias

    @property
    def _version(self) -> int:
        return self.alias._version


class Position(NamedTuple):
    """A copy of an iterator, or of a tuple with one in it: a function that goes on with the original uses it up."""

    iterator: Any


ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), object, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat),
    }
)
"""Classes of values that cannot change."""

_PLAIN = ATOMS | {type, dict, list, set, CodeType, FunctionType, MethodType, BuiltinFunctionType}
"""Classes whose objects are held as they are: those of most items."""


@cached_by_class
def _is_held_otherwise(kind: Any) -> bool:
    return issubclass(kind, (Tensor, tuple, MethodWrapperType)) or is_iterator(kind)


def held(item: Any) -> Any:
    """Return what a moment holds for `item`."""
    if not _is_held_otherwise(type(item)):
        return item
    if holds_iterator(item):
        return Position(copied(item))
    return WeakTensor(item) if isinstance(item, Tensor) and has_graph(item) else item


def held_all(items: Sequence[Any]) -> Sequence[Any]:
    """Return what a moment holds for these items: the sequence itself, if that is all of them as they are."""
    if _PLAIN.issuperset(map(type, items)) or not any(map(_is_held_otherwise, set(map(type, items)))):
        return items
    return tuple([item if type(item) in _PLAIN else held(item) for item in items])


def restored(item: Any) -> Any:
    """Return the item that `held` was given."""
    if type(item) is WeakTensor:
        return item.get()
    if type(item) is Constant:
        return item.now
    return copied(item.iterator) if type(item) is Position else item


def is_item(item: Any, noted: Any) -> bool:
    """Return whether `noted` stands for this very `item`; equal strings are one."""
    if item is noted:
        return True
    if type(noted) is WeakTensor:
        return item is not None and noted.reference() is item  # a reference to what is gone gives None
    return type(noted) is str and type(item) is str and item == noted


def are_items(items: Sequence[Any], noted: Sequence[Any]) -> bool:
    """Return whether these are the noted items, one by one."""
    return len(items) == len(noted) and (all(map(is_, items, noted)) or all(map(is_item, items, noted)))


def original_of(item: Any) -> Any:
    """Return the object that a held item stands for, None if it is gone."""
    return item.reference() if type(item) is WeakTensor else item


def strongly(items: Iterable[Any]) -> list[Any]:
    """Return the items that `held_all` was given."""
    return list(map(restored, items))
