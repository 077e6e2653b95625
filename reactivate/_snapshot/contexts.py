"""Containers behind context variables: a recomputation gets copies of what they held.

Any function may ask for the values of context variables, so all of them are looked at. A collector that appends through one
is mostly gone before the backward, and what it holds leads to the graph, which leads to the region. So a region holds
neither the container nor its graph: it holds what was in there, as moments do, and its own context has nothing in the place
of the container. In a recomputation the variable has a new container with the earlier contents, and what is appended goes
with it.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextvars import Context, ContextVar
from typing import Any

from reactivate._snapshot.held import ATOMS, held, is_item, restored
from reactivate._snapshot.holders import LARGEST, Contents, Holder
from reactivate._snapshot.walk import DEPTH, Walk
from reactivate._torch.settings import is_setting

COPIED = frozenset({list, dict, OrderedDict, defaultdict, deque, set})
"""Classes of containers of which a recomputation gets copies, or which are in a result that is made anew."""

_OURS = "reactivate."
"""The beginning of the names of this package's own context variables, which hold no state of a region."""


class ContainerCopy:
    """The contents of a container, or of a tuple with containers in it.

    Args:
        value: the container. It is held until `let_go`.

    Attributes:
        keys: of a dict.
        parts: the items: a `ContainerCopy` for each container, anything else as moments hold it.
        original: the container, if a recomputation is to have itself; see `let_go`.
    """

    __slots__ = ("_empty", "_kind", "keys", "original", "parts")

    def __init__(self, value: Any) -> None:
        self._kind: Any = type(value)
        self._empty: Callable[[], Any] = empty_like(value)
        self.original = value
        self.keys: list[Any] = list(value) if isinstance(value, dict) else []
        self.parts: list[Any] = []

    def let_go(self) -> None:
        """Hold the container no longer."""
        self.original = None

    def is_of(self, value: Any, seen: set[int] | None = None) -> bool:
        """Return whether a container holds just this."""
        seen = set() if seen is None else seen
        if id(self) in seen or (value is not None and self.original is value):
            return True
        seen.add(id(self))
        if type(value) is not self._kind or len(value) != len(self.parts):
            return False
        if self.keys and not all(map(is_item, value, self.keys)):
            return False
        items = value.values() if isinstance(value, dict) else value
        return all(
            part.is_of(item, seen) if type(part) is ContainerCopy else is_item(item, part)
            for item, part in zip(items, self.parts)
        )

    def copy(self, made: dict[int, Any]) -> Any:
        """Return a container that holds this; one that occurs twice is made once."""
        if self.original is not None:
            return self.original
        if id(self) in made:
            return made[id(self)]
        if issubclass(self._kind, tuple):
            items = self._items(made)
            return tuple(items) if self._kind is tuple else self._kind._make(items)
        found = made[id(self)] = self._empty()
        if isinstance(found, dict):
            found.update(zip(self.keys, self._items(made)))
        elif isinstance(found, set):
            found.update(self._items(made))
        else:
            found.extend(self._items(made))
        return found

    def _items(self, made: dict[int, Any]) -> list[Any]:
        return [part.copy(made) if type(part) is ContainerCopy else restored(part) for part in self.parts]


def empty_like(value: Any) -> Callable[[], Any]:
    """Return what makes an empty container like one of the `COPIED`."""
    if isinstance(value, deque):
        return functools.partial(deque, maxlen=value.maxlen)
    return functools.partial(defaultdict, value.default_factory) if isinstance(value, defaultdict) else type(value)


class ContextHolder(Holder):
    """A context variable whose value is a container.

    Attributes:
        copied: what the container holds.
    """

    __slots__ = ("copied",)
    is_shared = False  # a recomputation has a context of its own

    def __init__(self, target: ContextVar[Any], copied: ContainerCopy) -> None:
        self.target, self.copied = target, copied

    @property
    def name(self) -> str:
        """Return how messages call the container."""
        return str(self.target.name)

    def record(self) -> Contents:
        return (self.copied,)

    def get(self) -> Contents:
        value = self.target.get(None)
        return (value, *_inside(value, set()))

    def is_at(self, contents: Contents) -> bool:
        value = self.target.get(None)
        return contents[0].is_of(value) if type(contents[0]) is ContainerCopy else contents[0] is value

    def put(self, contents: Contents) -> None:
        self.target.set(contents[0].copy({}) if type(contents[0]) is ContainerCopy else contents[0])


def _inside(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield everything in a container and in those that are in it."""
    kind = type(value)
    if (kind in COPIED or isinstance(value, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            yield item
            yield from _inside(item, seen)


class ContextContainers:
    """The containers behind the context variables of one region that nothing else has led to.

    Args:
        walk: the walk over what the region reaches; it looks at what else the variables hold.
        context: the context variables.
    """

    def __init__(self, walk: Walk, context: Context) -> None:
        self._walk = walk
        self._copied: dict[int, ContainerCopy] = {}
        self.holders: list[ContextHolder] = []
        for variable, value in context.items():
            is_fixed = type(value) in ATOMS or (type(value) is tuple and not value)
            if is_fixed or variable.name.startswith(_OURS) or is_setting(variable):
                continue
            noted = self._noted(value, f"the context variable `{variable.name}`")
            if type(noted) is ContainerCopy:
                self.holders.append(ContextHolder(variable, noted))

    def _noted(self, value: Any, place: str) -> Any:
        """Return what is held of a value: of a container what it holds, so that the container can go."""
        kind = type(value)
        if kind in ATOMS or id(value) in self._walk.seen:
            return value
        if id(value) in self._copied:
            return self._copied[id(value)]
        is_tuple = kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_make"))
        if not (is_tuple or kind in COPIED) or len(value) > LARGEST:
            self._walk.look(value, place, DEPTH)
            return held(value)
        noted = self._copied[id(value)] = ContainerCopy(value)
        items = list(value.values() if isinstance(value, dict) else value)
        keys = noted.keys or range(len(items))
        noted.parts = [self._noted(item, f"{place}[{key!r}]") for key, item in zip(keys, items)]
        if is_tuple and all(part is item for part, item in zip(noted.parts, items)):
            return value
        return noted

    def settle(self, context: Context, held_by_modules: Collection[int], *, is_large: bool) -> None:
        """Let go of the containers, but for those that modules hold too: of these a recomputation has no second one.

        Args:
            context: the region's own. It has nothing in the place of the containers.
            held_by_modules: the ids of the objects that modules lead to.
            is_large: whether it is not known yet which modules the region reaches: then containers are rewound in place.
        """
        for key, copied in self._copied.items():
            if key not in held_by_modules:
                copied.let_go()
        for holder in self.holders:
            if is_large:
                self._walk.look(context[holder.target], f"the context variable `{holder.name}`", DEPTH)
            elif holder.copied.original is None:
                self._walk.holders.append(holder)
                context.run(holder.target.set, None)
