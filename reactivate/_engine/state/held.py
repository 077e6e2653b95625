"""Items as notes hold them: tensors with a graph weakly, iterators as they stood."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from reactivate._engine.state.bounded import cached_by_class
from reactivate._engine.state.iterators import copied, holds_iterator, is_iterator
from reactivate._torch.autograd import give_back
from reactivate._torch.modes import run_unseen


class WeakTensor:
    """A tensor with a graph, held so that the graph can go: strong notes would chain the steps of a training run.

    Attributes:
        reference: to the tensor.
        alias: its values, with its version counter and without its graph.
    """

    __slots__ = ("alias", "reference")

    def __init__(self, tensor: Tensor) -> None:
        self.reference = ref(tensor)
        self.alias = tensor.detach()

    def get(self) -> Tensor:
        """Return the tensor, or its values if nobody else has it any more: of a graph that no backward goes through."""
        original = self.reference()
        if original is not None:
            return original
        if not self.alias.requires_grad:  # a recomputation saves what the forward did
            self.alias = run_unseen(give_back, self.alias)
        return self.alias

    @property
    def _version(self) -> int:
        return self.alias._version


class Position(NamedTuple):
    """An iterator as it stood, or a tuple with one in it: a function that goes on with it uses it up."""

    iterator: Any


@cached_by_class
def _is_held_otherwise(kind: Any) -> bool:
    return issubclass(kind, (Tensor, tuple)) or is_iterator(kind)


def held(item: Any, weak: bool | None = True) -> Any:
    """Return what a note holds for `item`.

    Args:
        item: any object.
        weak: whether a tensor with a graph is held weakly; None to hold the very item, also of an iterator.
    """
    if weak is None:
        return item
    if holds_iterator(item):
        return Position(copied(item))
    return WeakTensor(item) if weak and isinstance(item, Tensor) and item.grad_fn is not None else item


def given_back(item: Any) -> Any:
    """Return the item that `held` was given."""
    if type(item) is WeakTensor:
        return item.get()
    return copied(item.iterator) if type(item) is Position else item


def is_item(item: Any, noted: Any) -> bool:
    """Return whether `noted` stands for this very `item`."""
    if item is None or type(noted) is not WeakTensor:  # a reference to what is gone gives None
        return item is noted
    return noted.reference() is item


def are_items(items: Iterable[Any], noted: Sequence[Any]) -> bool:
    """Return whether these are the noted items, one by one; lengths are compared by the caller."""
    found = list(items)
    return all(map(is_, found, noted)) or all(map(is_item, found, noted))


def held_all(items: Iterable[Any], weak: bool | None = True) -> list[Any]:
    """Return what a note holds for these items; see `held`."""
    found = list(items)
    if weak is None or not any(map(_is_held_otherwise, set(map(type, found)))):
        return found
    return [held(item, weak) for item in found]


def hold_values(items: dict[Any, Any], weak: bool | None) -> dict[Any, Any]:
    if weak is None or not any(map(_is_held_otherwise, set(map(type, items.values())))):
        return items
    return {key: held(item, weak) for key, item in items.items()}


def held_dicts(items: Iterable[dict[Any, Any]], weak: bool | None = True) -> list[dict[Any, Any]]:
    """Return copies of dicts, with what a note holds for their values; see `held`."""
    return [hold_values(dict(item), weak) for item in items]
