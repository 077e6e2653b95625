"""What a replay will read, taken down as it is when the forward pass begins.

`Capture` turns the function and its arguments into forms (see `forms`), from which a replay rebuilds them as they
were, whatever the forward pass or anybody after it does to the originals. A form holds no container and no closure of
the caller's, only copies: a list that collects the region's outputs would otherwise tie graph, region and list into a
cycle that no garbage collector sees (Rule 2).

Where the function counts or notes something in a closure (`calls += 1`, `seen.append(shape)`), that is a side effect
like a print, and happens in a replay too (Rule 23). Such variables and containers, which hold no tensor, are shared.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.jit import ScriptFunction
from torch.nn import Module

from reactivate._compat import may_be_written_unseen, registered_containers, save_tensor
from reactivate._engine.forms import (
    CellForm,
    CopyForm,
    DictForm,
    FunctionForm,
    ListForm,
    MethodForm,
    ObjectForm,
    PartialForm,
    RegisteredForm,
    Shared,
    StatisticForm,
    TupleForm,
    attributes_of,
    slots_of,
)
from reactivate._engine.namespaces import Watched, facts_of_class, facts_of_code, find_facts
from reactivate.errors import UnsupportedError

_ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice, type(...), object, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat),
    }
)
_EMPTY: tuple[Any, ...] = ([], (), {}, set(), "", range(0))
_ITERATORS: Any = (*(type(iter(empty)) for empty in _EMPTY), zip, map, enumerate, filter)

# How deep plain objects (not containers, not dataclasses) are copied. An argument is data by intent, perhaps a cache
# of layers of tensors. What a closure or a bound `self` leads to may be half the program: there, one level is watched.
_DEPTH_OF_ARGUMENTS = 4
_DEPTH_OF_FUNCTIONS = 0


class Capture:
    """One walk over a function and its arguments.

    Attributes:
        fn, args, kwargs: their forms.
        tensors: every tensor that was saved, in the order of the walk, with its version then.
        roots: the outermost modules found.
        watched: tensors that the replay will read by name.
        shared: what the replay will share with the function: counters and the like.
    """

    roots: tuple[Module, ...] = ()
    watched: tuple[Watched, ...] = ()
    shared: tuple[Shared, ...] = ()
    _scripts: tuple[Any, ...] = ()
    _generators: tuple[Any, ...] = ()
    _modules: Sequence[Module] | None = None
    _unowned: tuple[Any, ...] = ()  # values that only this walk holds: alive, so that their ids stay theirs

    def __init__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forms: dict[int, Any] = {}  # by the id of the value
        self._forms = forms
        tensors: list[tuple[Tensor, int]] = []
        self.tensors = tensors
        self.fn = self._python_function(fn) if type(fn) is FunctionType else self.function(fn)
        captured: list[Any] = []
        self.args = captured
        for item in args:
            # As mostly; what `value` would do, without its calls.
            if type(item) is Tensor and item.requires_grad and id(item) not in forms:
                form = forms[id(item)] = save_tensor(item, False)
                tensors.append((item, item._version))
                captured.append(form)
            else:
                captured.append(self.value(item))
        self.kwargs = {name: self.value(item) for name, item in kwargs.items()} if kwargs else kwargs

    @property
    def modules(self) -> Sequence[Module]:
        """Every module under the roots, each once; the walk finds what their attributes and their classes name, too."""
        if self._modules is None:
            self._modules = self._walk() if self.roots else ()
        return self._modules

    @property
    def generators(self) -> Sequence[Any]:
        """The sources of randomness found, also in the attributes of modules."""
        if self._modules is None and self.roots:
            self._modules = self._walk()
        return self._generators

    @property
    def scripts(self) -> Sequence[Any]:
        """Scripted functions and modules, also those that the modules' code names."""
        if self._modules is None and self.roots:
            self._modules = self._walk()
        return self._scripts

    def _walk(self) -> list[Module]:
        found: dict[Module, None] = {}
        todo: list[Module | None] = []
        scripted: set[Module] = set()  # those inside of them are a part of their code
        count = 0
        while todo or count < len(self.roots):
            if not todo:  # there may be more roots than in the beginning: a class may name some
                todo.append(self.roots[count])
                count += 1
            module = todo.pop()
            if module is not None and module not in found:
                found[module] = None
                children = module._modules
                if children:
                    todo += reversed(children.values())
                facts = facts_of_class(type(module))  # type: ignore[arg-type]
                if facts.is_plain:
                    continue
                if facts.is_scripted:
                    if module not in scripted:
                        self._scripts += (module,)
                    scripted.update(module.modules())
                if facts.names:
                    self._names(facts.names)
                self._scripts += facts.scripts
                if facts.is_users:
                    self._look_at_attributes(module)
        return list(found)

    def _look_at_attributes(self, module: Module) -> None:
        for value in vars(module).values():
            kind = type(value)
            if kind in _ATOMS or kind is dict or kind is OrderedDict:
                continue
            if kind is ScriptFunction:
                self._scripts += (value,)
            elif _is_random_source(value, kind) and value not in self._generators:
                self._generators += (value,)

    def form_of(self, value: Any) -> Any:
        """The form that a value got in this walk."""
        return self._forms.get(id(value))

    def value(self, value: Any, depth: int = _DEPTH_OF_ARGUMENTS) -> Any:
        """The form of an argument."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        forms, key = self._forms, id(value)
        if key in forms:
            return forms[key]
        if issubclass(kind, Tensor):
            if may_be_written_unseen(value):
                form = forms[key] = StatisticForm(value)
            else:
                form = forms[key] = save_tensor(value, False)
            self.tensors.append((value, value._version))
            return form
        return self._other(value, kind, depth)

    def _other(self, value: Any, kind: type, depth: int) -> Any:
        if isinstance(value, Module):
            self.roots += (value,)
            self._forms[id(value)] = value
            return value
        if issubclass(kind, tuple):
            return self._tuple(value, depth)
        if kind is list or kind is dict:
            return self._container(value, kind, depth)
        if kind in registered_containers:
            return self._registered(value, kind, depth)
        if issubclass(kind, (list, dict)):
            return self._container(value, kind, depth)
        if callable(value):
            return self._callable(value, kind)
        if kind is set or issubclass(kind, _ITERATORS):
            return CopyForm(value)
        if kind is GeneratorType:
            raise UnsupportedError(
                f"A generator ({value.__qualname__}) reached a checkpointed region. The forward pass uses it up, so "
                "that the replay would find it empty. Pass a list of its items instead."
            )
        if _is_random_source(value, kind):
            self._generators += (value,)
            return value
        return self._object(value, kind, depth)

    # -- containers and objects -----------------------------------------------------------------------------------

    def _tuple(self, value: tuple[Any, ...], depth: int) -> Any:
        items = [self.value(item, depth) for item in value]
        if all(form is item for form, item in zip(items, value)):
            return value
        form = self._forms[id(value)] = TupleForm(type(value), items)
        return form

    def _container(self, value: Any, kind: type, depth: int) -> Any:
        form: ListForm | DictForm
        if issubclass(kind, list):
            form = self._forms[id(value)] = ListForm(kind)
            form.items = [self.value(item, depth) for item in value]
            is_plain = all(map(is_, form.items, value))
        else:
            form = self._forms[id(value)] = DictForm(kind)
            form.items = [(key, self.value(item, depth)) for key, item in dict.items(value)]
            is_plain = all(item is value[key] for key, item in form.items)
        form.attributes = None if kind is list or kind is dict else self._attributes(attributes_of(value), depth)
        if depth == _DEPTH_OF_FUNCTIONS and is_plain:
            form.shared = value
            self.shared += (form,)
        return form

    def _registered(self, value: Any, kind: type, depth: int) -> Any:
        node = registered_containers[kind]
        children, context = node.flatten_fn(value)
        form = self._forms[id(value)] = RegisteredForm(node.unflatten_fn, context)
        children = list(children)
        self._unowned += (children,)
        form.items = [self.value(child, depth) for child in children]
        return form

    def _object(self, value: Any, kind: type, depth: int) -> Any:
        is_data = hasattr(kind, "__dataclass_fields__")
        if not _is_plain(kind):
            return value
        if depth <= 0 and not is_data:
            self._watch_attributes(value)
            return value
        form = self._forms[id(value)] = ObjectForm(kind)
        attributes = attributes_of(value)
        form.attributes = self._attributes(attributes, depth if is_data else depth - 1)
        if all(form.attributes[name] is item for name, item in attributes.items()):
            form.is_given_as_is(value)
        return form

    def _attributes(self, attributes: dict[str, Any], depth: int) -> dict[str, Any]:
        return {name: self.value(item, depth) for name, item in attributes.items()}

    # -- functions ------------------------------------------------------------------------------------------------

    def function(self, fn: Any) -> Any:
        """The form of the function that the region runs, or of one that it is made of."""
        return self.value(fn, _DEPTH_OF_FUNCTIONS)

    def _callable(self, fn: Any, kind: type) -> Any:
        if kind is FunctionType:
            return self._python_function(fn)
        if kind is MethodType:
            function, owner = self.function(fn.__func__), self.function(fn.__self__)
            return fn if owner is fn.__self__ and function is fn.__func__ else MethodForm(function, owner)
        if kind is BuiltinFunctionType:
            owner = fn.__self__
            return MethodForm(fn.__name__, self.value(owner)) if isinstance(owner, Tensor) else fn
        if issubclass(kind, functools.partial):
            return PartialForm(kind, self.function(fn.func), self.value(fn.args), self.value(fn.keywords))
        if kind is ScriptFunction:
            self._scripts += (fn,)
        elif not isinstance(fn, type) and _is_plain(kind):  # type: ignore[arg-type]
            self._watch_attributes(fn)
        return fn

    def _python_function(self, fn: FunctionType) -> Any:
        facts = facts_of_code.get(id(fn.__code__)) or find_facts(fn)
        if facts.names:
            self._names(facts.names)
        if facts.scripts:
            self._scripts += facts.scripts
        cells, defaults, keywords = fn.__closure__, fn.__defaults__, fn.__kwdefaults__
        if cells is None and defaults is None and keywords is None:
            return fn
        attributes = fn.__dict__
        if "_torchdynamo_orig_callable" in attributes:
            # Compiled code is found again by the identity of what is around it: look inside, keep it as it is.
            self.function(attributes["_torchdynamo_orig_callable"])
            return fn
        form = self._forms[id(fn)] = FunctionForm(fn)
        if cells is not None:
            names = zip(cells, fn.__code__.co_freevars)
            form.cells = [self._cell(cell, name in facts.assigned) for cell, name in names]
        form.defaults = self.value(defaults, _DEPTH_OF_FUNCTIONS)
        form.keywords = self.value(keywords, _DEPTH_OF_FUNCTIONS)
        return form

    def _cell(self, cell: CellType, is_assigned_to: bool) -> CellForm:
        form: CellForm | None = self._forms.get(id(cell))
        if form is None:
            form = self._forms[id(cell)] = CellForm()
            try:
                contents = cell.cell_contents
            except ValueError:  # nothing yet
                form.is_empty = True
                is_plain = True
            else:
                form.contents = self.value(contents, _DEPTH_OF_FUNCTIONS)
                is_plain = form.contents is contents
            if is_assigned_to and is_plain:
                form.shared = cell
                self.shared += (form,)
        return form

    def _names(self, names: tuple[tuple[dict[str, Any], str], ...]) -> None:
        for namespace, name in names:
            self._watch(name, namespace)

    def _watch_attributes(self, value: Any) -> None:
        self._forms[id(value)] = value
        attributes = getattr(value, "__dict__", {})
        for name in list(attributes):
            self._watch(name, attributes)

    def _watch(self, name: str, namespace: dict[str, Any]) -> None:
        """Note what stands under a name that the replay will read as it is then, not as it was."""
        value = namespace.get(name)
        if isinstance(value, Tensor):
            self.watched += (Watched(name, namespace, value),)
        elif isinstance(value, (Module, torch.Generator)):
            self.value(value)
        elif isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, (Module, torch.Generator)):
                    self.value(item)


@functools.cache
def _is_plain(kind: type) -> bool:
    """Whether objects of this class are made of attributes alone, and a second one of them hurts nobody."""
    if issubclass(kind, (Enum, BaseException)) or hasattr(kind, "__del__"):
        return False
    if kind.__module__.partition(".")[0] == "reactivate":  # a checkpointed function closes over its options
        return False
    try:
        object.__new__(kind)
    except TypeError:  # abstract, or with state of its own in C
        return False
    return kind.__dictoffset__ != 0 or bool(slots_of(kind))  # type: ignore[arg-type]


def _is_random_source(value: Any, kind: type) -> bool:
    if kind is torch.Generator or isinstance(value, random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
