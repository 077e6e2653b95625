"""Module-level names that a function reads: values, tensors, modules and generators that may change, and functions.

The names that a code object reads are found once a code object and kept; what they stand for is looked up at every call.
A name is one of the function's own Python module, or one that it reads from another Python module of the user's. Names are
followed through the functions that they stand for: within a Python module without end, from one to another once. Where
one stands for another function by now, they are found again. Scripted functions are looked for further.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple
from weakref import ref

from torch.autograd import Function
from torch.jit import ScriptFunction, ScriptModule
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from reactivate._snapshot.bindings import Bindings, Names, Namespace
from reactivate._snapshot.cached_results import CACHED, results_in
from reactivate._snapshot.caches import BoundedCache, cached, is_importable
from reactivate._snapshot.held import ATOMS
from reactivate._snapshot.kinds import MAKING, Slot, is_librarys_package, is_users_class, slots_of
from reactivate._torch.modules import is_flat_wrapper

_MOST_CROSSINGS = 1
"""How often names are followed from one Python module into another."""


class Facts(NamedTuple):
    """The facts of a function, from its code.

    Attributes:
        code: kept, so that its id stays its own.
        namespace: the function's own: code that is run in two has other names in each.
        names: (namespace, name) of everything at module level that it reads and that may hold state.
        bindings: the names of functions, classes and Python modules; None if there are none.
        scripts: the scripted functions that it names.
        attributes: the names that its code and that of the functions it names asks objects for.
        overwritten: the closed-over variables that it assigns and never reads.
        awaited: the Python modules that it imports when it is called, and that are not there yet.
        is_closed: whether it reads nothing but its arguments.
    """

    code: CodeType
    namespace: Namespace
    names: Names
    bindings: Bindings | None
    scripts: tuple[Any, ...]
    attributes: frozenset[str]
    overwritten: frozenset[str]
    awaited: tuple[str, ...]
    is_closed: bool


# By the id of the code object; they hold the namespaces in `names`.
facts_of_code: BoundedCache[int, Facts] = BoundedCache()

generation = [0]
"""How often facts were found anew: where a name stands for another function, or code runs in another namespace."""


def find_facts(fn: FunctionType) -> Facts:
    """Find the facts of `fn`, and keep them in `facts_of_code` unless that would keep alive what is made by `exec`."""
    code = fn.__code__
    functions = list(_named_functions(fn, set()))
    scripts = tuple(value for named in functions for value in _named_values(named) if isinstance(value, ScriptFunction))
    attributes = frozenset[str]().union(*(attribute_names(named.__code__) for named in functions))
    names, bindings = _find([fn])
    is_kept = is_importable(fn.__globals__) and _are_for_good(names, bindings)
    awaited = tuple(name for named in functions for name in _imported(named) if name not in sys.modules)
    is_closed = not (names or bindings or scripts or awaited or code.co_freevars)
    facts = Facts(code, fn.__globals__, names, bindings, scripts, attributes, _overwritten(code), awaited, is_closed)
    if is_kept:
        generation[0] += id(code) in facts_of_code
        facts_of_code[id(code)] = facts
    return facts


def facts_of(fn: FunctionType) -> Facts:
    """Return the facts of `fn`, which may have been found when names stood for something else."""
    facts = facts_of_code.get(id(fn.__code__))
    if facts is None or facts.namespace is not fn.__globals__ or any(map(sys.modules.__contains__, facts.awaited)):
        return find_facts(fn)
    return facts


def current_facts(fn: FunctionType) -> Facts:
    """Return the facts of `fn` as they are now."""
    facts = facts_of(fn)
    return facts if facts.bindings is None or facts.bindings.are_current() else find_facts(fn)


def _are_for_good(names: Names, bindings: Bindings | None) -> bool:
    """Return whether all namespaces are those of Python modules that can be imported."""
    spaces = {id(space): space for space, _ in (*names, *(() if bindings is None else bindings.names))}
    return all(map(is_importable, spaces.values()))


def _overwritten(code: CodeType) -> frozenset[str]:
    if not code.co_freevars:
        return frozenset()
    reads = (
        step for step in dis.get_instructions(code) if step.opname.startswith("LOAD_") and type(step.argval) is str
    )
    return frozenset(code.co_freevars).difference(step.argval for step in reads)


class ClassFacts(NamedTuple):
    """The facts of a module's class.

    Attributes:
        names: (namespace, name) of everything at module level that its methods read and that may hold state.
        bindings: the names of functions, classes and Python modules; None if there are none.
        open: references to those of its functions that lead to something themselves: by closures, attributes and defaults.
        slots: its slots.
        scripts: the scripted functions that its methods name.
        is_users: whether it is not one of `torch.nn`'s, whose attributes are known to be plain.
        is_scripted: whether it is TorchScript's.
        is_lazy: whether its first call makes its parameters.
        is_wrapper: whether it is of a library that shards what is inside, and the attributes are its own affair.
        is_plain: whether there is nothing of all that.
        attributes: the names that its own code can give to attributes.
        asked: the names that its methods, and the functions that they name, ask objects for.
        methods: references to them, and their code.
    """

    names: Names
    bindings: Bindings | None
    open: tuple[ref[FunctionType], ...]
    slots: tuple[Slot, ...]
    scripts: tuple[Any, ...]
    is_users: bool
    is_scripted: bool
    is_lazy: bool
    is_wrapper: bool
    is_plain: bool
    attributes: frozenset[str]
    asked: frozenset[str]
    methods: tuple[Any, ...]

    def are_current(self, kind: type) -> bool:
        """Return whether the class has the methods that it had, and these name what they named."""
        if self.is_users:
            methods = _identities_of(methods_of(kind))
            if len(methods) != len(self.methods) or not all(map(is_, methods, self.methods)):
                return False
        return self.bindings is None or self.bindings.are_current()


def _identities_of(methods: Iterable[FunctionType]) -> tuple[Any, ...]:
    """Return a weak reference to each function, of which there is one, and its code."""
    return tuple(item for fn in methods for item in (ref(fn), fn.__code__))


_facts_of_class: dict[int, tuple[ClassFacts, ref[type]]] = {}  # by the id of the class, as long as that lives


def facts_of_class(kind: type) -> ClassFacts:
    """Return the facts of a module's class as they are now."""
    key = id(kind)
    found = _facts_of_class.get(key)
    if found is not None and found[0].are_current(kind):
        return found[0]
    facts = _find_class_facts(kind)
    if _are_for_good(facts.names, facts.bindings):
        _facts_of_class[key] = facts, ref(kind, lambda _: _facts_of_class.pop(key, None))
    return facts


def _find_class_facts(kind: type) -> ClassFacts:
    methods = list(methods_of(kind))
    names, bindings = _find(methods)
    facts = list(map(current_facts, methods))
    scripts = tuple(script for each in facts for script in each.scripts)
    is_users = not str(kind.__module__).startswith("torch.nn.modules.")
    is_scripted = issubclass(kind, ScriptModule)
    is_lazy = issubclass(kind, LazyModuleMixin)
    is_plain = not (names or bindings or scripts or is_users or is_scripted or is_lazy)
    opened = tuple(map(ref, filter(_is_open, methods))) if is_users else ()
    attributes = frozenset(Module().__dict__).union(*(fn.__code__.co_names for fn in methods))
    slots, asked = slots_of(kind), frozenset[str]().union(*(each.attributes for each in facts if is_users))
    flags = is_users, is_scripted, is_lazy, is_flat_wrapper(kind), is_plain
    return ClassFacts(names, bindings, opened, slots, scripts, *flags, attributes, asked, _identities_of(methods))


def _is_open(fn: FunctionType) -> bool:
    """Return whether a method leads to something, but for its own class (`super()`)."""
    if fn.__code__.co_freevars not in ((), ("__class__",)) or fn.__dict__ or fn.__kwdefaults__:
        return True
    return not ATOMS.issuperset(map(type, fn.__defaults__ or ()))


def methods_of(kind: type) -> Iterator[FunctionType]:
    """The functions in a class and in those it is derived from, also those of properties."""
    for base in kind.__mro__:
        if base is not Module and base is not object:
            for item in vars(base).values():
                yield from functions_in(item)


def functions_in(item: Any) -> Iterator[FunctionType]:
    """The function that `item` is, or those that it calls: of a property, a static method, a cache, a partial."""
    if isinstance(item, FunctionType):
        yield item
    elif isinstance(item, functools.partial):
        yield from functions_in(item.func)
    elif isinstance(item, CACHED):
        yield from functions_in(item.__wrapped__)
    else:
        for member in _members_of(item):
            if member is not item:
                yield from functions_in(member)


def called_members(kind: type, asked: frozenset[str], *, is_named: bool) -> Iterator[tuple[str, Any]]:
    """Return (name, function or object) of what a class has itself and code may call.

    Args:
        asked: the names that code asks objects for.
        is_named: whether code may call the class: otherwise plain methods of a module are those of one that is there.
    """
    own = vars(kind)
    is_of_module = issubclass(kind, Module) and not is_named
    others = {*(MAKING if is_named else ()), *own.get("__match_args__", ())}
    for name, item in [*own.items()]:
        if (name in asked or name in others) and not (is_of_module and type(item) is FunctionType):
            for member in _members_of(item):
                yield name, member


def _members_of(item: Any) -> Iterator[Any]:
    """The objects that an attribute of a class calls: functions, or other objects in the place of these."""
    if isinstance(item, property):
        yield from filter(None, (item.fget, item.fset, item.fdel))
    elif isinstance(item, (staticmethod, classmethod)):
        yield item.__func__
    elif isinstance(item, functools.partialmethod):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, functools.cached_property):
        yield item.func
    elif isinstance(item, functools.singledispatchmethod):
        yield from item.dispatcher.registry.values()
    else:
        yield item


def _find(functions: Iterable[FunctionType]) -> tuple[Names, Bindings | None]:
    """The names that these functions read: those that may hold state, and those of functions, classes and modules."""
    names: dict[tuple[int, str], tuple[Namespace, str]] = {}
    bound: dict[tuple[int, str], tuple[Namespace, str]] = {}
    seen: set[int] = set()
    todo = deque((fn, 0) for fn in functions)
    while todo:
        fn, crossings = todo.popleft()
        if id(fn.__code__) in seen or is_librarys(fn.__globals__):
            continue
        seen.add(id(fn.__code__))
        for namespace, name in _reads(fn):
            key = id(namespace), name
            value = namespace.get(name)
            if not _is_code(value):
                if name in namespace or not hasattr(builtins, name):  # perhaps nothing yet
                    names[key] = namespace, name
            elif not (isinstance(value, ModuleType) and is_librarys(vars(value))):
                bound[key] = namespace, name
            for inner in _leads_to(value):
                if inner.__globals__ is fn.__globals__:
                    todo.appendleft((inner, crossings))  # those that are nearer first
                elif crossings < _MOST_CROSSINGS:
                    todo.append((inner, crossings + 1))
    return tuple(names.values()), Bindings(bound.values(), _is_users_function) if bound else None


def _reads(fn: FunctionType) -> Iterator[tuple[Namespace, str]]:
    """(namespace, name) of what `fn` reads at module level, also from other Python modules of the user's."""
    todo: list[tuple[Namespace, str]] = [(fn.__globals__, name) for name in global_names(fn.__code__)]
    attributes = attribute_names(fn.__code__)
    for module in filter(None, map(sys.modules.get, _imported(fn))):
        todo += names_in_module(module, attributes)
    seen: set[int] = set()
    while todo:
        namespace, name = todo.pop()
        yield namespace, name
        value = namespace.get(name)
        if isinstance(value, ModuleType) and id(value) not in seen:
            seen.add(id(value))
            todo += names_in_module(value, attributes)


def _imported(fn: FunctionType) -> list[str]:
    """Return the names of the Python modules that `fn` imports when it is called."""
    package = (fn.__globals__.get("__package__") or "").split(".")
    imports = [(name, package[: len(package) - level + 1] if level else []) for name, level in _imports(fn.__code__)]
    return [".".join(filter(None, [*parts, name])) for name, parts in imports]


@cached
def _imports(code: CodeType) -> tuple[tuple[str, int], ...]:
    """Return (name, level) of each import in some code."""
    steps = list(dis.get_instructions(code))
    own = [(step.argval, steps[index - 2].argval) for index, step in enumerate(steps) if step.opname == "IMPORT_NAME"]
    inner = (item for part in code.co_consts if isinstance(part, CodeType) for item in _imports(part))
    return (*((name, level if isinstance(level, int) else 0) for name, level in own), *inner)


def names_in_module(module: ModuleType, attributes: frozenset[str]) -> Names:
    """Return those of the attributes that a Python module of the user's has."""
    namespace = vars(module)
    return () if is_librarys(namespace) else tuple((namespace, name) for name in attributes if name in namespace)


def _leads_to(value: Any) -> Iterable[FunctionType]:
    """The functions whose names are read where `value` is named."""
    if isinstance(value, type):
        return methods_of(value) if issubclass(value, Function) else ()
    return functions_in(value)


def _is_users_function(value: Any) -> bool:
    """Return whether no library holds this function: it is the user's, also inside of a library's decorator."""
    if not isinstance(value, FunctionType) or not is_librarys(value.__globals__):
        return isinstance(value, FunctionType)
    if value.__closure__ is None:
        return False
    module = sys.modules.get(value.__module__)
    return module is None or not is_librarys(vars(module)) or vars(module).get(value.__name__) is not value


def _named_functions(fn: FunctionType, seen: set[int]) -> Iterator[FunctionType]:
    """`fn` and the functions that it names, itself or through others, but for libraries' own."""
    if id(fn.__code__) in seen or is_librarys(fn.__globals__):
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
    """Return what `fn` names at module level, also as a name in a module of the user's."""
    namespace = fn.__globals__
    names, attributes = global_names(fn.__code__), set(fn.__code__.co_names)
    values = [namespace[name] for name in names if name in namespace]
    for module in [value for value in values if isinstance(value, ModuleType) and not is_librarys(vars(value))]:
        values += [value for name, value in vars(module).items() if name in attributes]
    return values


def _is_code(value: Any) -> bool:
    """Return whether a value is code, bound to no object: a function, a Python module, a class of a library's."""
    if isinstance(value, CACHED):
        inner = value.__wrapped__
        return (
            results_in(value) is None and _is_code(inner) and not (isinstance(inner, FunctionType) and _is_open(inner))
        )
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, (ModuleType, NoneType)) or _is_librarys_class(value.__self__)
    return isinstance(value, (FunctionType, ModuleType)) or _is_librarys_class(value)


def _is_librarys_class(value: Any) -> bool:
    return isinstance(value, type) and not is_users_class(value)


def is_librarys(namespace: dict[str, Any]) -> bool:
    """Return whether these are the names of a module that keeps nothing of the user's at module level."""
    return is_librarys_package(str(namespace.get("__name__", "")).partition(".")[0])


@cached
def global_names(code: CodeType) -> frozenset[str]:
    """Return the names at module level that code reads or assigns, with those of functions inside of it."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= global_names(inner)
    return frozenset(names)


@cached
def attribute_names(code: CodeType) -> frozenset[str]:
    """Return the names that code asks objects for, among others, with those of functions inside of it."""
    inner = (attribute_names(item) for item in code.co_consts if isinstance(item, CodeType))
    return frozenset(code.co_names).union(*inner)
