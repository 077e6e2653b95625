"""One walk over a function and its arguments: what a recomputation will read, noted as the forward begins.

The recomputation calls the same function with the same objects. The walk notes what mutable ones hold (see
`state/contents`), so that they can be rewound in place; which tensors must not change, or are state of which a copy is
kept; and which modules, generators and scripted functions can be reached. It ends at a stated depth and size: a trainer and
its vocabulary are reachable too, and what lies beyond is used as it is, as without this library.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import Enum
from types import BuiltinFunctionType, CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakSet

import torch
from torch import Tensor
from torch.jit import ScriptFunction
from torch.nn import Module

from reactivate._backends import fences
from reactivate._engine.inputs.cells import CellTensorNote
from reactivate._engine.inputs.kinds import (
    SMALL_BYTES,
    is_plain,
    is_random_source,
    is_small_array,
    names_of_state,
    users_classes,
)
from reactivate._engine.inputs.namespaces import (
    ClassFacts,
    Facts,
    contents_of,
    current_facts,
    facts_of_class,
    facts_of_code,
    find_facts,
    names_in_module,
)
from reactivate._engine.inputs.specs import GeneratorInput, IteratorInput, SavedInput, TupleInput
from reactivate._engine.state.buffers import ArrayNote, BytesNote, NumbersNote, StreamNote
from reactivate._engine.state.code import Bindings, CodeNote, are_closed
from reactivate._engine.state.contents import (
    ATOMS,
    LARGEST,
    DictNote,
    KindNote,
    LengthNote,
    ListNote,
    Note,
    SetNote,
    SlotsNote,
    TensorsNote,
    WeakTensor,
    length_of,
    namespace_of,
    slots_of,
)
from reactivate._engine.state.functions import (
    CellContainerNote,
    CellNote,
    ClassNote,
    FunctionNote,
    NameNote,
    PartialNote,
)
from reactivate._engine.state.iterators import holds_iterator, is_iterator, parts_of
from reactivate._engine.state.modules import UNINITIALIZED
from reactivate._engine.state.parts import Parts
from reactivate._engine.state.reaching import tree_of
from reactivate._engine.state.shadows import is_known_written
from reactivate._engine.state.trees import single_modules, whole_trees
from reactivate._torch.autograd import innermost_pack_hook
from reactivate._torch.modules import GLOBAL_FORWARD_HOOKS
from reactivate._torch.saved import save_tensor

# How deep plain objects (not containers, not dataclasses) are looked into. An argument is data by intent, perhaps a cache
# of layers of tensors. A closure or a bound `self` leads to half the program.
_DEPTH_OF_ARGUMENTS = 4
_DEPTH_OF_FUNCTIONS = 2
_MOST_OBJECTS = 256
_BUFFERS = frozenset({bytearray, memoryview, io.StringIO, io.BytesIO})


class Input(NamedTuple):
    """A tensor that the recomputation reads where it is.

    Attributes:
        tensor: the tensor, or a `WeakTensor`.
        version: at the beginning of the region.
        place: where it was found.
    """

    tensor: Any
    version: int
    place: str


class Found(NamedTuple):
    """The notes of one module of a large tree.

    Attributes:
        module: the module.
        notes, tensors, generators: what its attributes lead to.
        parts: what it is made of, if that has been looked at.
    """

    module: Module
    notes: Sequence[Note]
    tensors: Sequence[Tensor] = ()
    generators: Sequence[Any] = ()
    parts: Parts | None = None


class Capture:
    """One walk.

    Attributes:
        fn, args, kwargs: the function, and the specs of its arguments.
        saved: (tensor, its spec, version) of the arguments that autograd keeps; `given` are the tensors alone.
        inputs: tensors that are read where they are, and are not state.
        tensors: tensors without a graph, of which a copy is kept.
        notes: what mutable objects hold.
        roots: the outermost modules found.
        modules: every module under the roots, each once; the walk finds what their attributes and classes name, too.
        scripts: scripted functions and modules, also those that the modules' code names.
        generators: the sources of randomness found, also in the attributes of modules.
        module_notes, module_tensors: as `notes` and `tensors`, of what attributes of modules lead to.
        parts: what `modules` are made of, if that has been looked at.
        is_hooked: whether there are saved-tensor hooks around the region.
        is_lazy: whether a module has parameters that its first call makes.
        is_large: whether there are so many modules that they are noted as they are reached (see `_engine/state/reaching.py`).
    """

    roots: tuple[Module, ...] = ()
    is_lazy = False
    is_large = False
    scripts: tuple[Any, ...] = ()
    generators: tuple[Any, ...] = ()
    modules: Sequence[Module] = ()
    parts: Parts | None = None
    _has_compiled = False
    _bindings: tuple[Bindings, ...] = ()

    def __init__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_be_large: bool = False) -> None:
        self.fn = fn
        self.saved: list[tuple[Tensor, Any, int]] = []
        self.inputs: list[Input] = []
        self.tensors: list[Tensor] = []
        self.notes: list[Note] = []
        self.module_notes: list[Note] = []
        self.module_tensors: list[Tensor] = []
        self._specs: dict[Any, Any] = {}  # by the id of the value; of names and classes by more
        self._reached: dict[int, Module] = {}
        self._objects = 0
        self._weak = True
        self.is_hooked = innermost_pack_hook() is not None
        specs = self._specs
        if isinstance(fn, Module):
            self.roots = (fn,)
            specs[id(fn)] = fn
        elif type(fn) is FunctionType:  # as mostly, and methods of modules
            self._function(fn, "the function", _DEPTH_OF_FUNCTIONS)
        elif type(fn) is MethodType and isinstance(fn.__self__, Module) and type(fn.__func__) is FunctionType:
            self.roots = (fn.__self__,)
            specs[id(fn.__self__)] = fn.__self__
            self._function(fn.__func__, "the function", _DEPTH_OF_FUNCTIONS)
        else:
            self._look(fn, "the function", _DEPTH_OF_FUNCTIONS)
        captured: list[Any] = []
        self.args = captured
        self._weak = False
        for index, item in enumerate(args):
            # As mostly; what `_argument` would do, without its calls.
            if type(item) is Tensor and item.requires_grad and not self.is_hooked and id(item) not in specs:
                spec = specs[id(item)] = save_tensor(item, False)
                self.saved.append((item, spec, item._version))
                captured.append(spec)
            else:
                captured.append(item if type(item) in ATOMS else self._argument(item, f"args[{index}]"))
        self.kwargs = (
            {name: self._argument(item, f"kwargs[{name!r}]") for name, item in kwargs.items()} if kwargs else kwargs
        )
        self._weak = True
        if self._bindings:
            self._code()
        self.given = [item[0] for item in self.saved]
        tensors = self.reached() if self.inputs or self.tensors else self.given
        if tensors:
            note = TensorsNote(tensors)
            self.notes.append(note)
            if note.noted is not None:
                self._look_at_attributes(tensors)
        if self.roots:
            self.is_large = may_be_large and not self._has_compiled and any(map(_is_large, self.roots))
            if not self.is_large:
                self.modules = self._found()

    def reached(self) -> list[Tensor]:
        """Return every tensor found that is no module's."""
        inputs = (item.tensor.get() if isinstance(item.tensor, WeakTensor) else item.tensor for item in self.inputs)
        return [*(tensor for tensor, *_ in self.saved), *inputs, *self.tensors]

    def _look_at_attributes(self, tensors: Sequence[Tensor]) -> None:
        """Look at what the Python attributes of tensors lead to, and those of the tensors that are found there."""
        seen = set(map(id, tensors))
        while tensors:
            for tensor in tensors:
                self._look_at_all(vars(tensor), "a tensor", 1)
            tensors = [tensor for tensor in self.reached() if id(tensor) not in seen]
            seen.update(map(id, tensors))
            if tensors:
                self.notes.append(TensorsNote(tensors))
        self.given = [item[0] for item in self.saved]

    # -- modules -------------------------------------------------------------------------------------------------

    def _found(self) -> Sequence[Module]:
        walked = whole_trees.again(self.roots[0]) if len(self.roots) == 1 else None
        if walked is not None:
            modules, self.module_notes, self.parts = walked
            return modules
        roots = self.roots
        modules = self._walk()
        if len(roots) == 1 and self.roots is roots and not self._has_found_more(modules):
            whole_trees.remember(roots[0], modules, self.module_notes)
        return modules

    def _has_found_more(self, modules: Iterable[Module]) -> bool:
        """Return whether there is more to say of these modules than their parts and notes do."""
        if self.scripts or self.generators or self.module_tensors or self.is_lazy or fences():
            return True
        return any(hasattr(type(module), "recompute_state") for module in modules)

    def _walk(self) -> list[Module]:
        found: dict[Module, None] = {}
        todo: list[Module | None] = []
        scripted: set[Module] = set()  # those inside of them are a part of their code
        count = 0
        outside = self.notes, self.tensors, self._specs
        self.notes, self.tensors, self._specs = self.module_notes, self.module_tensors, {}
        for hooks in filter(None, GLOBAL_FORWARD_HOOKS):
            self._look_at_hooks(hooks)
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
                facts = facts_of_class(type(module))
                if module._forward_hooks or module._forward_pre_hooks:
                    self._look_at_hooks(module._forward_pre_hooks)
                    self._look_at_hooks(module._forward_hooks)
                if facts.is_plain and _has_plain_attributes(module, facts):
                    continue
                if facts.is_scripted:
                    if module not in scripted:
                        self.scripts += (module,)
                    scripted.update(module.modules())
                    continue
                self.is_lazy = self.is_lazy or facts.is_lazy
                self._look_at_users_module(module, facts)
        if self._bindings:
            self._code()
        self.notes, self.tensors, self._specs = outside
        if len(found) > LARGE_TREE and not (self.scripts or self.is_lazy or fences()):
            _large_roots.update(root for root in self.roots if root._modules)
        return list(found)

    def _look_at_hooks(self, hooks: dict[int, Any]) -> None:
        """Note what functions and objects of the user's hold that are called before or after a module."""
        for hook in hooks.values():
            self._look(hook, "a hook", 1)

    def reach(self, module: Module) -> list[Found]:
        """Look at one module of a large tree, and at those that its attributes lead to.

        Returns:
            what was found of each that was not reached before.
        """
        reached = []
        todo = [module]
        while todo:
            inner = todo.pop()
            if id(inner) not in self._reached:
                self._reached[id(inner)] = inner
                walked = single_modules.again(inner)
                if walked is not None:
                    reached.append(Found(inner, walked.notes, parts=walked.parts))
                else:
                    found = Capture(_nothing, (), {})
                    found.look_at(inner)
                    reached.append(Found(inner, found.module_notes, found.module_tensors, found.generators))
                    todo += found.roots
                    if not (found.roots or found._has_found_more((inner,))):
                        single_modules.remember(inner, (inner,), found.module_notes)
                if getattr(inner, "_compiled_call_impl", None) is not None or "_orig_mod" in inner._modules:
                    todo += tree_of(inner)  # compiled code reads what is inside past all functions
        return reached

    def look_at(self, module: Module) -> None:
        """Note the attributes of one module, and nothing of its children."""
        self.modules = (module,)
        facts = facts_of_class(type(module))
        self.notes, self.tensors = self.module_notes, self.module_tensors
        if module._forward_hooks or module._forward_pre_hooks:
            self._look_at_hooks(module._forward_pre_hooks)
            self._look_at_hooks(module._forward_hooks)
        if not ((facts.is_plain and _has_plain_attributes(module, facts)) or facts.is_scripted):
            self._look_at_users_module(module, facts)
        if self._bindings:
            self._code()

    def _look_at_users_module(self, module: Module, facts: Any) -> None:
        if id(facts) not in self._specs:  # another module of its class may have been here
            self._specs[id(facts)] = facts
            self._look_at_code(type(module), facts)
        self._weak = True
        if facts.slots:
            self._slots(module, facts.slots, "")
        attributes = vars(module)
        for name in list(attributes):
            value = attributes[name]
            kind = type(value)
            if kind not in ATOMS and name not in _OF_EVERY_MODULE:
                if isinstance(value, Tensor):
                    self._state_of_module(value)
                elif kind is list and not facts.is_users and name in facts.attributes:
                    self.notes.append(ListNote(value))  # of parameters, as an LSTM has one: not to be looked into
                else:
                    if holds_iterator(value):
                        self.notes.append(NameNote(attributes, name))
                    self._look(value, f".{name}", 1)

    def _look_at_code(self, kind: type, facts: ClassFacts) -> None:
        """Note what the methods of a module's class read."""
        if facts.names:
            self._names(facts.names)
        if facts.bindings is not None:
            self._bindings += (facts.bindings,)
        for fn in facts.open:
            if id(fn) not in self._specs:
                self._made_of(fn, f"{kind.__name__}.{fn.__name__}", 1)
        self.scripts += facts.scripts
        if facts.is_users:
            self._class(kind)

    def look_into(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Note], Sequence[Tensor]]:
        """Return the notes and the tensors that the Python attributes of some tensors lead to."""
        found = Capture(_nothing, (), {})
        found.notes, found.tensors = found.module_notes, found.module_tensors
        found._look_at_attributes(tensors)
        if found._bindings:
            found._code()
        return found.module_notes, found.module_tensors

    def _state_of_module(self, tensor: Tensor) -> None:
        if tensor.grad_fn is None:
            self.module_tensors.append(tensor)

    # -- arguments -----------------------------------------------------------------------------------------------

    def spec_of(self, value: Any) -> Any:
        """Return the spec that a value got in this walk."""
        return self._specs.get(id(value), value)

    def _argument(self, value: Any, place: str) -> Any:
        kind: Any = type(value)
        spec: Any
        if kind in ATOMS:
            return value
        key = id(value)
        if key in self._specs:
            return self._specs[key]
        if isinstance(value, Tensor):
            return self._tensor_argument(value, place)
        if isinstance(value, tuple) and self._is_made_anew(value):
            items = [self._argument(item, f"{place}[{index}]") for index, item in enumerate(value)]
            spec = self._specs[key] = TupleInput(kind, items)
            return spec
        if is_iterator(kind):
            is_generator = kind is GeneratorType
            spec = self._specs[key] = GeneratorInput(value, place) if is_generator else IteratorInput(value)
            self._parts_of_iterator(value, place, _DEPTH_OF_ARGUMENTS)
            return spec
        self._look(value, place, _DEPTH_OF_ARGUMENTS)
        return value

    def _is_made_anew(self, value: tuple[Any, ...]) -> bool:
        """Return whether a recomputation needs another tuple: around copied iterators, or tensors that hooks move."""
        return holds_iterator(value) or (self.is_hooked and any(isinstance(item, Tensor) for item in value))

    def _tensor_argument(self, tensor: Tensor, place: str) -> Any:
        spec: Any
        if self.is_hooked:
            spec = tensor if self._is_state(tensor) else SavedInput(tensor)
        elif tensor.requires_grad and not self._is_state(tensor):
            spec = save_tensor(tensor, False)
        else:
            spec = tensor
        self._specs[id(tensor)] = spec
        if spec is not tensor:
            self.saved.append((tensor, spec, tensor._version))
        else:
            self._tensor(tensor, place)
        return spec

    # -- what is held where it is --------------------------------------------------------------------------------

    @staticmethod
    def _is_state(tensor: Tensor) -> bool:
        """Return whether a copy of the tensor is kept, for the case that somebody writes to it."""
        if type(tensor) in UNINITIALIZED:
            return False
        if tensor.requires_grad:
            return tensor.is_inference()
        if tensor.is_inference() or (tensor.ndim == 1 and tensor.is_floating_point()):
            return True
        return tensor.layout is torch.strided and (tensor.nbytes <= SMALL_BYTES or is_known_written(tensor))

    def _tensor(self, tensor: Tensor, place: str) -> None:
        if self._is_state(tensor):
            self.tensors.append(tensor)
        else:
            kept = WeakTensor(tensor) if self._weak and tensor.grad_fn is not None else tensor
            self.inputs.append(Input(kept, tensor._version, place))

    def _look(self, value: Any, place: str, depth: int) -> None:
        """Note what `value` holds, and look at its parts."""
        kind = type(value)
        key = id(value)
        if kind in ATOMS or key in self._specs:
            return
        self._specs[key] = value
        if isinstance(value, Tensor):
            if self.notes is self.module_notes:
                self._state_of_module(value)
            else:
                self._tensor(value, place)
        elif isinstance(value, Module):
            self.roots += (value,)
        elif isinstance(value, tuple):
            for index, item in enumerate(tuple.__iter__(value)):
                if type(item) not in ATOMS:
                    self._look(item, f"{place}[{index}]", depth)
            if kind is not tuple:
                self._attributes_of_a_container(value, kind, place, depth)
        elif isinstance(value, (list, dict, deque)):
            self._container(value, kind, place, depth)
        elif isinstance(value, set):
            self.notes.append(SetNote(value, weak=self._weak))
            if kind is not set:
                self._attributes_of_a_container(value, kind, place, depth)
        elif kind is FunctionType:
            if depth >= 0:
                self._function(value, place, depth)
        elif callable(value) and kind is not type and not isinstance(value, type):
            self._callable(value, kind, place, depth)
        elif isinstance(value, type):
            self._class(value)
        elif is_random_source(value, kind):
            self.generators += (value,)
        elif is_small_array(value):
            self.notes.append(ArrayNote(value))
        elif isinstance(value, array):
            if value.itemsize * len(value) <= SMALL_BYTES:
                self.notes.append(NumbersNote(value))
        elif kind in _BUFFERS:
            self._buffer(value, kind, place, depth)
        elif is_iterator(kind):
            self._parts_of_iterator(value, place, depth)
        elif isinstance(value, Enum):
            self._class(kind)
        else:
            self._object(value, kind, place, depth)

    def _buffer(self, value: Any, kind: type, place: str, depth: int) -> None:
        """Note the contents of a buffer or an in-memory stream, if they are small."""
        if kind is memoryview:
            with contextlib.suppress(ValueError):  # it has been released
                self._look(value.obj, place, depth)
        elif kind is bytearray:
            if len(value) <= SMALL_BYTES:
                self.notes.append(BytesNote(value))
        elif not value.closed:
            position = value.tell()
            length = value.seek(0, io.SEEK_END)
            value.seek(position)
            if length <= SMALL_BYTES:
                self.notes.append(StreamNote(value))

    def _parts_of_iterator(self, value: Any, place: str, depth: int) -> None:
        """Note the containers that an iterator goes through, and the functions that it calls."""
        for part in parts_of(value):
            if type(part) not in ATOMS:
                self._look(part, place, depth)

    def _container(self, value: Any, kind: type, place: str, depth: int) -> None:
        if (len(value) if kind is list or kind is dict else length_of(value)) > LARGEST:
            self.notes.append(LengthNote(value))
            return
        note = (DictNote if isinstance(value, dict) else ListNote)(value, weak=self._weak)
        self.notes.append(note)
        items = value.items() if kind is dict else enumerate(value) if kind is list else note.items()
        for index, item in items:
            if type(item) not in ATOMS:
                item = item.reference() if type(item) is WeakTensor else item
                self._look(item, f"{place}[{index!r}]" if kind in (dict, list) else f"{place}{index}", depth)
        if kind not in (list, dict, deque, OrderedDict):
            self._attributes_of_a_container(value, kind, place, depth)

    def _attributes_of_a_container(self, value: Any, kind: type, place: str, depth: int) -> None:
        """Note the attributes of an object of a subclass of a container's, if it has any."""
        if namespace_of(value) is not None or slots_of(kind):
            self._attributes(value, place, depth)

    def _object(self, value: Any, kind: type, place: str, depth: int) -> None:
        is_data = hasattr(kind, "__dataclass_fields__")
        if (depth <= 0 and not is_data) or not is_plain(kind) or self._objects >= _MOST_OBJECTS:
            return
        self._objects += 1
        self._attributes(value, place, depth if is_data else depth - 1)
        self._class(kind)

    def _attributes(self, value: Any, place: str, depth: int) -> None:
        """Note the attributes of an object, and look at them."""
        parts: list[Note] = [KindNote(value)]
        namespace = namespace_of(value)
        if namespace is not None:
            parts.append(DictNote(namespace, weak=self._weak))
        self.notes += parts
        if namespace is not None:
            self._look_at_all(namespace, place, depth)
        names = slots_of(type(value))
        if names:
            self._slots(value, names, place, depth)

    def _slots(self, value: Any, names: tuple[str, ...], place: str, depth: int = 1) -> None:
        """Note the slots of an object, and look at them."""
        note = SlotsNote(value, names, weak=self._weak)
        self.notes.append(note)
        self._look_at_all(note.filled(), place, depth)

    def _look_at_all(self, attributes: dict[str, Any], place: str, depth: int) -> None:
        for name, item in list(attributes.items()):
            if type(item) not in ATOMS:
                self._look(item, f"{place}.{name}", depth)

    def _class(self, kind: type) -> None:
        """Note the attributes of a class and of those it is derived from, and look at them."""
        for base in users_classes(kind):
            if (key := ("class", id(base))) not in self._specs:
                self._specs[key] = base
                self.notes.append(ClassNote(base))
                if issubclass(base, Enum):
                    self._members(base)
                else:
                    self._state_of_class(base)

    def _state_of_class(self, kind: type) -> None:
        """Look at the attributes of a class, but for the functions in containers: mostly these are registries."""
        attributes = vars(kind)
        for name in names_of_state(tuple(attributes), tuple(map(type, attributes.values()))):
            value = attributes[name]
            self._look(value, f"{kind.__name__}.{name}", -1 if isinstance(value, (list, dict, deque, tuple)) else 1)

    def _members(self, kind: type[Enum]) -> None:
        """Note the attributes of the members of an enum, and look at them."""
        members = list(kind.__members__.values())
        self.notes.append(TensorsNote(members))
        for member in members:
            self._look_at_all(vars(member), f"{kind.__name__}.{member.name}", 1)

    # -- functions -----------------------------------------------------------------------------------------------

    def _callable(self, fn: Any, kind: type, place: str, depth: int) -> None:
        if kind is MethodType:
            self._look(fn.__func__, place, depth)
            self._look(fn.__self__, f"{place}.__self__", depth)
        elif kind is BuiltinFunctionType:
            if isinstance(fn.__self__, (Tensor, list, dict, deque, set)):
                self._look(fn.__self__, f"{place}.__self__", depth)
        elif issubclass(kind, functools.partial):
            if holds_iterator(fn.args):
                self.notes.append(PartialNote(fn))
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
        facts = facts_of_code.get(id(fn.__code__)) or find_facts(fn)
        if facts.bindings is not None:
            facts = current_facts(fn)
            if facts.bindings is not None:
                self._bindings += (facts.bindings,)
        if facts.names:
            self._names(facts.names)
        if facts.scripts:
            self.scripts += facts.scripts
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
                    self._made_of(fn, fn.__name__, 1)
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
                for key, item in contents.items() if kind is not list else enumerate(contents):
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
            spec = self._specs[id(tensor)] = SavedInput(tensor)
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
                self._look(value, name, 1)


LARGE_TREE = 64
"""The number of modules up to which all of them are noted for every region."""

_large_roots: WeakSet[Module] = WeakSet()


def _is_large(root: Module) -> bool:
    return root in _large_roots


def _nothing() -> None:
    return None


_OF_EVERY_MODULE = frozenset(Module().__dict__)
_OF_PLAIN_MODULES = ATOMS | {tuple, dict, OrderedDict, set}  # registries are dicts, and names are in a set


def _has_plain_attributes(module: Module, facts: ClassFacts) -> bool:
    """Return whether a module of torch's has no attributes but those that its class gives it, and no tensor among them."""
    attributes = vars(module)
    return attributes.keys() <= facts.attributes and _OF_PLAIN_MODULES.issuperset(map(type, attributes.values()))
