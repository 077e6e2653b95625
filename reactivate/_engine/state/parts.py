"""The parts of modules: attributes, and the entries of their registries. Taken and compared for every region.

All of it is in a few flat lists, which are made and compared in C. Of what every module has, only that is looked at which
a forward reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from torch.nn import Module, Parameter

from reactivate._engine.state.bounded import cached
from reactivate._engine.state.contents import put_dict
from reactivate._engine.state.held import Position, are_items, given_back, held_all
from reactivate._modules.standin import NAME, Placed
from reactivate._torch.dicts import version_of_dict
from reactivate._torch.modules import are_distributed_alike

Namespace = dict[str, Any]

_DICT = frozenset({dict})

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE = frozenset(Module().__dict__) - {"training"}
_registries_of = itemgetter(*_REGISTRIES)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_dicts_of = itemgetter(*_REGISTRIES, *_HOOKS)
_COUNT = len(_REGISTRIES) + len(_HOOKS)


class Names(NamedTuple):
    """The names of a module's attributes.

    Attributes:
        all: those of everything in its `__dict__`, in order.
        own: those of which values are noted.
        values: gets these values from the `__dict__`.
    """

    all: tuple[str, ...]
    own: tuple[str, ...]
    values: Callable[[Namespace], tuple[Any, ...]]


@cached
def _sorted_out(names: tuple[str, ...]) -> Names:
    own = tuple(name for name in names if name not in _OF_EVERY_MODULE)
    if NAME in own or not own:
        return Names(names, own, functools.partial(_unplaced, own))
    own = own if len(own) > 1 else own * 2  # with one name `itemgetter` returns no tuple
    return Names(names, own, itemgetter(*own))


def _unplaced(names: tuple[str, ...], namespace: Namespace) -> tuple[Any, ...]:
    return tuple(_below(namespace[name]) for name in names)


def names_in(namespace: Namespace) -> Names:
    """Return the names of attributes in a module's `__dict__`, as if nothing stood in for its `forward`."""
    items = namespace.copy()  # at once: another thread may put something in the place of its `forward` meanwhile
    if isinstance(placed := items.get(NAME), Placed) and _below(placed) is None:
        del items[NAME]
    return _sorted_out(tuple(items))


def _below(item: Any) -> Any:
    """Return what stands in a place when whatever stands in has gone."""
    while isinstance(item, Placed):
        item = item.hidden
    return item


class Layout:
    """The places of the parts of some modules, without the parts.

    Args:
        namespaces: the modules' `__dict__`s.

    Attributes:
        names: of each module's attributes; `counts` says how many there are.
        sizes: how many entries each registry has.
        keys: the names of all entries.
        small: which of the tensors that are state were small when a region began last; see `TensorStates`.
    """

    __slots__ = (
        *("_buffers", "_children", "_empty", "_filled", "_full", "_parameters", "counts", "getters", "keys", "names"),
        *("sizes", "small"),
    )

    def __init__(self, namespaces: Sequence[Namespace]) -> None:
        self.small: Any = None
        self.names = list(map(names_in, namespaces))
        self.counts = [len(names.all) for names in self.names]
        self.getters = [names.values for names in self.names]
        registries = list(chain.from_iterable(map(_registries_of, namespaces)))
        self.sizes = list(map(len, registries))
        self.keys: list[str] = list(chain.from_iterable(registries))
        self._filled = _picking([index for index, size in enumerate(self.sizes) if size])
        places = [divmod(index, 3) for index in range(len(registries))]  # among all dicts of the modules
        self._full = _picking([module * _COUNT + kind for (module, kind), size in zip(places, self.sizes) if size])
        self._empty = _picking([module * _COUNT + kind for (module, kind), size in zip(places, self.sizes) if not size])
        kinds = [index % 3 for index, size in enumerate(self.sizes) for _ in range(size)]
        entries = list(chain.from_iterable(map(dict.values, registries)))
        filled = [(index, kind) for index, kind in enumerate(kinds) if entries[index] is not None]
        self._parameters = _picking([index for index, kind in filled if kind == 0])
        self._buffers = _picking([index for index, kind in filled if kind == 1])
        self._children = _picking([index for index, kind in filled if kind == 2])

    def parts_of(self, namespaces: Sequence[Namespace]) -> tuple[list[Any], list[Any]] | None:
        """Return (attributes, entries) of the modules, None if they are laid out in another way."""
        if list(map(len, namespaces)) != self.counts:
            return None
        registries = list(chain.from_iterable(map(_registries_of, namespaces)))
        if list(map(len, registries)) != self.sizes:
            return None
        filled = self._filled(registries)
        try:
            attributes = [get(namespace) for get, namespace in zip(self.getters, namespaces)]
        except KeyError:  # another one in the place of one
            return None
        if list(chain.from_iterable(filled)) != self.keys:
            return None
        return list(chain.from_iterable(attributes)), list(chain.from_iterable(map(dict.values, filled)))

    def stamp_of(self, namespaces: Sequence[Namespace]) -> Stamp:
        """Return the stamp of modules that are laid out so."""
        dicts = list(chain.from_iterable(map(_dicts_of, namespaces)))
        return Stamp(namespaces, self._full(dicts), self._empty(dicts), dicts)

    def parameters_in(self, entries: Sequence[Any]) -> list[Any]:
        """Return those of the entries that are parameters."""
        return list(self._parameters(entries))

    def children_in(self, entries: Sequence[Any]) -> Sequence[Any]:
        """Return those of the entries that are modules."""
        return self._children(entries)

    def buffers_in(self, entries: Sequence[Any]) -> list[Any]:
        """Return those of the entries that are buffers."""
        return list(self._buffers(entries))


def _picking(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes the items at these places, fast."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return (lambda items: (items[indices[0]],)) if indices else (lambda items: ())


class Stamp:
    """The dicts of some modules, and their versions: as long as nobody writes to these, the parts are the same.

    Args:
        namespaces: the modules' `__dict__`s.
        full: the registries that hold anything.
        empty: the other ones.
        dicts: all registries and dicts of hooks.

    Attributes:
        versions: of the dicts that hold anything; None if one is of a subclass, which may change its order unseen.
        forward_hooks, backward_hooks: the dicts of hooks.
    """

    __slots__ = ("_empty", "_filled", "_full", "backward_hooks", "forward_hooks", "versions")

    def __init__(
        self, namespaces: Sequence[Namespace], full: Sequence[Any], empty: Sequence[Any], dicts: list[Any]
    ) -> None:
        self._full, self._empty = full, empty
        self._filled = filled = [*namespaces, *full]
        is_plain = _DICT.issuperset(map(type, filled)) and not any(empty)
        self.versions: list[int] | None = list(map(version_of_dict, filled)) if is_plain else None
        self.forward_hooks: list[dict[int, Any]] = dicts[3::_COUNT] + dicts[4::_COUNT]
        self.backward_hooks: list[dict[int, Any]] = dicts[5::_COUNT] + dicts[6::_COUNT]

    def holds(self) -> bool:
        """Return whether nobody has written to the dicts since."""
        return self.versions == list(map(version_of_dict, self._filled)) and not any(self._empty)

    def entries(self) -> list[Any]:
        """Return all that the registries hold."""
        return list(chain.from_iterable(map(dict.values, self._full)))


class Parts:
    """The parts of some modules at one moment.

    Args:
        namespaces: their `__dict__`s.
        layout: where their parts are, if that is known, with the parts and the stamp.

    Attributes:
        attributes: the values of all attributes.
        entries: all parameters, buffers and children.
    """

    __slots__ = ("_goes_on", "attributes", "entries", "layout", "namespaces", "stamp")

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        layout: Layout | None = None,
        parts: tuple[list[Any], list[Any]] | None = None,
        stamp: Stamp | None = None,
    ) -> None:
        self.namespaces = namespaces
        if layout is None or parts is None or stamp is None:
            layout = Layout(namespaces)
            stamp = layout.stamp_of(namespaces)
            parts = layout.parts_of(namespaces) or _parts_of(layout, namespaces)
        self.layout, self.stamp, self._goes_on = layout, stamp, False
        self.attributes, self.entries = parts

    def hold(self) -> None:
        """Hold the attributes as a note does: strongly held, graphs would chain the steps of a training run."""
        self.attributes = held_all(self.attributes)
        self._goes_on = Position in map(type, self.attributes)

    def are_current(self) -> bool:
        """Return whether the modules are made of just these parts, and no iterator among them has gone on."""
        if self.stamp.holds() and not self._goes_on:
            return True
        stamp = self.layout.stamp_of(self.namespaces)  # before the parts are compared
        is_current = self._are_found()
        if is_current:
            self.stamp = stamp
        return is_current

    def _are_found(self) -> bool:
        parts = self.layout.parts_of(self.namespaces)
        if parts is None:
            return self.are(Parts(self.namespaces))
        attributes, entries = parts
        return are_items(entries, self.entries) and are_items(attributes, self.attributes)

    def are(self, others: Parts) -> bool:
        """Return whether these are the same objects under the same names."""
        one, other = self.layout, others.layout
        return (
            one.names == other.names
            and one.sizes == other.sizes
            and one.keys == other.keys
            and are_items(others.entries, self.entries)
            and are_items(others.attributes, self.attributes)
        )

    def put(self) -> None:
        """Let the modules be made of these parts, but for what a sharding library has moved to another form."""
        layout = self.layout
        attributes, sizes, entries = iter(self.attributes), iter(layout.sizes), iter(zip(layout.keys, self.entries))
        for namespace, names in zip(self.namespaces, layout.names):
            for name in _REGISTRIES:
                noted = dict(next(entries) for _ in range(next(sizes)))
                _assign(namespace[name], noted, are_parameters=name == "_parameters")
            noted = dict(zip(names.own, attributes)) if names.own else {}
            _assign(namespace, {name: noted[name] if name in noted else namespace.get(name) for name in names.all})


def _parts_of(layout: Layout, namespaces: Sequence[Namespace]) -> tuple[list[Any], list[Any]]:
    """Return what `layout.parts_of` does, of modules with something in the place of a `forward`."""
    attributes = [get(namespace) for get, namespace in zip(layout.getters, namespaces)]
    registries = chain.from_iterable(map(_registries_of, namespaces))
    return list(chain.from_iterable(attributes)), list(chain.from_iterable(map(dict.values, registries)))


def _assign(namespace: Namespace, noted: Namespace, *, are_parameters: bool = False) -> None:
    items = {name: given_back(item) for name, item in noted.items()}
    if are_parameters:
        items |= {name: namespace[name] for name, item in items.items() if _is_sharded(item, namespace.get(name))}
    if [*items] != [name for name, item in namespace.items() if not isinstance(item, Placed)]:
        put_dict(namespace, items)
        return
    for name, item in items.items():  # touch what differs: another thread may read the rest
        if _below(namespace[name]) is not item:
            namespace[name] = item


def _is_sharded(before: Any, now: Any) -> bool:
    # `functional_call` swaps parameters for the time of a forward: these are put back. A sharding library knows better
    # which form of a parameter is needed now.
    return isinstance(before, Parameter) and isinstance(now, Parameter) and not are_distributed_alike(before, now)
