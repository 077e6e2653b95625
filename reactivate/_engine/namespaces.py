"""Module-level names that a function reads: values, tensors, modules and generators that may change.

The names that a code object reads are found once a code object and kept; what they stand for is looked up at every call.
Names are followed through helper functions of the same Python module. Scripted functions are looked for further, through
helper functions of other modules and the attributes of those.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch.autograd import Function
from torch.jit import ScriptFunction, ScriptModule
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

Names = tuple[tuple[dict[str, Any], str], ...]


class Facts(NamedTuple):
    """What is known of a function from its code.

    Attributes:
        code: kept, so that its id stays its own.
        names: (namespace, name) of everything at module level that it reads and that may hold state.
        scripts: the scripted functions that it names.
        attributes: the names that its code and that of the functions it names asks objects for.
        overwritten: the closed-over variables that it assigns and never reads.
    """

    code: CodeType
    names: Names
    scripts: tuple[Any, ...]
    attributes: frozenset[str]
    overwritten: frozenset[str]


facts_of_code: dict[int, Facts] = {}  # by the id of the code object


def find_facts(fn: FunctionType) -> Facts:
    """The facts of `fn`, from now on in `facts_of_code`."""
    code = fn.__code__
    functions = list(_named_functions(fn, set()))
    scripts = tuple(value for named in functions for value in _named_values(named) if isinstance(value, ScriptFunction))
    attributes = frozenset[str]().union(*(_attribute_names(named.__code__) for named in functions))
    names = tuple(_find(fn.__globals__, [code]))
    facts = facts_of_code[id(code)] = Facts(code, names, scripts, attributes, _overwritten(code))
    return facts


def _overwritten(code: CodeType) -> frozenset[str]:
    if not code.co_freevars:
        return frozenset()
    reads = (
        step for step in dis.get_instructions(code) if step.opname.startswith("LOAD_") and type(step.argval) is str
    )
    return frozenset(code.co_freevars).difference(step.argval for step in reads)


class ClassFacts(NamedTuple):
    """What is known of a module's class.

    Attributes:
        names: (namespace, name) of everything at module level that its methods read and that may hold state.
        scripts: the scripted functions that its methods name.
        is_users: whether it is not one of `torch.nn`'s, whose attributes are known to be plain.
        is_scripted: whether it is TorchScript's.
        is_lazy: whether its first call makes its parameters.
        is_plain: whether there is nothing of all that.
        attributes: the names that its own code can give to attributes.
    """

    names: Names
    scripts: tuple[Any, ...]
    is_users: bool
    is_scripted: bool
    is_lazy: bool
    is_plain: bool
    attributes: frozenset[str]


@functools.cache
def facts_of_class(kind: type) -> ClassFacts:
    """The facts of a module's class."""
    facts = [facts_of_code.get(id(fn.__code__)) or find_facts(fn) for fn in methods_of(kind)]
    names = tuple(name for item in facts for name in item.names)
    scripts = tuple(script for item in facts for script in item.scripts)
    is_users = not kind.__module__.startswith("torch.nn.modules.")
    is_scripted = issubclass(kind, ScriptModule)
    is_lazy = issubclass(kind, LazyModuleMixin)
    is_plain = not (names or scripts or is_users or is_scripted or is_lazy)
    attributes = frozenset(Module().__dict__).union(*(fn.__code__.co_names for fn in methods_of(kind)))
    return ClassFacts(names, scripts, is_users, is_scripted, is_lazy, is_plain, attributes)


def methods_of(kind: type) -> Iterator[FunctionType]:
    """The functions in a class and in those it is derived from."""
    for base in kind.__mro__:
        if base is Module:
            return
        for item in vars(base).values():
            function = getattr(item, "__func__", item)  # of a static or class method
            if isinstance(function, FunctionType):
                yield function


def _find(namespace: dict[str, Any], todo: list[CodeType]) -> Iterator[tuple[dict[str, Any], str]]:
    if _is_librarys(namespace):
        return
    seen: set[str] = set()
    while todo:
        code = todo.pop()
        for name in _global_names(code) - seen:
            seen.add(name)
            value = namespace.get(name)
            if isinstance(value, FunctionType) and value.__globals__ is namespace:
                todo.append(value.__code__)
            elif name in namespace:
                if not isinstance(value, _FIXED) and not _is_librarys_class(value):
                    yield namespace, name
            elif not hasattr(builtins, name):  # nothing yet
                yield namespace, name


def _named_functions(fn: FunctionType, seen: set[int]) -> Iterator[FunctionType]:
    """`fn` and the functions that it names, itself or through others, but for libraries' own."""
    if id(fn.__code__) in seen or _is_librarys(fn.__globals__):
        return
    seen.add(id(fn.__code__))
    yield fn
    for value in _named_values(fn):
        if isinstance(value, FunctionType):
            yield from _named_functions(value, seen)
        elif isinstance(value, type) and issubclass(value, Function):
            for method in methods_of(value):
                yield from _named_functions(method, seen)


def _named_values(fn: FunctionType) -> list[Any]:
    """What `fn` names at module level, also as a name in a module of the user's."""
    namespace = fn.__globals__
    names, attributes = _global_names(fn.__code__), set(fn.__code__.co_names)
    values = [namespace[name] for name in names if name in namespace]
    for module in [value for value in values if isinstance(value, ModuleType) and not _is_librarys(vars(value))]:
        values += [value for name, value in vars(module).items() if name in attributes]
    return values


_FIXED = (FunctionType, BuiltinFunctionType, ModuleType)


def _is_librarys_class(value: Any) -> bool:
    return isinstance(value, type) and _is_librarys({"__name__": value.__module__})


def _is_librarys(namespace: dict[str, Any]) -> bool:
    """Whether these are the names of a module that keeps nothing of the user's at module level."""
    name = str(namespace.get("__name__", "")).partition(".")[0]
    return name in ("reactivate", "torch", "numpy") or (name in sys.stdlib_module_names and name != "__main__")


@functools.cache
def _global_names(code: CodeType) -> frozenset[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _global_names(inner)
    return frozenset(names)


@functools.cache
def _attribute_names(code: CodeType) -> frozenset[str]:
    inner = (_attribute_names(item) for item in code.co_consts if isinstance(item, CodeType))
    return frozenset(code.co_names).union(*inner)
