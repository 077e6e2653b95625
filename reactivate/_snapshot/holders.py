"""Objects whose contents can change: how to read the contents of each, and how to put them back into the same object.

Identity is kept: a recomputation meets the objects of its forward, and if what they hold has changed meanwhile, the earlier
contents are put back in place. Items are compared with `is`, never with `==`: two one-element tensors that are equal are two
tensors.

To add a kind of object, write a `Holder` with `get` and `put`, and name its class in the table of `walk.py`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain, permutations
from operator import attrgetter, is_
from types import CellType
from typing import Any, ClassVar

from reactivate._modules.standin import Placed
from reactivate._snapshot.caches import is_importable
from reactivate._snapshot.held import are_items, held_all, is_item, restored, strongly
from reactivate._snapshot.kinds import Slot
from reactivate._snapshot.region_calls import handed_out, is_of_call
from reactivate._torch.modules import dict_of_class, version_of_dict

FACTORY = (("default_factory", vars(defaultdict)["default_factory"]),)
"""What a `defaultdict` makes values with, in the way of a slot."""

_FEW = 6  # items of a set, of which all orders are tried
LARGEST = 4096
"""The number of items up to which a container is read item by item; of a larger one, only its length is."""

EMPTY: Any = object()
"""What stands for a slot, a cell or a name that holds nothing."""

Contents = Sequence[Any]

_NEVER: tuple[int, Contents] = (0, ())
"""The version and the contents of no dict."""


class Holder:
    """One object whose contents count.

    Attributes:
        target: the object.
        is_shared: whether other threads see the object while it is rewound.
        name: how messages call it; None for its class.
    """

    __slots__ = ("target",)
    is_shared: ClassVar[bool] = True
    name: Any = None

    def __init__(self, target: Any) -> None:
        self.target = target

    def get(self) -> Contents:
        """Return what the object holds now."""
        raise NotImplementedError

    def put(self, contents: Contents) -> None:
        """Let the object hold what `get` or `record` returned."""
        raise NotImplementedError

    def record(self) -> Contents:
        """Return what a moment keeps of the contents: see `held`."""
        return held_all(self.get())

    def is_at(self, contents: Contents) -> bool:
        """Return whether the object holds just these contents."""
        return are_items(self.get(), contents)

    def items(self, contents: Contents) -> Iterable[tuple[str, Any]]:
        """Return (how the item is written after the object, the item) of each item in some contents."""
        return ((f"[{index}]", item) for index, item in enumerate(contents))

    def kept_with(self, contents: Contents) -> Iterable[Any] | None:
        """Return what is kept alive where this object and these contents are; None where they must not be (see `trees`)."""
        return (item for item in contents if item is not EMPTY)


class ListHolder(Holder):
    """A list, a deque, or an object of a subclass, past methods that a subclass overrides."""

    __slots__ = ()

    def get(self) -> Contents:
        target = self.target
        return tuple((deque if isinstance(target, deque) else list).__iter__(target))

    def put(self, contents: Contents) -> None:
        kind: Any = deque if isinstance(self.target, deque) else list
        items = strongly(contents)
        kind.clear(self.target)
        kind.extend(self.target, items)


class SetHolder(Holder):
    """A set, or an object of a subclass."""

    __slots__ = ()

    def get(self) -> Contents:
        return tuple(set.__iter__(self.target))

    def put(self, contents: Contents) -> None:
        items = strongly(contents)
        # Of two that fall into one place the first one gets it: so in all orders of a few, one by one, as a set grows.
        for order in permutations(items) if len(items) <= _FEW else (items,):
            set.clear(self.target)
            for item in order:
                set.add(self.target, item)
            if all(map(is_, set.__iter__(self.target), items)):
                break


class VersionedHolder(Holder):
    """An object that keeps what it holds in a dict, whose version tells whether it was written to.

    Args:
        target: the object.
        items: the dict; of a subclass, which may change its order unseen, the version is not asked.

    Attributes:
        namespace: the dict, None where its version is not asked.
    """

    # `_last` is (version, contents) of a moment. An iterator among the items goes on without a write: such contents are
    # compared each time.
    __slots__ = ("_last", "namespace")

    def __init__(self, target: Any, items: Any) -> None:
        self.target = target
        self.namespace: dict[Any, Any] | None = items if type(items) is dict else None
        self._last: tuple[int, Contents] = _NEVER

    def record(self) -> Contents:
        if self.namespace is None:
            return super().record()
        version, contents = version_of_dict(self.namespace), self.get()
        noted = held_all(contents)
        self._last = (version, noted) if noted is contents else _NEVER
        return noted

    def is_at(self, contents: Contents) -> bool:
        version, last = self._last
        if contents is not last or self.namespace is None:
            return super().is_at(contents)
        now = version_of_dict(self.namespace)
        if version != now:
            if not super().is_at(contents):
                return False
            self._last = now, last
        return True


class DictHolder(VersionedHolder):
    """A dict, an object of a subclass, or the `__dict__` of an object: the keys, then the values."""

    __slots__ = ()

    def __init__(self, target: Any) -> None:
        super().__init__(target, target)

    def get(self) -> Contents:
        return dict_contents(self.target)

    def put(self, contents: Contents) -> None:
        put_dict(self.target, contents)

    def items(self, contents: Contents) -> Iterable[tuple[str, Any]]:
        half = len(contents) // 2
        return ((f"[{key!r}]", item) for key, item in zip(contents[:half], contents[half:]))


def dict_contents(target: Any) -> Contents:
    """Return the keys of a dict and then its values, without entries that belong to a region."""
    if isinstance(target, OrderedDict):
        pairs = dict(OrderedDict.items(target))
        keys, values = tuple(pairs), tuple(pairs.values())
    else:
        keys, values = tuple(dict.__iter__(target)), tuple(dict.values(target))
    if handed_out and any(map(is_of_call, keys)):
        kept = [(key, value) for key, value in zip(keys, values) if not is_of_call(key)]
        return (*(key for key, _ in kept), *(value for _, value in kept))
    return keys + values


def put_dict(target: Any, contents: Contents) -> None:
    """Give a dict these contents in this order, past methods that a subclass overrides."""
    kind: Any = OrderedDict if isinstance(target, OrderedDict) else dict
    # What another thread has placed, and what code keeps for a region, is no state.
    others = {
        key: item for key, item in kind.items(target) if isinstance(item, Placed) or (handed_out and is_of_call(key))
    }
    half = len(contents) // 2
    keys, values = strongly(contents[:half]), strongly(contents[half:])
    kind.clear(target)
    for key, item in zip(keys, values):
        kind.__setitem__(target, key, item)
    for key, item in others.items():
        kind.__setitem__(target, key, item)


def length_of(container: Any) -> int:
    """Return how many items a container has, past methods that a subclass overrides."""
    for kind in (list, dict, deque, set):
        if isinstance(container, kind):
            return kind.__len__(container)  # type: ignore[arg-type]
    return len(container)


# -- objects ----------------------------------------------------------------------------------------------------------


class SlotsHolder(Holder):
    """The slots of an object."""

    __slots__ = ("slots",)

    def __init__(self, target: Any, slots: Sequence[Slot]) -> None:
        self.target, self.slots = target, slots

    def get(self) -> Contents:
        return tuple(self._read(slot) for _, slot in self.slots)

    def _read(self, slot: Any) -> Any:
        try:
            return slot.__get__(self.target)
        except Exception:  # a property in the place of a slot may raise anything
            return EMPTY

    def put(self, contents: Contents) -> None:
        for (_, slot), item in zip(self.slots, contents):
            if item is not EMPTY:
                slot.__set__(self.target, restored(item))
            elif self._read(slot) is not EMPTY:
                slot.__delete__(self.target)

    def items(self, contents: Contents) -> Iterable[tuple[str, Any]]:
        return ((f".{name}", item) for (name, _), item in zip(self.slots, contents) if item is not EMPTY)


class KindHolder(Holder):
    """The class of an object."""

    __slots__ = ()

    def get(self) -> Contents:
        return (type(self.target),)

    def put(self, contents: Contents) -> None:
        object.__setattr__(self.target, "__class__", contents[0])


class AttributesHolder(Holder):
    """The `__dict__`s of tensors, or of the members of an enum; mostly all are empty."""

    __slots__ = ()

    def __init__(self, objects: Iterable[Any]) -> None:
        self.target = list(map(vars, objects))

    def get(self) -> Contents:
        if not any(self.target):
            return ()
        return tuple(chain.from_iterable((len(item), *item, *item.values()) for item in self.target))

    def put(self, contents: Contents) -> None:
        start = 0
        for live in self.target:
            count = 2 * contents[start] if contents else 0
            put_dict(live, contents[start + 1 : start + 1 + count])
            start += 1 + count


class ClassHolder(VersionedHolder):
    """The attributes of a class: the names, then the values."""

    __slots__ = ()

    def __init__(self, target: Any) -> None:
        super().__init__(target, dict_of_class(target))

    def get(self) -> Contents:
        attributes = vars(self.target)
        return (*attributes, *attributes.values())

    def put(self, contents: Contents) -> None:
        half = len(contents) // 2
        now = dict(vars(self.target))
        for name in now.keys() - set(contents[:half]):
            type.__delattr__(self.target, name)  # unseen by a metaclass
        for name, value in zip(contents[:half], contents[half:]):
            if not is_item(now.get(name, EMPTY), value):
                type.__setattr__(self.target, name, restored(value))

    def kept_with(self, contents: Contents) -> Iterable[Any]:
        return (self.target,)  # which holds the rest


# -- functions --------------------------------------------------------------------------------------------------------

made_of, attributes_of = attrgetter("__code__", "__defaults__", "__kwdefaults__"), attrgetter("__dict__")


class FunctionsHolder(Holder):
    """Python functions: their code, their defaults and, mostly none, their attributes."""

    __slots__ = ()
    name = "the code of a function"

    def get(self) -> Contents:
        functions = self.target
        fixed = [*chain.from_iterable(map(made_of, functions))]
        return [*fixed, *AttributesHolder(functions).get()] if any(map(attributes_of, functions)) else fixed

    def is_at(self, contents: Contents) -> bool:
        functions = self.target
        if len(contents) > 3 * len(functions) or any(map(attributes_of, functions)):
            return super().is_at(contents)
        return all(map(is_, chain.from_iterable(map(made_of, functions)), contents)) or super().is_at(contents)

    def put(self, contents: Contents) -> None:
        functions, items = self.target, iter(contents)
        for fn in functions:
            fn.__code__, fn.__defaults__, fn.__kwdefaults__ = next(items), restored(next(items)), next(items)
        AttributesHolder(functions).put([*items])

    def kept_with(self, contents: Contents) -> Iterable[Any]:
        functions = self.target
        count = 3 * len(functions)
        defaults = [*filter(None, contents[1:count:3]), *map(dict.values, filter(None, contents[2:count:3]))]
        return (*functions, *chain.from_iterable(defaults), *contents[count:])


class PartialHolder(Holder):
    """A `functools.partial`: its function, its arguments and its attributes."""

    __slots__ = ()

    def get(self) -> Contents:
        target = self.target
        attributes = vars(target)
        return target.func, target.args, target.keywords, *attributes, *attributes.values()

    def put(self, contents: Contents) -> None:
        function, arguments, keywords = contents[:3]
        target = self.target
        target.__setstate__((function, restored(arguments), keywords, vars(target)))
        put_dict(vars(target), contents[3:])


class CellHolder(Holder):
    """A closed-over variable."""

    __slots__ = ()

    def get(self) -> Contents:
        return (contents_of(self.target),)

    def put(self, contents: Contents) -> None:
        put_cell(self.target, restored(contents[0]))


def contents_of(cell: CellType) -> Any:
    """Return what a closed-over variable holds, `EMPTY` if that is nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def put_cell(cell: CellType, value: Any) -> None:
    """Let a closed-over variable hold `value`."""
    if value is EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = value


class CellContainerHolder(Holder):
    """A list or dict that a closed-over variable names, and its contents.

    The contents are (class of the container, its id, the container or None, its items). It is held through the cell: held
    directly, the outputs that a loop collects in a new list for each call would stay alive as long as the regions that wrote
    them. So a moment has None in the place of the container.
    """

    __slots__ = ()

    def get(self) -> Contents:
        container = contents_of(self.target)
        inner = _holder_of_container(container)
        if inner is None:
            return None, 0, container
        return type(container), id(container), container, *inner.get()

    def record(self) -> Contents:
        kind, key, container, *items = self.get()
        if kind is None:
            return kind, key, *held_all((container,))
        return kind, key, None, *held_all(items)

    def is_at(self, contents: Contents) -> bool:
        kind, key, container, *items = contents
        now = contents_of(self.target)
        if kind is None:
            return is_item(now, container)
        inner = _holder_of_container(now)
        return inner is not None and id(now) == key and inner.is_at(items)

    def put(self, contents: Contents) -> None:
        kind, key, container, *items = contents
        if kind is None:
            put_cell(self.target, restored(container))
            return
        now = contents_of(self.target)
        if id(now) != key or _holder_of_container(now) is None:
            now = self.target.cell_contents = kind.__new__(kind) if container is None else container
        inner = _holder_of_container(now)
        if not inner.is_at(items):
            inner.put(items)

    def items(self, contents: Contents) -> Iterable[tuple[str, Any]]:
        kind, _, _, *items = contents
        if kind is None:
            return ()
        return DictHolder.items(self, items) if issubclass(kind, dict) else Holder.items(self, items)  # type: ignore[arg-type]


def _holder_of_container(value: Any) -> Any:
    if isinstance(value, list):
        return ListHolder(value)
    return DictHolder(value) if isinstance(value, dict) else None


class NameHolder(Holder):
    """A module-level name."""

    __slots__ = ("name",)

    def __init__(self, target: dict[str, Any], name: str) -> None:
        self.target, self.name = target, name

    def get(self) -> Contents:
        return (self.target.get(self.name, EMPTY),)

    def put(self, contents: Contents) -> None:
        if contents[0] is EMPTY:
            self.target.pop(self.name, None)
        else:
            self.target[self.name] = restored(contents[0])

    def kept_with(self, contents: Contents) -> Iterable[Any] | None:
        return super().kept_with(contents) if is_importable(self.target) else None
