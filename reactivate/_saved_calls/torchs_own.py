"""Calls of torch's own that run no code but torch's: what they are given is torch's, and so is all that their code names.

Only of such a call is known beforehand what it may do. Code of the user's may run in any other: of a tensor subclass among
the arguments or the weights, in a function that is an argument, or in a patch somewhere below.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter, is_, itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Generator, Tensor
from torch.nn import Module, Parameter

from reactivate._snapshot.caches import BoundedCache, cached
from reactivate._snapshot.facts import attribute_names, global_names, is_librarys
from reactivate._snapshot.held import ATOMS
from reactivate._snapshot.kinds import is_of_torch, is_users_class, package_of
from reactivate._torch.asking import IN_C, is_torchs_function

_PLAIN = frozenset({*ATOMS, Tensor, Parameter, Generator})
_OF_MODULE = frozenset({*_PLAIN, dict, OrderedDict, tuple, set})
_FOLLOWED = ("torch.nn.functional", "torch.nn.modules.", "torch.functional", "torch._tensor", "torch._jit_internal")
"""The Python modules whose functions are read for what they name: their code is that of ops."""
_CODE = attrgetter("__code__")

Named = tuple[Mapping[str, Any], str, Any]
"""A name: where it is looked up, and what it stands for."""


def are_torchs(values: Collection[Any]) -> bool:
    """Return whether no value among arguments can run code of the user's."""
    return _PLAIN.issuperset(map(type, values)) or all(map(_is_torchs, values))


def _is_torchs(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return True
    if isinstance(value, (tuple, list)):
        return (kind in (tuple, list) or is_of_torch(kind)) and are_torchs(value)
    if kind is dict:
        return are_torchs(value.values())
    if isinstance(value, Tensor):
        return is_of_torch(kind) and are_torchs(_tensors_inside(value))
    return package_of(kind) == "numpy" or (is_of_torch(kind) and not callable(value))


def _tensors_inside(tensor: Tensor) -> list[Any]:
    """Return the tensors that a wrapper such as a DTensor is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def is_torchs_forward(module: Module, forward: Any) -> bool:
    """Return whether a `forward` is that of the module's class, one of torch's, and the module has nothing of the user's."""
    own, kind = vars(module), type(module)
    if type(forward) is not MethodType or forward.__self__ is not module:
        return False
    if not (_OF_MODULE.issuperset(map(type, own.values())) or all(map(_is_of_module, map(type, own.values())))):
        return False
    return (
        are_torchs(own["_parameters"].values())
        and are_torchs(own["_buffers"].values())
        and is_torchs_alone(forward.__func__, kind)
    )


def _is_of_module(kind: type) -> bool:
    return kind in _OF_MODULE or package_of(kind) == "reactivate"  # what stands in the place of a `forward` for now


class _NamedCode:
    """The names in some code of torch's, and in other functions of torch's that it calls.

    Args:
        found: the names that may be called, with what they stand for: None where there is nothing yet.
        functions: those whose code it is.
        is_torchs: whether all of it is torch's. What is not is known by its id: it may hold a model.
    """

    __slots__ = ("_absent", "_codes", "_functions", "_present", "is_torchs")

    def __init__(self, found: Iterable[Named], functions: list[FunctionType], is_torchs: bool) -> None:
        spaces: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        for space, name, value in found:
            spaces.setdefault(id(space), (space, {}))[1][name] = value
        self._present: list[tuple[Any, Mapping[str, Any], list[Any]]] = []
        self._absent, self.is_torchs = [], is_torchs
        for space, names in spaces.values():
            present = [name for name, value in names.items() if value is not None]
            if present:
                present.append(present[0])  # one alone gives no tuple
                values = [names[name] for name in present]
                self._present.append((itemgetter(*present), space, values if is_torchs else list(map(id, values))))
            absent = names.keys() - present
            if absent:
                self._absent.append((space.keys(), absent))
        self._functions, self._codes = functions, [fn.__code__ for fn in functions]

    def are_current(self) -> bool:
        """Return whether they stand for what they stood for, with the same code."""
        try:
            for get, space, values in self._present:
                now = get(space)
                if not (all(map(is_, now, values)) if self.is_torchs else list(map(id, now)) == values):
                    return False
        except KeyError:
            return False
        return list(map(_CODE, self._functions)) == self._codes and all(
            names.isdisjoint(absent) for names, absent in self._absent
        )


_known: BoundedCache[tuple[FunctionType, type | None], _NamedCode] = BoundedCache()


def is_torchs_alone(function: Any, kind: type | None = None) -> bool:
    """Return whether a function is torch's, and so is all that its code names, as far as it computes something.

    Args:
        function: the function.
        kind: the class whose method it is.
    """
    if type(function) in IN_C or is_of_torch(type(function)):
        return True
    if not _is_followed(function):
        return False
    known = _known.get((function, kind))
    if known is None or not known.are_current():
        known = _known[function, kind] = _find(function, kind)
    return known.is_torchs


def _find(function: FunctionType, kind: type | None) -> _NamedCode:
    """Find what some code names, itself and through other functions, up to what is the user's."""
    found: list[Named] = []
    functions: list[FunctionType] = []
    todo = [function]
    while todo:
        fn = todo.pop()
        if fn in functions:
            continue
        functions.append(fn)
        named = list(_named(fn, kind))
        values = [*(value for _, _, value in named), *(cell.cell_contents for cell in fn.__closure__ or ())]
        found += named
        if any(map(_is_users, values)):
            return _NamedCode(found, functions, is_torchs=False)
        todo += filter(_is_followed, values)
    return _NamedCode(found, functions, is_torchs=True)


def _is_followed(value: Any) -> bool:
    return is_torchs_function(value) and value.__globals__["__name__"].startswith(_FOLLOWED)


def _is_users(value: Any) -> bool:
    """Return whether what a name stands for runs code of the user's where it is called."""
    kind = type(value)
    if isinstance(value, type):
        return is_users_class(value)
    if kind is FunctionType:
        return not is_librarys(value.__globals__)
    if kind is property:
        return any(map(_is_users, filter(None, (value.fget, value.fset, value.fdel))))
    return callable(value) and kind not in IN_C and package_of(kind) not in ("torch", "reactivate", "typing")


def _named(fn: FunctionType, kind: type | None) -> Iterator[Named]:
    """Yield what a function of torch's names and may call: in Python modules of torch's, of tensors, of its own class."""
    attributes = attribute_names(fn.__code__)
    todo: list[tuple[Mapping[str, Any], Iterable[str]]] = [(fn.__globals__, global_names(fn.__code__))]
    seen: set[int] = set()
    while todo:
        space, names = todo.pop()
        for name in names:
            value = space.get(name)
            if callable(value):
                yield space, name, value
            elif (
                isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch" and id(value) not in seen
            ):
                seen.add(id(value))
                yield space, name, value
                todo.append((vars(value), attributes & vars(value).keys()))
    for spaces in (_spaces_of(Tensor), () if kind is None else _spaces_of(kind)):
        for name in attributes:
            if any(callable(space.get(name)) for space in spaces):
                yield from ((space, name, space.get(name)) for space in spaces)


@cached
def _spaces_of(kind: type) -> list[Mapping[str, Any]]:
    return [vars(base) for base in kind.__mro__ if base is not object]
