"""Contents of mutable Python objects, noted so that each object can be rewound in place.

Identity is kept: a recomputation meets the objects of its forward, and if what they hold has changed meanwhile, the noted
contents are put back into the same object. Items are compared with `is`, never with `==`: two one-element tensors that
are equal are two tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from operator import is_
from types import ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from reactivate._engine.state.bounded import cached
from reactivate._engine.state.iterators import copied, holds_iterator, is_iterator
from reactivate._standin import Placed
from reactivate._torch.autograd import give_back
from reactivate._torch.modes import run_unseen

ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice, type(...), object, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat),
    }
)
"""Classes of values that cannot change."""

LARGEST = 4096
"""The number of items up to which a container is noted item by item; of a larger one, only its length is."""

EMPTY: Any = object()


def namespace_of(value: Any) -> Any:
    """Return the `__dict__` of an object, None if it has none, or gives none."""
    try:
        return vars(value)
    except Exception:  # a property of that name may raise anything
        return None


def length_of(container: Any) -> int:
    """Return how many items a container has, past methods that a subclass overrides."""
    for kind in (list, dict, deque, set):
        if isinstance(container, kind):
            return kind.__len__(container)  # type: ignore[arg-type]
    return len(container)


def _slot_of(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except Exception:  # a property of that name may raise anything
        return EMPTY


@cached
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the slots of a class and its bases, private ones as Python mangles them."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


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


@cached
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


class Note:
    """One object and what it held.

    Attributes:
        noted: the contents, as `contents` returns them.
    """

    __slots__ = ("noted", "target")

    def __init__(self, target: Any, *, weak: bool | None = True) -> None:
        self.target = target
        self.noted: Any = self.contents(weak)

    def _of(self, target: Any) -> Note:
        """Be a note of `target` that has noted nothing yet."""
        self.target = target
        return self

    def contents(self, weak: bool | None = True) -> Any:
        """Return what the object holds now; `weak` as of `held`."""
        raise NotImplementedError

    def is_at(self, contents: Any) -> bool:
        """Return whether the object holds just these contents."""
        raise NotImplementedError

    def put(self, contents: Any) -> None:
        """Let the object hold `contents`."""
        raise NotImplementedError

    def items(self) -> Iterable[tuple[str, Any]]:
        """Return (how the item is written after the object, the noted item) of each, for messages and for the walk."""
        return ()


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


class ListNote(Note):
    """A list, a deque, or an object of a subclass."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return held_all(self._iterate(), weak)

    def _iterate(self) -> Iterable[Any]:
        kind = deque if isinstance(self.target, deque) else list
        return kind.__iter__(self.target)

    def is_at(self, contents: Any) -> bool:
        kind = deque if isinstance(self.target, deque) else list
        return kind.__len__(self.target) == len(contents) and are_items(self._iterate(), contents)

    def put(self, contents: Any) -> None:
        kind: Any = deque if isinstance(self.target, deque) else list
        kind.clear(self.target)
        kind.extend(self.target, map(given_back, contents))

    def items(self) -> Iterable[tuple[str, Any]]:
        return ((f"[{index}]", item) for index, item in enumerate(self.noted))


class DictNote(Note):
    """A dict, an object of a subclass, or the `__dict__` of an object."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return hold_values(dict(self._kind().items(self.target)), weak)

    def _kind(self) -> Any:
        return OrderedDict if isinstance(self.target, OrderedDict) else dict

    def is_at(self, contents: Any) -> bool:
        target, kind = self.target, self._kind()
        return (
            kind.__len__(target) == len(contents)
            and are_items(kind.values(target), contents.values())
            and (all(map(is_, kind.keys(target), contents)) or all(map(_is_key, kind.keys(target), contents)))
        )

    def put(self, contents: Any) -> None:
        put_dict(self.target, contents)

    def items(self) -> Iterable[tuple[str, Any]]:
        return ((f"[{key!r}]", item) for key, item in self.noted.items())


def _is_key(one: Any, other: Any) -> bool:
    return one is other or (type(one) is str and one == other)


def put_dict(target: Any, contents: dict[Any, Any]) -> None:
    """Give a dict these contents in this order, past methods that a subclass overrides."""
    kind: Any = OrderedDict if isinstance(target, OrderedDict) else dict
    others = {key: item for key, item in kind.items(target) if isinstance(item, Placed)}  # of another thread, no state
    kind.clear(target)
    for key, item in contents.items():
        kind.__setitem__(target, key, given_back(item))
    for key, item in others.items():
        kind.__setitem__(target, key, item)


class SetNote(Note):
    """A set, or an object of a subclass."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return held_all(set.__iter__(self.target), weak)

    def is_at(self, contents: Any) -> bool:
        return set.__len__(self.target) == len(contents) and are_items(set.__iter__(self.target), contents)

    def put(self, contents: Any) -> None:
        set.clear(self.target)
        set.update(self.target, map(given_back, contents))


class LengthNote(Note):
    """A container of more than `LARGEST` items: what was appended since is taken off again.

    Items that were replaced or taken away stay so: the function sees what torch's checkpoint would show it.
    """

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return length_of(self.target), ()

    def is_at(self, contents: Any) -> bool:
        length, tail = contents
        return length_of(self.target) == int(length) + len(tail)

    def put(self, contents: Any) -> None:
        length, tail = contents
        target = self.target
        if isinstance(target, list):
            del target[length:]
            target += tail
        elif isinstance(target, dict):
            for key in list(target)[length:]:
                del target[key]
            target.update(tail)

    def appended(self) -> Any:
        """Return the present contents: the noted length and what came behind it, or all items if some were taken away."""
        target = self.target
        length = self.noted[0] if len(target) >= self.noted[0] else 0
        if isinstance(target, dict):
            return length, [(key, target[key]) for key in list(target)[length:]]
        return length, target[length:] if isinstance(target, list) else ()


class SlotsNote(Note):
    """The slots of an object."""

    __slots__ = ("names",)

    def __init__(self, target: Any, names: Sequence[str], *, weak: bool | None = True) -> None:
        self.names = names
        super().__init__(target, weak=weak)

    def contents(self, weak: bool | None = True) -> Any:
        return held_all((_slot_of(self.target, name) for name in self.names), weak)

    def is_at(self, contents: Any) -> bool:
        return are_items((_slot_of(self.target, name) for name in self.names), contents)

    def put(self, contents: Any) -> None:
        for name, item in zip(self.names, contents):
            if item is not EMPTY:
                object.__setattr__(self.target, name, given_back(item))
            elif _slot_of(self.target, name) is not EMPTY:
                object.__delattr__(self.target, name)

    def items(self) -> Iterable[tuple[str, Any]]:
        return ((f".{name}", item) for name, item in zip(self.names, self.noted) if item is not EMPTY)

    def filled(self) -> dict[str, Any]:
        """Return what is in the slots that are not empty, by their names."""
        items = ((name, _slot_of(self.target, name)) for name in self.names)
        return {name: item for name, item in items if item is not EMPTY}


def held_dicts(items: Iterable[dict[Any, Any]], weak: bool | None = True) -> list[dict[Any, Any]]:
    """Return copies of dicts, with what a note holds for their values; see `held`."""
    return [hold_values(dict(item), weak) for item in items]


class TensorsNote(Note):
    """The Python attributes of some tensors, or of the members of an enum."""

    __slots__ = ()

    def __init__(self, objects: Iterable[Any]) -> None:
        self.target = list(map(vars, objects))
        self.noted = held_dicts(self.target) if any(self.target) else None

    def contents(self, weak: bool | None = True) -> Any:
        return held_dicts(self.target, weak) if any(self.target) else None

    def is_at(self, contents: Any) -> bool:
        if contents is None:
            return not any(self.target)
        return all(
            len(now) == len(noted) and are_items(now.values(), list(noted.values()))
            for now, noted in zip(self.target, contents)
        )

    def put(self, contents: Any) -> None:
        for live, noted in zip(self.target, contents or [{}] * len(self.target)):
            put_dict(live, noted)


class KindNote(Note):
    """The class of an object."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return type(self.target)

    def is_at(self, contents: Any) -> bool:
        return type(self.target) is contents

    def put(self, contents: Any) -> None:
        object.__setattr__(self.target, "__class__", contents)
