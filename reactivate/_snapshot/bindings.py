"""The names that code reads: values that may change, and the functions, classes and modules that it calls.

A name that code reads mostly stands for the same function for good. So the names are found once for each code object, and
which objects they stood for is known by weak references: as long as they do, what else these functions name is known too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import ref

from reactivate._snapshot.cached_results import CACHED
from reactivate._snapshot.caches import is_importable
from reactivate._snapshot.held import ATOMS
from reactivate._snapshot.holders import EMPTY, AttributesHolder, Contents, Holder, attributes_of, made_of

Namespace = dict[str, Any]
Names = tuple[tuple[Namespace, str], ...]

_CODE = attrgetter("__code__")
_DEFAULTS = attrgetter("__defaults__")
_OPEN = attrgetter("__closure__", "__kwdefaults__", "__dict__")


class Bindings:
    """Names that stood for functions, classes and modules when they were found.

    Args:
        names: (namespace, name) of each.
        is_users: whether a value is a function whose defaults and attributes are noted.

    Attributes:
        names: the names, those of one namespace behind each other.
    """

    __slots__ = ("_are_users", "_codes", "_getters", "_known", "names")

    def __init__(self, names: Iterable[tuple[Namespace, str]], is_users: Callable[[Any], bool]) -> None:
        spaces: dict[int, tuple[Namespace, list[str]]] = {}
        for namespace, name in names:
            spaces.setdefault(id(namespace), (namespace, []))[1].append(name)
        found = [(namespace, own * 2 if len(own) == 1 else own) for namespace, own in spaces.values()]
        self._getters = [(itemgetter(*own), namespace) for namespace, own in found]  # with one name it gives no tuple
        self.names = [(namespace, name) for namespace, own in found for name in own]
        values = self.values()
        self._are_users = list(map(is_users, values))
        self._known = list(map(ref, values))
        self._codes = list(map(_CODE, self.functions_in(values)))

    def values(self) -> list[Any]:
        """Return what the names stand for now."""
        try:
            return list(chain.from_iterable([get(namespace) for get, namespace in self._getters]))
        except KeyError:
            return [namespace.get(name, EMPTY) for namespace, name in self.names]

    def functions_in(self, values: Iterable[Any]) -> list[FunctionType]:
        """Return those of the values that are functions of the user's."""
        return list(compress(values, self._are_users))

    def are_current(self) -> bool:
        """Return whether the names stand for what they stood for in the beginning, with the same code."""
        values = self.values()
        try:
            # There is one plain weak reference to each object, and an object in its place has another.
            is_known = all(map(is_, map(ref, values), self._known))
        except TypeError:  # not one of a function, a class or a module
            return False
        return is_known and all(map(is_, map(_CODE, self.functions_in(values)), self._codes))


def are_closed(functions: Sequence[FunctionType]) -> bool:
    """Return whether the functions lead to nothing: no closures, no attributes, and only values as defaults."""
    if any(chain.from_iterable(map(_OPEN, functions))):
        return False
    return ATOMS.issuperset(map(type, chain.from_iterable(filter(None, map(_DEFAULTS, functions)))))


class CodeHolder(Holder):
    """Which objects names stand for, and the code and the defaults of those that are functions of the user's.

    Attributes:
        functions: these functions.
        open, closed: those that led to something when this was made, and those that did not, and may get attributes.
    """

    __slots__ = ("closed", "functions", "open")
    name = "the functions that code names"

    def __init__(self, target: Sequence[Bindings]) -> None:
        self.functions = [fn for bindings in target for fn in bindings.functions_in(bindings.values())]
        self.open = [] if are_closed(self.functions) else [fn for fn in self.functions if not are_closed([fn])]
        self.closed = [fn for fn in self.functions if fn not in self.open] if self.open else self.functions
        self.target = target

    def get(self) -> Contents:
        values = chain.from_iterable([bindings.values() for bindings in self.target])
        attributes = AttributesHolder(self.closed).get() if any(map(attributes_of, self.closed)) else ()
        return (*values, *chain.from_iterable(map(made_of, self.functions)), *attributes)

    def record(self) -> Contents:
        return self.get()

    def is_at(self, contents: Contents) -> bool:
        now = self.get()
        return len(now) == len(contents) and all(map(is_, now, contents))

    def put(self, contents: Contents) -> None:
        items = iter(contents)
        for namespace, name in chain.from_iterable([bindings.names for bindings in self.target]):
            value = next(items)
            if value is EMPTY:
                namespace.pop(name, None)
            elif namespace.get(name, EMPTY) is not value:
                namespace[name] = value
        for fn in self.functions:
            fn.__code__, fn.__defaults__, fn.__kwdefaults__ = next(items), next(items), next(items)
        AttributesHolder(self.closed).put([*items])

    def kept_with(self, contents: Contents) -> Iterable[Any] | None:
        if not all(is_importable(namespace) for bindings in self.target for namespace, _ in bindings.names):
            return None
        fixed = [item for item in contents if isinstance(item, (BuiltinFunctionType, CACHED))]
        return [*fixed, *(fn for fn in self.functions if not are_closed([fn]))]
