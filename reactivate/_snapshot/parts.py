"""The dicts that modules are made of: attributes, registries and hooks, read and compared in a few flat lists.

That is done for every region, so the lists are made and compared in C. As long as nothing writes to any of the dicts, which
their versions tell, everything in them is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from torch.nn import Module, Parameter

from reactivate._modules.standin import NAME, Placed
from reactivate._snapshot.caches import cached
from reactivate._snapshot.held import Position, are_items, held_all, restored
from reactivate._snapshot.holders import put_dict
from reactivate._torch.modules import are_distributed_alike, is_in_flat_parameter, version_of_dict

Namespace = dict[str, Any]

_DICT = frozenset({dict})
# Hooks of state dicts are no hooks that run in a forward: a module that registers them in its first has them once.
_REGISTRIES = (
    *("_parameters", "_buffers", "_modules"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_OF_EVERY_MODULE = frozenset(Module().__dict__) - {"training"}
_registries_of = itemgetter(*_REGISTRIES)
_unsaved_of = itemgetter("_non_persistent_buffers_set")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_dicts_of = itemgetter(*_REGISTRIES, *_HOOKS)
_OWN, _COUNT = len(_REGISTRIES), len(_REGISTRIES) + len(_HOOKS)


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
        names: of each module's attributes.
        sizes: how many entries each registry has.
        keys: the names of all entries.
        unsaved: the names of each module's buffers that a state dict leaves out.
        parameters, buffers, children: functions that pick those from all entries.
        full, empty, hooks: functions that pick from all dicts of the modules the registries that hold anything, the others,
            and the dicts of hooks, those of forwards first.
    """

    __slots__ = (
        *("_counts", "_filled", "_getters", "_order", "buffers", "children", "empty", "full", "hooks", "keys", "names"),
        *("parameters", "sizes", "unsaved"),
    )

    def __init__(self, namespaces: Sequence[Namespace]) -> None:
        self.names = list(map(names_in, namespaces))
        self._counts = [len(names.all) for names in self.names]
        self._order = list(chain.from_iterable(names.all for names in self.names))
        self._getters = [names.values for names in self.names]
        registries = list(chain.from_iterable(map(_registries_of, namespaces)))
        self.sizes = list(map(len, registries))
        self.keys: list[str] = list(chain.from_iterable(registries))
        self.unsaved: list[set[str]] = [{*_unsaved_of(namespace)} for namespace in namespaces]
        self._filled = _picking([index for index, size in enumerate(self.sizes) if size])
        places = [divmod(index, _OWN) for index in range(len(registries))]  # among all dicts of the modules
        self.full = _picking([module * _COUNT + kind for (module, kind), size in zip(places, self.sizes) if size])
        self.empty = _picking([module * _COUNT + kind for (module, kind), size in zip(places, self.sizes) if not size])
        self.hooks = _picking(
            [
                module * _COUNT + _OWN + kind
                for pair in ((0, 1), (2, 3))
                for module in range(len(namespaces))
                for kind in pair
            ]
        )
        kinds = [index % _OWN for index, size in enumerate(self.sizes) for _ in range(size)]
        entries = _values_in(registries)
        filled = [(index, kind) for index, kind in enumerate(kinds) if entries[index] is not None]
        self.parameters, self.buffers, self.children = (
            _picking([index for index, kind in filled if kind == wanted]) for wanted in range(3)
        )

    def read(self, namespaces: Sequence[Namespace]) -> tuple[list[Any], list[Any]] | None:
        """Return (attributes, entries) of the modules, None if they are laid out in another way."""
        if list(map(len, namespaces)) != self._counts or list(chain.from_iterable(namespaces)) != self._order:
            return None
        registries = list(chain.from_iterable(map(_registries_of, namespaces)))
        if list(map(len, registries)) != self.sizes or list(map(_unsaved_of, namespaces)) != self.unsaved:
            return None
        filled = self._filled(registries)
        try:
            attributes = self.attributes(namespaces)
        except KeyError:  # another one in the place of one
            return None
        if list(chain.from_iterable(filled)) != self.keys:
            return None
        return attributes, _values_in(filled)

    def attributes(self, namespaces: Sequence[Namespace]) -> list[Any]:
        """Return the attributes of modules that are laid out so."""
        return list(chain.from_iterable([get(namespace) for get, namespace in zip(self._getters, namespaces)]))


def _values_in(registries: Sequence[Namespace]) -> list[Any]:
    """Return the values of registries; old models have ordered ones, whose order `dict` does not see."""
    if _DICT.issuperset(map(type, registries)):
        return list(chain.from_iterable(map(dict.values, registries)))
    return [registry[key] for registry in registries for key in registry]


def _picking(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes the items at these places, fast."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return (lambda items: (items[indices[0]],)) if indices else (lambda items: ())


class Parts:
    """Attributes, parameters, buffers, children and hooks of some modules at one moment.

    Args:
        namespaces: their `__dict__`s.
        layout: where their parts are, if that is known.

    Attributes:
        versions: of the dicts that hold anything; None if one is of a subclass, which may change its order unseen.
        hooks: the dicts of hooks, those of forwards first.
        attributes: the values of all attributes; with a `layout`, set by the caller.
        entries: all parameters, buffers and children.
    """

    attributes: Sequence[Any]
    _goes_on = False  # whether no version tells whether they are as they were

    def __init__(self, namespaces: Sequence[Namespace], layout: Layout | None = None) -> None:
        self.namespaces = namespaces
        self.layout = Layout(namespaces) if layout is None else layout
        self.versions = self._look_at_dicts()
        self.entries: list[Any] = _values_in(self._full)
        if layout is None:
            self.attributes = self.layout.attributes(namespaces)

    def _look_at_dicts(self) -> list[int] | None:
        layout = self.layout
        dicts = list(chain.from_iterable(map(_dicts_of, self.namespaces)))
        self._full, self._empty = layout.full(dicts), layout.empty(dicts)
        self._filled = filled = [*self.namespaces, *self._full]
        self.hooks: Sequence[dict[int, Any]] = layout.hooks(dicts)
        is_plain = not any(self._empty) and _DICT.issuperset(map(type, filled))
        return list(map(version_of_dict, filled)) if is_plain else None

    def hold(self) -> None:
        """Hold the attributes as a moment does: strongly held, graphs would chain the steps of a training run."""
        self.attributes = held_all(self.attributes)
        if Position in map(type, self.attributes):
            self._goes_on = True

    def with_others(self, others: Mapping[int, Any]) -> Parts:
        """Return these parts with other items in the place of some: {id: the other}; no version tells whether they are."""
        parts = copy(self)
        parts.attributes = [others.get(id(item), item) for item in self.attributes]
        parts.entries = [others.get(id(item), item) for item in self.entries]
        parts._goes_on = True
        return parts

    def are_current(self) -> bool:
        """Return whether the modules are made of just these parts, and no iterator among them has gone on."""
        if self.versions == list(map(version_of_dict, self._filled)) and not any(self._empty) and not self._goes_on:
            return True
        self.versions = None  # until the parts are compared: another thread may ask
        versions = self._look_at_dicts()
        found = self.layout.read(self.namespaces)
        is_current = self.are(Parts(self.namespaces)) if found is None else self._hold_just(*found)
        if is_current:
            self.versions = versions
        return is_current

    def _hold_just(self, attributes: Sequence[Any], entries: Sequence[Any]) -> bool:
        return are_items(entries, self.entries) and are_items(attributes, self.attributes)

    def are(self, others: Parts) -> bool:
        """Return whether these are the same objects under the same names."""
        one, other = self.layout, others.layout
        is_alike = one.names == other.names and one.sizes == other.sizes and one.keys == other.keys
        return is_alike and one.unsaved == other.unsaved and self._hold_just(others.attributes, others.entries)

    def put(self) -> None:
        """Let the modules be made of these parts, but for what a sharding library has moved to another form."""
        layout = self.layout
        attributes, sizes, entries = iter(self.attributes), iter(layout.sizes), iter(zip(layout.keys, self.entries))
        for namespace, names, unsaved in zip(self.namespaces, layout.names, layout.unsaved):
            if (live := _unsaved_of(namespace)) != unsaved:
                live.clear()
                live.update(unsaved)
            for name in _REGISTRIES:
                noted = dict(next(entries) for _ in range(next(sizes)))
                _assign(namespace[name], noted, are_parameters=name == "_parameters")
            noted = dict(zip(names.own, attributes)) if names.own else {}
            _assign(namespace, {name: noted[name] if name in noted else namespace.get(name) for name in names.all})


def _assign(namespace: Namespace, noted: Namespace, *, are_parameters: bool = False) -> None:
    items = {name: restored(item) for name, item in noted.items()}
    if are_parameters:
        items |= {name: namespace[name] for name, item in items.items() if _is_sharded(item, namespace.get(name))}
    flat = {name for part in (items, namespace) for name, item in part.items() if is_in_flat_parameter(item)}
    for name in filter(flat.__contains__, {**items, **namespace} if flat else ()):
        items.pop(name, None)
        if name in namespace:
            items[name] = namespace[name]
    if [*items] != [name for name, item in namespace.items() if not isinstance(item, Placed)]:
        put_dict(namespace, (*items, *items.values()))
        return
    for name, item in items.items():  # touch what differs: another thread may read the rest
        if _below(namespace[name]) is not item:
            namespace[name] = item


def _is_sharded(before: Any, now: Any) -> bool:
    # `functional_call` swaps parameters for the time of a forward: these are put back. A sharding library knows better
    # which form of a parameter is needed now.
    return isinstance(before, Parameter) and isinstance(now, Parameter) and not are_distributed_alike(before, now)
