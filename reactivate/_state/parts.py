"""What modules are made of: attributes, and the entries of their registries. Taken and compared for every region.

All of it is in a few flat lists, which are made and compared in C. Of what every module has, only that is looked at which
a forward reads: a module has thirteen dicts of hooks, of which most are for `state_dict`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from reactivate._compat import is_distributed
from reactivate._standin import NAME, Placed
from reactivate._state.contents import are_items, given_back, put_dict

Namespace = dict[str, Any]

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_EVERY_MODULE = frozenset(Module().__dict__) - {"training"}
_dicts_of = itemgetter(*_REGISTRIES, *_HOOKS)
_registries_of, _hooks_of = itemgetter(slice(3)), itemgetter(slice(3, None))


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


@functools.lru_cache(maxsize=4096)
def _sorted_out(names: tuple[str, ...]) -> Names:
    own = tuple(name for name in names if name not in _OF_EVERY_MODULE)
    is_simple = len(own) > 1 and NAME not in own
    return Names(names, own, itemgetter(*own) if is_simple else functools.partial(_one_by_one, own))


def _one_by_one(names: tuple[str, ...], namespace: Namespace) -> tuple[Any, ...]:
    return tuple(_below(namespace[name]) for name in names)


def names_in(namespace: Namespace) -> Names:
    """Return the names of attributes in a module's `__dict__`, as if nothing stood in for its `forward`."""
    if isinstance(placed := namespace.get(NAME), Placed) and _below(placed) is None:
        return _sorted_out(tuple(name for name in namespace if name != NAME))
    return _sorted_out(tuple(namespace))


def _below(item: Any) -> Any:
    """Return what stands in a place when whatever stands in has gone."""
    while isinstance(item, Placed):
        item = item.hidden
    return item


class Parts:
    """The parts of some modules at one moment.

    Args:
        namespaces: their `__dict__`s.
        names: those of their attributes, if they are known; a module that has others raises a `KeyError`.

    Attributes:
        attributes: the values of all attributes.
        registries: the dicts of parameters, buffers and children of each module; `sizes`, `keys` and `entries` are
            what is in them.
        hooks: the dicts of hooks that run around a forward and a backward.
    """

    __slots__ = ("attributes", "entries", "hooks", "keys", "names", "namespaces", "registries", "sizes")

    def __init__(self, namespaces: Sequence[Namespace], names: Sequence[Names] | None = None) -> None:
        self.namespaces = namespaces
        self.names = list(map(names_in, namespaces)) if names is None else names
        dicts = list(map(_dicts_of, namespaces))
        values = [item.values(namespace) for item, namespace in zip(self.names, namespaces)]
        self.attributes: list[Any] = list(chain.from_iterable(values))
        self.registries: list[Namespace] = list(chain.from_iterable(map(_registries_of, dicts)))
        self.hooks: list[Any] = list(chain.from_iterable(map(_hooks_of, dicts)))
        self.sizes = list(map(len, self.registries))
        self.keys: list[str] = list(chain.from_iterable(self.registries))
        self.entries: list[Any] = list(chain.from_iterable(map(dict.values, self.registries)))

    def entries_of(self, kind: int) -> list[Any]:
        """Return the entries of all registries of one kind: 0 for parameters, 1 for buffers, 2 for children."""
        return [item for registry in self.registries[kind::3] for item in registry.values() if item is not None]

    def now(self) -> Parts:
        """Return the parts of the same modules as they are now."""
        if list(map(len, self.namespaces)) == list(map(len, map(_all_of, self.names))):
            try:
                return Parts(self.namespaces, self.names)
            except KeyError:  # another attribute in the place of one
                pass
        return Parts(self.namespaces)

    def are(self, others: Parts) -> bool:
        """Return whether these are the same objects under the same names."""
        return (
            (self.names is others.names or self.names == others.names)
            and self.sizes == others.sizes
            and are_items(self.entries, others.entries)
            and are_items(self.attributes, others.attributes)
            and self.keys == others.keys
            and are_items(self.registries, others.registries)
        )

    def put(self) -> None:
        """Let the modules be made of these parts, but for what a sharding library has moved to another form."""
        attributes, entries, sizes = iter(self.attributes), iter(zip(self.keys, self.entries)), iter(self.sizes)
        registries = iter(self.registries)
        for namespace, names in zip(self.namespaces, self.names):
            noted = dict(zip(names.own, attributes))
            for name in _REGISTRIES:
                registry = noted[name] = next(registries)
                _assign(registry, dict(next(entries) for _ in range(next(sizes))))
            _assign(namespace, {name: noted[name] if name in noted else namespace.get(name) for name in names.all})


_all_of = itemgetter(0)


def _assign(namespace: Namespace, noted: Namespace) -> None:
    items = {name: given_back(item) for name, item in noted.items()}
    for name, item in items.items():
        now = namespace.get(name)
        if now is not item and isinstance(now, Tensor) and isinstance(item, Tensor) and _is_sharded(item, now):
            items[name] = now
    if [*items] != [name for name, item in namespace.items() if not isinstance(item, Placed)]:
        put_dict(namespace, items)
        return
    for name, item in items.items():  # touch what differs: another thread may read the rest
        if _below(namespace[name]) is not item:
            namespace[name] = item


def _is_sharded(before: Tensor, now: Tensor) -> bool:
    # `functional_call` swaps parameters for the time of a forward: these are put back. A sharding library knows better
    # which form of a parameter is needed now.
    return is_distributed(before) or is_distributed(now) or (before.shape != now.shape and before.requires_grad)
