"""Functions, closed-over variables, classes and names, noted so that each can be rewound in place."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any, NamedTuple

from reactivate._engine.state.attributes import EMPTY
from reactivate._engine.state.contents import DictNote, ListNote, Note, put_dict
from reactivate._engine.state.held import given_back, held, hold_values, is_item

_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class FunctionNote(Note):
    """A Python function: its code, its defaults and its attributes."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        code, defaults, keywords = _of_function(self.target)
        attributes = self.target.__dict__
        return (
            code,
            defaults if defaults is None else held(defaults, weak),
            keywords,
            hold_values(dict(attributes), weak) if attributes else {},
        )

    def is_at(self, contents: Any) -> bool:
        attributes, now = contents[3], self.target.__dict__
        if not all(map(is_, _of_function(self.target), contents)) or len(now) != len(attributes):
            return False
        return not now or all(is_item(now.get(name, EMPTY), item) for name, item in attributes.items())

    def put(self, contents: Any) -> None:
        fn = self.target
        fn.__code__, defaults, fn.__kwdefaults__, attributes = contents
        fn.__defaults__ = given_back(defaults)
        put_dict(fn.__dict__, attributes)


class PartialNote(Note):
    """A `functools.partial`: its function, its arguments and its attributes."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        target = self.target
        return target.func, held(target.args, weak), target.keywords, hold_values(dict(vars(target)), weak)

    def is_at(self, contents: Any) -> bool:
        target = self.target
        function, arguments, keywords, attributes = contents
        if target.func is not function or target.args is not arguments or target.keywords is not keywords:
            return False
        now = vars(target)
        return len(now) == len(attributes) and all(
            is_item(now.get(name, EMPTY), attributes[name]) for name in attributes
        )

    def put(self, contents: Any) -> None:
        function, arguments, keywords, attributes = contents
        target = self.target
        target.__setstate__((function, given_back(arguments), keywords, vars(target)))
        put_dict(vars(target), attributes)


class CellNote(Note):
    """A closed-over variable."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        try:
            return held(self.target.cell_contents, weak)
        except ValueError:
            return EMPTY

    def is_at(self, contents: Any) -> bool:
        try:
            return is_item(self.target.cell_contents, contents)
        except ValueError:
            return contents is EMPTY

    def put(self, contents: Any) -> None:
        if contents is EMPTY:
            del self.target.cell_contents
        else:
            self.target.cell_contents = given_back(contents)


class Inside(NamedTuple):
    """A container that is found through the cell that it is in.

    Attributes:
        key: its id; compared only while the cell has a container.
        kind: its class.
        items: its contents.
        container: the object, where a recomputation has to give it back.
    """

    key: int
    kind: Any
    items: Any
    container: Any = None


class CellContainerNote(Note):
    """A list or dict that a closed-over variable names, and its contents.

    It is held through the cell: held directly, the outputs that a loop collects in a new list for each call would stay
    alive as long as the regions that wrote them.
    """

    __slots__ = ()

    def _inner(self) -> Note | None:
        try:
            container = self.target.cell_contents
        except ValueError:
            return None
        if isinstance(container, list):
            return ListNote.__new__(ListNote)._of(container)
        return DictNote.__new__(DictNote)._of(container) if isinstance(container, dict) else None

    def contents(self, weak: bool | None = True) -> Any:
        inner = self._inner()
        if inner is None:
            return CellNote.contents(self, weak)  # type: ignore[arg-type]
        container = inner.target
        return Inside(id(container), type(container), inner.contents(weak), container if weak is None else None)

    def is_at(self, contents: Any) -> bool:
        if type(contents) is not Inside:
            return CellNote.is_at(self, contents)  # type: ignore[arg-type]
        inner = self._inner()
        return inner is not None and id(inner.target) == contents.key and inner.is_at(contents.items)

    def put(self, contents: Any) -> None:
        if type(contents) is not Inside:
            CellNote.put(self, contents)  # type: ignore[arg-type]
            return
        inner = self._inner()
        if inner is None or id(inner.target) != contents.key:
            container = contents.kind.__new__(contents.kind) if contents.container is None else contents.container
            self.target.cell_contents = container
            inner = self._inner()
            assert inner is not None
        if not inner.is_at(contents.items):
            inner.put(contents.items)

    def items(self) -> Iterable[tuple[str, Any]]:
        if type(self.noted) is not Inside:
            return ()
        items = self.noted.items
        pairs = items.items() if isinstance(items, dict) else enumerate(items)
        return ((f"[{key!r}]", item) for key, item in pairs)


class ClassNote(Note):
    """The attributes of a class."""

    __slots__ = ()

    def contents(self, weak: bool | None = True) -> Any:
        return hold_values(dict(vars(self.target)), weak)

    def is_at(self, contents: Any) -> bool:
        now = vars(self.target)
        if list(now) != list(contents):
            return False
        return all(map(is_, now.values(), contents.values())) or all(map(is_item, now.values(), contents.values()))

    def put(self, contents: Any) -> None:
        now = dict(vars(self.target))
        for name in now.keys() - contents.keys():
            delattr(self.target, name)
        for name, value in contents.items():
            if not is_item(now.get(name, EMPTY), value):
                setattr(self.target, name, given_back(value))


class NameNote(Note):
    """A module-level name."""

    __slots__ = ("name",)

    def __init__(self, target: dict[str, Any], name: str) -> None:
        self.name = name
        super().__init__(target)

    def contents(self, weak: bool | None = True) -> Any:
        return held(self.target.get(self.name, EMPTY), weak)

    def is_at(self, contents: Any) -> bool:
        return is_item(self.target.get(self.name, EMPTY), contents)

    def put(self, contents: Any) -> None:
        if contents is EMPTY:
            self.target.pop(self.name, None)
        else:
            self.target[self.name] = given_back(contents)
