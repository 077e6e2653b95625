"""Contents of mutable Python objects, noted so that each object can be rewound in place.

Identity is kept: a recomputation meets the objects of its forward, and if what they hold has changed meanwhile, the noted
contents are put back into the same object. Items are compared with `is`, never with `==`: two one-element tensors that
are equal are two tensors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from operator import is_
from types import ModuleType
from typing import Any

import torch

from reactivate._engine.state.held import are_items, given_back, held_all, hold_values
from reactivate._engine.state.region_calls import handed_out, is_of_call, without_entries_of_calls
from reactivate._modules.standin import Placed

ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice, type(...), object, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat),
    }
)
"""Classes of values that cannot change."""

LARGEST = 4096
"""The number of items up to which a container is noted item by item; of a larger one, only its length is."""


def pairs_in(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys, or indices, and the items that a dict or a list has now, without what code keeps for a region.

    Of a dict both are copied at once: a weak reference that dies may change it while somebody goes through it.
    """
    if isinstance(container, list):
        return enumerate(container)
    pairs = zip([*container], [*container.values()])
    return [pair for pair in pairs if not is_of_call(pair[0])] if handed_out else pairs


def length_of(container: Any) -> int:
    """Return how many items a container has, past methods that a subclass overrides."""
    for kind in (list, dict, deque, set):
        if isinstance(container, kind):
            return kind.__len__(container)  # type: ignore[arg-type]
    return len(container)


class Note:
    """One object and what it held.

    Attributes:
        noted: the contents, as `contents` returns them.
        is_shared: whether other threads find the object as it is put back.
    """

    __slots__ = ("noted", "target")
    is_shared = True

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
        return hold_values(without_entries_of_calls(dict(self._kind().items(self.target))), weak)

    def _kind(self) -> Any:
        return OrderedDict if isinstance(self.target, OrderedDict) else dict

    def is_at(self, contents: Any) -> bool:
        target, kind = self.target, self._kind()
        if handed_out:
            target, kind = without_entries_of_calls(dict(kind.items(target))), dict
        return (
            kind.__len__(target) == len(contents)
            and are_items(kind.values(target), contents.values())
            and (all(map(is_, kind.keys(target), contents)) or all(map(is_key, kind.keys(target), contents)))
        )

    def put(self, contents: Any) -> None:
        put_dict(self.target, contents)

    def items(self) -> Iterable[tuple[str, Any]]:
        return ((f"[{key!r}]", item) for key, item in self.noted.items())


def is_key(one: Any, other: Any) -> bool:
    """Return whether these are one key of a dict."""
    return one is other or (type(one) is str and one == other)


def put_dict(target: Any, contents: dict[Any, Any]) -> None:
    """Give a dict these contents in this order, past methods that a subclass overrides."""
    kind: Any = OrderedDict if isinstance(target, OrderedDict) else dict
    # What another thread has placed, and what code keeps for a region, is no state.
    others = {
        key: item for key, item in kind.items(target) if isinstance(item, Placed) or (handed_out and is_of_call(key))
    }
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
