"""The functions among what is reached: closures, defaults, and the names that code reads."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import ReferenceType

from torch import Tensor
from torch.jit import ScriptFunction

from reactivate._engine.inputs.cells import CellTensorNote
from reactivate._engine.inputs.class_walk import ClassWalk
from reactivate._engine.inputs.namespaces import (
    Facts,
    contents_of,
    current_facts,
    facts_of,
    names_in_module,
)
from reactivate._engine.inputs.specs import SavedInput
from reactivate._engine.inputs.walk import DEPTH
from reactivate._engine.state.code import Bindings, CodeNote, are_closed
from reactivate._engine.state.contents import (
    ATOMS,
    LARGEST,
    pairs_in,
)
from reactivate._engine.state.functions import (
    CellContainerNote,
    CellNote,
    FunctionNote,
    NameNote,
    PartialNote,
)
from reactivate._engine.state.iterators import holds_iterator


class FunctionWalk(ClassWalk):
    """A walk that looks into functions."""

    _has_compiled = False
    _bindings: tuple[Bindings, ...] = ()

    def _callable(self, fn: Any, kind: type, place: str, depth: int) -> None:
        if kind is MethodType:
            self._look(fn.__func__, place, depth)
            self._look(fn.__self__, f"{place}.__self__", depth)
        elif kind is BuiltinFunctionType or kind is MethodWrapperType:
            if not isinstance(fn.__self__, (ModuleType, type)):  # whose functions and class methods they are
                self._look(fn.__self__, f"{place}.__self__", depth)
        elif issubclass(kind, functools.partial):
            if fn.__dict__ or self.notes is self.module_notes or holds_iterator(fn.args):
                self.notes.append(PartialNote(fn))
                self._look_at_all(fn.__dict__, place, depth)
            self._look(fn.func, f"{place}.func", depth)
            self._look(fn.args, f"{place}.args", depth)
            self._look(fn.keywords, f"{place}.keywords", depth)
        elif kind is ScriptFunction:
            self.scripts += (fn,)
        elif isinstance(fn, ReferenceType):
            self._look(fn(), place, depth)
        else:
            self._object(fn, kind, place, depth)
            if inspect.getattr_static(kind, "__wrapped__", None) is not None:  # ours, which are not looked into
                self._look(fn.__wrapped__, place, depth)
            call = inspect.getattr_static(kind, "__call__")
            if type(call) is FunctionType:
                self._look(call, place, depth)

    def _function(self, fn: FunctionType, place: str, depth: int) -> None:
        facts = facts_of(fn)
        if facts.bindings is not None:
            facts = current_facts(fn)
            if facts.bindings is not None:
                self._bindings += (facts.bindings,)
        if facts.names:
            self._names(facts.names)
        if facts.scripts:
            self.scripts += facts.scripts
        self.code.add_function(facts)
        compiled = fn.__dict__.get("_torchdynamo_orig_callable")
        if compiled is not None:
            self._has_compiled = True
            self._look(compiled, place, depth)
            return
        self._made_of(fn, place, depth, facts)

    def _made_of(self, fn: FunctionType, place: str, depth: int, facts: Facts | None = None) -> None:
        """Note what a function consists of, and look at that."""
        self._specs[id(fn)] = fn
        self.notes.append(FunctionNote(fn))
        if fn.__closure__ is not None:
            facts = facts or current_facts(fn)
            for cell, name in zip(fn.__closure__, fn.__code__.co_freevars):
                if id(cell) not in self._specs and name != "__class__":
                    self._specs[id(cell)] = cell
                    if name in facts.overwritten and isinstance(contents_of(cell), Tensor):
                        self.notes.append(CellNote(cell))  # no input: kept as one, it would chain the calls' graphs
                    else:
                        self._cell(cell, f"{place} (closed over as `{name}`)", depth, facts)
        if fn.__defaults__ is not None:
            self._look(fn.__defaults__, f"{place} (defaults)", depth)
        if fn.__kwdefaults__ is not None:
            self._look(fn.__kwdefaults__, f"{place} (defaults)", depth)
        if fn.__dict__:
            self._look_at_all(fn.__dict__, place, depth)

    def _code(self) -> None:
        """Note the functions that code names, and look at what they lead to."""
        note = CodeNote(self._bindings)
        self._bindings = ()
        self.notes.append(note)
        if not are_closed(note.functions):
            for fn in note.functions:
                if id(fn) not in self._specs and not are_closed([fn]):
                    self._made_of(fn, fn.__name__, DEPTH)
        if self._bindings:  # of functions in closures
            self._code()

    def _cell(self, cell: CellType, place: str, depth: int, facts: Facts) -> None:
        try:
            contents = cell.cell_contents
        except ValueError:  # nothing yet
            self.notes.append(CellNote(cell))
            return
        kind = type(contents)
        if isinstance(contents, Tensor):
            self._cell_tensor(cell, contents, place)
        elif kind in (list, dict, OrderedDict) and len(contents) <= LARGEST:
            self.notes.append(CellContainerNote(cell))
            if id(contents) not in self._specs:
                self._specs[id(contents)] = contents
                for key, item in pairs_in(contents):
                    if type(item) not in ATOMS:
                        self._look(item, f"{place}[{key!r}]", depth)
        else:
            self.notes.append(CellNote(cell))
            if kind is ModuleType:
                self._names(names_in_module(contents, facts.attributes))
            elif isinstance(contents, type):
                self._class(contents)
            else:
                self._look(contents, place, depth)

    def _cell_tensor(self, cell: CellType, tensor: Tensor, place: str) -> None:
        if not tensor.requires_grad or self.notes is self.module_notes or self._is_state(tensor):
            self.notes.append(CellNote(cell))
            if id(tensor) not in self._specs:
                self._look(tensor, place, 0)
            return
        spec = self._specs.get(id(tensor))
        if spec is None:
            spec = self._specs[id(tensor)] = self._stored(tensor, place) or SavedInput(tensor)
            self.saved.append((tensor, spec, tensor._version))
        self.notes.append(CellTensorNote(cell, spec))

    def _names(self, names: tuple[tuple[dict[str, Any], str], ...]) -> None:
        for namespace, name in names:
            key = id(namespace), name
            if key in self._specs:
                continue
            self._specs[key] = namespace
            self.notes.append(NameNote(namespace, name))
            value = namespace.get(name)
            if isinstance(value, type):
                self._class(value)
            elif type(value) not in ATOMS:
                self._look(value, name, DEPTH)
