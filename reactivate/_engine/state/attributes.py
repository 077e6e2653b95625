"""Notes of what objects have that are no containers: their class, their slots, the Python attributes of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from reactivate._engine.state.bounded import cached_by_class
from reactivate._engine.state.contents import Note, put_dict
from reactivate._engine.state.held import are_items, given_back, held_all, held_dicts

EMPTY: Any = object()


def namespace_of(value: Any) -> Any:
    """Return the `__dict__` of an object, None if it has none, or gives none."""
    try:
        return vars(value)
    except Exception:  # a property of that name may raise anything
        return None


def _slot_of(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except Exception:  # a property of that name may raise anything
        return EMPTY


@cached_by_class
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the slots of a class and its bases, private ones as Python mangles them."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


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
