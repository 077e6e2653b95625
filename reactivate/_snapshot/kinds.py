"""Which objects a walk looks into, told by their classes, and where an object keeps what it holds."""

from __future__ import annotations

import io
import random
import sys
from array import array
from collections.abc import Callable, Iterable
from enum import Enum
from types import BuiltinFunctionType, MethodType, MethodWrapperType
from typing import Any, TypeAlias
from weakref import ProxyTypes

import torch
from torch.nn import Module

from reactivate._snapshot.caches import cached_by_class
from reactivate._snapshot.held import ATOMS

SMALL_BYTES = 1 << 14
"""The size up to which a tensor without a graph, or an array, is copied before a write to it is known."""

PROXIES = frozenset({*ProxyTypes, super})
BUFFERS = frozenset({bytearray, memoryview, array, io.StringIO, io.BytesIO})

_OPERATORS = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
_SPECIAL = """
    call getattr getattribute setattr delattr dir getitem setitem delitem missing contains iter next reversed len length_hint
    bool enter exit await aiter anext aenter aexit eq ne lt le gt ge hash int float complex index str bytes repr format fspath
    neg pos abs invert round floor ceil trunc copy deepcopy sizeof array array_ufunc array_function get set delete
    torch_function torch_dispatch instancecheck subclasscheck class_getitem init_subclass
"""
_CALLED_BY_LIBRARIES = "forward setup_context backward vjp jvp vmap _missing_"  # by torch, and the last by `enum`
SPECIAL_METHODS = frozenset(
    {
        *(f"__{name}__" for name in _SPECIAL.split()),
        *(f"__{kind}{name}__" for name in _OPERATORS.split() for kind in ("", "r", "i")),
        *_CALLED_BY_LIBRARIES.split(),
    }
)
"""Methods that code calls without naming them."""
MAKING = frozenset({"__new__", "__init__", "__post_init__"})
"""Those that are called where code calls the class."""

Slot: TypeAlias = tuple[str, Any]
"""A slot: its name, and what reads and writes it."""


def package_of(kind: type) -> str:
    """Return the package that a class says it is from; "" if that is no text, as of Cython's classes on Python 3.10."""
    module: Any = kind.__module__
    return module.partition(".")[0] if isinstance(module, str) else ""


@cached_by_class
def is_of_torch(kind: Any) -> bool:
    """Return whether a class, of a tensor or a mode say, is torch's own or ours: it runs no code of the user's."""
    return package_of(kind) in ("torch", "reactivate")


def users_classes(kind: type) -> Iterable[type]:
    """Return a class and those it is derived from, but for those of libraries."""
    return filter(is_users_class, kind.__mro__)


@cached_by_class
def may_be_state(kind: Any) -> bool:
    """Return whether an attribute of a class that is an object of this class is neither a value nor a descriptor."""
    return kind not in ATOMS and not hasattr(kind, "__get__")


_SHARED = frozenset({"asyncio", "concurrent", "multiprocessing", "queue", "selectors", "socket", "threading"})
"""Packages whose objects other threads and processes work with at the same time: barriers, queues, pools."""

_VALUES = frozenset({"datetime", "fractions", "ipaddress", "pathlib", "uuid"})
"""Packages whose objects cannot change: what their attributes take later are caches."""


@cached_by_class
def is_value(kind: Any) -> bool:
    """Return whether objects of this class are values of the standard library, which cannot change."""
    return package_of(kind) in _VALUES


@cached_by_class
def is_plain(kind: type) -> bool:
    """Return whether objects of this class are made of attributes that Python code sees."""
    if issubclass(kind, Enum):
        return False
    if issubclass(kind, BaseException):
        return True
    if is_of_torch(kind):
        return kind.__module__.startswith(("torch.distributions.", "torch.quasirandom", "torch.utils.data.sampler"))
    # Of `logging` only its own classes: a handler of the user's may count.
    if is_value(kind) or package_of(kind) == "logging" or any(package_of(base) in _SHARED for base in kind.__mro__):
        return False
    return kind.__dictoffset__ != 0 or bool(slots_of(kind))


_MADE_BY_CODE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


@cached_by_class
def is_users_class(kind: type) -> bool:
    """Return whether code of the user's own may change attributes of this class."""
    if kind.__module__ == "torch.nn.utils.parametrize":  # a class that it made for one module
        return True
    if kind.__module__ == "builtins":  # that of what `exec` makes in a namespace without a name, too
        return bool(kind.__flags__ & _MADE_BY_CODE)
    return not is_librarys_package(package_of(kind))


def is_librarys_package(name: str) -> bool:
    """Return whether a package is ours, torch, NumPy or of the standard library, which keep nothing of the user's."""
    return name in ("reactivate", "torch", "numpy") or (name in sys.stdlib_module_names and name != "__main__")


@cached_by_class
def is_installed(kind: Any) -> bool:
    """Return whether this class is of a package that was installed, not of the program's own code."""
    file = getattr(sys.modules.get(str(kind.__module__)), "__file__", None) or ""
    return any(place in file for place in ("site-packages", "dist-packages"))


@cached_by_class
def is_dataclass(kind: Any) -> bool:
    """Return whether objects of this class are dataclasses, without a question to its metaclass."""
    return any("__dataclass_fields__" in vars(base) for base in kind.__mro__)


@cached_by_class
def is_array(kind: Any) -> bool:
    """Return whether objects of this class are arrays of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


@cached_by_class
def is_random_source(kind: Any) -> bool:
    """Return whether objects of this class are generators of random numbers: torch's, Python's, NumPy's."""
    if issubclass(kind, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(
        kind, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    )


def owner_of_method(fn: Any) -> Any:
    """Return what a method is bound to; None of another object, whose `__getattr__` may raise or count anything."""
    return fn.__self__ if isinstance(fn, (MethodType, BuiltinFunctionType, MethodWrapperType)) else None


def module_of_method(fn: Any) -> Module | None:
    """Return the module that a function is, or of which it is a method; None if there is none."""
    owner = fn if isinstance(fn, Module) else owner_of_method(fn)
    return owner if isinstance(owner, Module) else None


def asked_for(value: Any, name: str) -> Any:
    """Return an attribute of any object, None if it has none, or raises anything."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def namespace_of(value: Any) -> Any:
    """Return the `__dict__` of an object, None if it has none, or gives none."""
    try:
        return vars(value)
    except Exception:  # a property of that name may raise anything
        return None


@cached_by_class
def slots_of(kind: Any) -> tuple[Slot, ...]:
    """Return the slots of a class and its bases, private ones by the names that Python gives them.

    A class may have something else by the name of a base's slot, such as a property without a setter.
    """
    found: list[Slot] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            mangled = f"_{base.__name__.lstrip('_')}{name}" if is_private else name
            slot = vars(base).get(mangled)
            if name not in ("__dict__", "__weakref__") and _is_settable(slot):
                found.append((mangled, slot))
    return tuple(found)


def _is_settable(slot: Any) -> bool:
    """Return whether this is a slot, or a property with a setter that a decorator has put in its place."""
    return hasattr(type(slot), "__set__") and getattr(slot, "fset", True) is not None


def derived_from(*classes: type) -> Callable[[type], bool]:
    return lambda kind: issubclass(kind, classes)


def is_callable(kind: type) -> bool:
    return any("__call__" in vars(base) for base in kind.__mro__)


def behind_proxy(value: Any) -> Any:
    """Return what a weak proxy or a `super()` stands for, None if that is gone; anything else as it is."""
    if type(value) not in PROXIES:
        return value
    try:
        bound: Any = value if type(value) is super else value.__repr__
        return bound.__self__
    except ReferenceError:
        return None
