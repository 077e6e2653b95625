"""Code that may write to tensors without a new version: through `.data`, NumPy's view of a tensor or a storage, item by item.

A region that reaches such code relies on no version of the tensors that it copies. A class has many methods that no region
calls, so one of them counts only if other code that is reached asks an object for its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import NamedTuple
from weakref import ref

from reactivate._snapshot.facts import Facts, facts_of, functions_in, generation

_WAYS = frozenset(
    {
        *("data", "numpy", "asarray", "asanyarray", "ascontiguousarray", "array", "__array__", "from_dlpack"),
        *("apply_", "map_", "map2_", "untyped_storage", "storage"),
        # They write running statistics, which may be part of a larger tensor.
        *("batch_norm", "native_batch_norm", "instance_norm"),
    }
)


def names_a_way(facts: Facts) -> bool:
    """Return whether code, or that of a function that it names, names a way past version counters."""
    return not _WAYS.isdisjoint(facts.attributes)


class NamesOfWriters(NamedTuple):
    """The names in some code.

    Attributes:
        asked: sets of those that the code asks objects for.
        writers: of methods that may write to tensors without a new version.
    """

    asked: tuple[frozenset[str], ...]
    writers: frozenset[str]


class ReachedCode:
    """The functions and classes that a walk came to.

    Attributes:
        functions: the functions, which may be called under any name.
        classes: those that have methods themselves.
        trees: what the code of trees of modules was found to name.
    """

    functions: tuple[Facts, ...] = ()
    classes: tuple[type, ...] = ()
    trees: tuple[NamesOfWriters, ...] = ()

    def add(self, other: ReachedCode) -> None:
        """Add what another walk came to."""
        self.functions += other.functions
        self.classes += other.classes
        self.trees += other.trees

    def asked(self) -> frozenset[str]:
        """Return the names that the functions ask objects for."""
        return frozenset[str]().union(*(facts.attributes for facts in self.functions))

    def names(self) -> NamesOfWriters:
        """Return the names in all of it."""
        found = [*self.trees, *map(_names_in, self.classes)]
        asked = [*(facts.attributes for facts in self.functions), *(names for item in found for names in item.asked)]
        writers = frozenset[str]().union(*(item.writers for item in found))
        return NamesOfWriters(
            tuple(asked), writers | {"__call__"} if any(map(names_a_way, self.functions)) else writers
        )

    def may_write_unseen(self) -> bool:
        """Return whether it may write to tensors without a new version."""
        asked, writers = self.names()
        return any(map(_is_called_anyway, writers)) or not all(map(writers.isdisjoint, asked))


def _is_called_anyway(name: str) -> bool:
    return name == "forward" or name.startswith("__")


class _NamesOfClass(NamedTuple):
    codes: list[CodeType]
    generation: int
    names: NamesOfWriters
    reference: ref[type]


_known: dict[int, _NamesOfClass] = {}  # by the id of the class, as long as that lives


def _names_in(kind: type) -> NamesOfWriters:
    """Return the names in the methods that a class has itself, but for that which initialises an object."""
    codes = [item.__code__ for item in vars(kind).values() if type(item) is FunctionType]
    key = id(kind)
    known = _known.get(key)
    if known is not None and known.codes == codes and known.generation == generation[0]:
        return known.names
    facts = [(name, facts_of(fn)) for name, fn in _methods_in(kind)]
    asked = frozenset[str]().union(*(item.attributes for _, item in facts))
    names = NamesOfWriters((asked,), frozenset(name for name, item in facts if names_a_way(item)))
    _known[key] = _NamesOfClass(codes, generation[0], names, ref(kind, lambda _: _known.pop(key, None)))
    return names


def _methods_in(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, item in vars(kind).items():
        if name != "__init__":
            for fn in functions_in(item):
                yield name, fn
