"""The one walk over what a function reaches: objects whose contents count, tensors, modules, random number generators.

`_WAYS`, at the end, is the table from the class of an object to what is inside of it. The walk ends at a stated depth and
size, since a trainer and its vocabulary are reachable too. Recomputations use what lies beyond as it is then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, ContextVar
from enum import Enum
from itertools import chain, filterfalse
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from weakref import ReferenceType

from torch import Tensor
from torch.jit import ScriptFunction
from torch.nn import Module
from torch.optim import Optimizer

from reactivate._snapshot import holders as holding
from reactivate._snapshot.bindings import Bindings, CodeHolder
from reactivate._snapshot.byte_holders import ArrayHolder, holder_of_bytes
from reactivate._snapshot.cached_results import CACHED, ResultsHolder, results_in
from reactivate._snapshot.caches import cached_by_class
from reactivate._snapshot.facts import Facts, called_members, current_facts, facts_of, names_in_module
from reactivate._snapshot.held import ATOMS, WeakTensor, restored
from reactivate._snapshot.holders import EMPTY, LARGEST, Holder, contents_of, length_of
from reactivate._snapshot.inputs import Input
from reactivate._snapshot.iterators import holds_iterator, is_iterator, parts_of
from reactivate._snapshot.kinds import (
    BUFFERS,
    PROXIES,
    SMALL_BYTES,
    SPECIAL_METHODS,
    Slot,
    behind_proxy,
    derived_from,
    is_array,
    is_callable,
    is_dataclass,
    is_installed,
    is_plain,
    is_random_source,
    is_value,
    may_be_state,
    namespace_of,
    slots_of,
    users_classes,
)
from reactivate._snapshot.large_containers import LengthHolder
from reactivate._snapshot.module_access import OBSERVED_FUNCTIONS
from reactivate._snapshot.region_calls import handed_out, is_of_call
from reactivate._snapshot.shadows import is_state
from reactivate._snapshot.unseen_writes import ReachedCode
from reactivate._torch.autograd import has_graph
from reactivate._torch.dynamo import compiled_function

# Into plain objects, not containers and dataclasses. A closure, a bound `self` or an attribute leads to half the program.
DEPTH_OF_ARGUMENTS = 4
DEPTH = 2
_MOST_NESTED = 64  # in each other: a state that refers to the one before grows by one with each step
_MOST_ITEMS = 1 << 17  # of all containers
_MOST_OBJECTS = 256  # of each depth, so that those that are near are not left out for those that are far


class Walk:
    """One walk.

    Attributes:
        holders: the objects whose contents count, in the order in which they are rewound.
        inputs: tensors that are read where they are, and are not state.
        tensors: tensors without a graph, of which a copy is kept.
        roots, generators: the outermost modules and the sources of randomness found.
        scripts: scripted functions and modules, also those that the modules' code names.
        asked: names that modules ask objects for.
        seen: {id: the value, or its substitute in a recomputation}. Keys of names and classes have more than an id.
        code: the functions and classes found.
        is_lazy: whether a module creates parameters in its first call.
        is_settled: whether a walk finds the same again as long as the holders and modules hold what they hold.
        left_out: descriptions of objects that are not restored, for a message; None if no message needs them.
    """

    is_of_modules = is_lazy = False
    is_settled = _follows_functions = True
    roots: tuple[Module, ...] = ()
    scripts: tuple[Any, ...] = ()
    generators: tuple[Any, ...] = ()
    left_out: list[str] | None = None
    asked: frozenset[str] = frozenset()
    _nesting = _items = 0
    _bindings: tuple[Bindings, ...] = ()
    _functions: holding.FunctionsHolder | None = None

    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.inputs: list[Input] = []
        self.tensors: list[Tensor] = []
        self.code = ReachedCode()
        self.seen: dict[Any, Any] = {}
        self._objects: dict[int, int] = {}  # how many at each depth

    def look(self, value: Any, place: str, depth: int) -> None:
        """Note what `value` holds, and look at its parts."""
        kind = type(value)
        if kind not in ATOMS and id(value) not in self.seen:
            if self._nesting >= _MOST_NESTED:
                self._leave_out(value, place, "too deep")
                return
            self._nesting += 1
            _way_of(kind)(self, value, kind, place, depth)
            self._nesting -= 1

    def finish(self) -> None:
        """Note the functions that code names and the methods that it asks for, and look at what they lead to."""
        looked_at = 0
        while self._bindings or looked_at < len(self.code.classes) + len(self.code.functions):
            looked_at = len(self.code.classes) + len(self.code.functions)
            asked = SPECIAL_METHODS | self.asked | self.code.asked() if self.code.classes else SPECIAL_METHODS
            for kind in filterfalse(is_installed, self.code.classes):
                is_named = ("named", id(kind)) in self.seen
                for name, member in called_members(kind, asked, is_named=is_named):
                    self.look(member, f"{kind.__name__}.{name}", DEPTH)
            self._look_at_bindings()

    def _look_at_bindings(self) -> None:
        while self._bindings:  # of functions in closures there may be more
            holder = CodeHolder(self._bindings)
            self._bindings = ()
            self.holders.append(holder)
            for fn in holder.open:
                if id(fn) not in self.seen:
                    self._made_of(fn, fn.__name__, DEPTH)

    def tensor(self, tensor: Tensor, place: str) -> None:
        """Note a tensor: as state, or as one that is read where it is."""
        if is_state(tensor):
            self.tensors.append(tensor)
        else:
            kept = WeakTensor(tensor) if has_graph(tensor) else tensor
            self.inputs.append(Input(kept, tensor._version, place, not tensor.requires_grad))

    def _tensor(self, value: Tensor, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        self.tensor(value, place)

    def look_at_attributes(self, tensors: Sequence[Tensor]) -> None:
        """Look at what the Python attributes of tensors lead to, and those of the tensors that are found there."""
        seen = set(map(id, tensors))
        while tensors:
            for tensor in tensors:
                self._look_at_all(vars(tensor), "a tensor", DEPTH)
            tensors = [tensor for tensor in self.reached() if id(tensor) not in seen]
            seen.update(map(id, tensors))
            if tensors:
                self.holders.append(holding.AttributesHolder(tensors))

    def reached(self) -> list[Tensor]:
        """Return every tensor found that is no module's."""
        return [*(restored(item.tensor) for item in self.inputs), *self.tensors]

    def _proxy(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.look(behind_proxy(value), place, depth)

    def _module(self, value: Module, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        self.roots += (value,)

    def _tuple(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        self._look_at_items(tuple.__iter__(value), tuple.__len__(value), place, depth)
        if kind is not tuple:
            self._attributes_of_a_container(value, kind, place, depth)

    def _container(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        length = len(value) if kind is list or kind is dict else length_of(value)
        self._items += length
        if length > LARGEST or self._items > _MOST_ITEMS:
            self.holders.append(LengthHolder(value))
            self._leave_out(value, place, "too large")
            if kind not in (list, dict, deque, OrderedDict):
                self._attributes_of_a_container(value, kind, place, depth)
            return
        holder = (holding.DictHolder if isinstance(value, dict) else holding.ListHolder)(value)
        self.holders.append(holder)
        self._look_into(holder, place, depth)
        if isinstance(value, dict) and not ATOMS.issuperset(map(type, dict.keys(value))):
            self._look_at_items(dict.keys(value), 0, place, depth)
        if kind not in (list, dict, deque, OrderedDict):
            if issubclass(kind, defaultdict):
                self._slots(value, holding.FACTORY, place, depth)
            self._attributes_of_a_container(value, kind, place, depth)

    def _look_into(self, holder: Holder, place: str, depth: int) -> None:
        contents = holder.get()
        if not ATOMS.issuperset(map(type, contents)):  # a list of numbers may be long
            for written, item in holder.items(contents):
                self.look(item, place + written, depth)

    def _set(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        if issubclass(kind, set):
            self.holders.append(holding.SetHolder(value))
        base: Any = set if issubclass(kind, set) else frozenset  # past methods that a subclass overrides
        self._look_at_items(base.__iter__(value), base.__len__(value), place, depth)
        if kind is not set and kind is not frozenset:
            self._attributes_of_a_container(value, kind, place, depth)

    def _look_at_items(self, items: Iterable[Any], count: int, place: str, depth: int) -> None:
        self._items += count
        for index, item in enumerate(items if self._items <= _MOST_ITEMS else ()):
            if type(item) not in ATOMS:
                self.look(item, f"{place}[{index}]", depth)

    def _attributes_of_a_container(self, value: Any, kind: type, place: str, depth: int) -> None:
        """Note the attributes of an object of a subclass of a container's, if it has any, and the class."""
        self._class(kind)
        if namespace_of(value) is not None or slots_of(kind):
            self._attributes(value, place, depth)

    def _random_source(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        self.generators += (value,)
        self._attributes_of_a_container(value, kind, place, depth)

    def _array(self, value: Any, kind: type, place: str, depth: int) -> None:
        if value.nbytes > SMALL_BYTES:
            self.is_settled = False
            self._object(value, kind, place, depth)
            return
        self.seen[id(value)] = value
        self.holders.append(ArrayHolder(value))
        if value.dtype.hasobject:
            self._look_at_items(value.flat, 0, place, depth)
        self._attributes_of_a_container(value, kind, place, depth)

    def _buffer(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        if kind is memoryview:
            with contextlib.suppress(ValueError):  # it has been released
                self.look(value.obj, place, depth)
        elif (found := holder_of_bytes(value, kind)) is not None:
            holder, nbytes = found
            if nbytes <= SMALL_BYTES:
                self.holders.append(holder(value))
            else:
                self.is_settled = False
                self._leave_out(value, place, "too large")
        if kind not in BUFFERS:
            self._attributes_of_a_container(value, kind, place, depth)

    def _iterator(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        self.look_at_iterator(value, place, depth)

    def look_at_iterator(self, value: Any, place: str, depth: int) -> None:
        """Look at what an iterator is made of."""
        for part in parts_of(value):
            if type(part) not in ATOMS:
                self.look(part, place, depth)

    def _context_variable(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        # What it is set to is looked at with all of the context; it may have no default.
        with contextlib.suppress(LookupError):
            self.look(Context().run(value.get), f"{place}.get()", depth)

    def _object(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        is_data = is_dataclass(kind)
        if not is_plain(kind):
            self._leave_out(value, place, "too large" if hasattr(value, "nbytes") else "not made of Python attributes")
        elif depth <= 0 and not is_data:
            self._leave_out(value, place, "too deep")
        elif self._objects.get(depth, 0) >= _MOST_OBJECTS:
            self._leave_out(value, place, "one of too many")
        else:
            self._objects[depth] = self._objects.get(depth, 0) + 1
            self._attributes(value, place, depth if is_data else depth - 1)
            self._class(kind)

    def _optimizer(self, value: Optimizer, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        self.holders += [holding.ListHolder(value.param_groups), *map(holding.DictHolder, value.param_groups)]
        for parameter in chain.from_iterable(group["params"] for group in value.param_groups):
            self.look(parameter, f"{place}.param_groups", depth)

    def _leave_out(self, value: Any, place: str, reason: str) -> None:
        is_known = is_value(type(value)) or str(type(value).__module__).startswith(("reactivate.", "torch._C"))
        if self.left_out is not None and not is_known:
            self.left_out.append(f"`{place}` ({type(value).__name__}: {reason})")

    def _attributes(self, value: Any, place: str, depth: int) -> None:
        """Note the attributes of an object, and look at them."""
        self.holders.append(holding.KindHolder(value))
        namespace = namespace_of(value)
        if namespace is not None:
            self.holders.append(holding.DictHolder(namespace))
            self._look_at_all(namespace, place, depth)
        if slots := slots_of(type(value)):
            self._slots(value, slots, place, depth)

    def _slots(self, value: Any, slots: tuple[Slot, ...], place: str, depth: int) -> None:
        """Note the slots of an object, and look at them."""
        holder = holding.SlotsHolder(value, slots)
        self.holders.append(holder)
        for (name, _), item in zip(slots, holder.get()):
            self._look_at_all({name: item}, place, depth)

    def _look_at_all(self, attributes: dict[str, Any], place: str, depth: int) -> None:
        for name, item in zip([*attributes], [*attributes.values()]):  # at once: a dying reference may change it
            if type(item) not in ATOMS and item is not EMPTY and not (handed_out and is_of_call(name)):
                self.look(item, f"{place}.{name}", depth)

    def _class_or_member(self, value: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(value)] = value
        self._class(value if isinstance(value, type) else kind, is_named=isinstance(value, type))

    def _class(self, kind: type, *, is_named: bool = False) -> None:
        """Note the attributes of a class and of those it is derived from, and look at them."""
        for base in users_classes(kind):
            if is_named:
                self.seen["named", id(base)] = base
            if (key := ("class", id(base))) not in self.seen:
                self.seen[key] = base
                self.holders.append(holding.ClassHolder(base))
                self.code.classes += (base,)
                if issubclass(base, Enum):
                    members = list(base.__members__.values())
                    self.holders.append(holding.AttributesHolder(members))
                    for member in members:
                        self._look_at_all(vars(member), f"{base.__name__}.{member.name}", DEPTH)
                else:
                    self._state_of_class(base)
                if type(base) is not type:
                    self._class(type(base))

    def _state_of_class(self, kind: type) -> None:
        """Look at the attributes of a class, but for the functions in containers: mostly these are registries."""
        attributes, follows = vars(kind), self._follows_functions
        for name in [*attributes]:
            value = attributes[name]
            if may_be_state(type(value)) and not name.startswith("__"):
                self._follows_functions = follows and not isinstance(value, (list, dict, deque, tuple))
                self.look(value, f"{kind.__name__}.{name}", DEPTH)
                self._follows_functions = follows

    # -- functions ----------------------------------------------------------------------------------------------------

    def _callable(self, fn: Any, kind: type, place: str, depth: int) -> None:
        self.seen[id(fn)] = fn
        if kind is MethodType:
            self.look(fn.__func__, place, depth)
            self.look(fn.__self__, f"{place}.__self__", depth)
        elif kind is BuiltinFunctionType or kind is MethodWrapperType:
            if not isinstance(fn.__self__, ModuleType):  # whose functions they are
                self.look(fn.__self__, f"{place}.__self__", depth)
        elif issubclass(kind, functools.partial):
            if fn.__dict__ or self.is_of_modules or holds_iterator(fn.args):
                self.holders.append(holding.PartialHolder(fn))
                self._look_at_all(fn.__dict__, place, depth)
            self.look(fn.func, f"{place}.func", depth)
            self.look(fn.args, f"{place}.args", depth)
            self.look(fn.keywords, f"{place}.keywords", depth)
        elif kind is ScriptFunction:
            self.scripts += (fn,)
        elif isinstance(fn, ReferenceType):
            self.look(fn(), place, depth)
        else:
            self._object(fn, kind, place, depth)
            results = results_in(fn) if kind is CACHED else None
            if results is not None and id(results) not in self.seen:
                self.seen[id(results)] = results
                is_large = len(results) > LARGEST
                self.holders.append(LengthHolder(results) if is_large else ResultsHolder(results))
                for result in () if is_large else results.values():
                    if not isinstance(result, Tensor):
                        self.look(result, place, depth)
            if inspect.getattr_static(kind, "__wrapped__", None) is not None:  # ours, which are not looked into
                self.look(fn.__wrapped__, place, depth)
            call = inspect.getattr_static(kind, "__call__")
            if type(call) is FunctionType:
                self.look(call, place, depth)

    def _function(self, fn: FunctionType, kind: type, place: str, depth: int) -> None:
        self.seen[id(fn)] = fn
        if self._follows_functions and fn not in OBSERVED_FUNCTIONS:
            self.function(fn, place, depth)

    def function(self, fn: FunctionType, place: str, depth: int) -> None:
        """Note what a function consists of and what its code reads, and look at that."""
        facts = facts_of(fn)
        if facts.bindings is not None:
            facts = current_facts(fn)
            if facts.bindings is not None:
                self._bindings += (facts.bindings,)
        if facts.names:
            self._names(facts.names)
        if facts.scripts:
            self.scripts += facts.scripts
        self.code.functions += (facts,)
        compiled = compiled_function(fn)
        if compiled is not None:
            self.look(compiled, place, depth)
        else:
            self._made_of(fn, place, depth, facts)

    def _made_of(self, fn: FunctionType, place: str, depth: int, facts: Facts | None = None) -> None:
        """Note what a function consists of, and look at that."""
        self.seen[id(fn)] = fn
        if self._functions is None:
            self._functions = holding.FunctionsHolder([])
            self.holders.append(self._functions)
        self._functions.target.append(fn)
        if fn.__closure__ is not None:
            facts = facts or current_facts(fn)
            for cell, name in zip(fn.__closure__, fn.__code__.co_freevars):
                if id(cell) not in self.seen and name != "__class__":
                    self.seen[id(cell)] = cell
                    if name in facts.overwritten and issubclass(type(contents_of(cell)), Tensor):
                        # No input: kept as one, it would chain the calls' graphs.
                        self.holders.append(holding.CellHolder(cell))
                    else:
                        self._cell(cell, f"{place} (closed over as `{name}`)", depth, facts)
        if fn.__defaults__ is not None:
            self.look(fn.__defaults__, f"{place} (defaults)", depth)
        if fn.__kwdefaults__ is not None:
            self.look(fn.__kwdefaults__, f"{place} (defaults)", depth)
        if fn.__dict__:
            self._look_at_all(fn.__dict__, place, depth)

    def _cell(self, cell: CellType, place: str, depth: int, facts: Facts) -> None:
        contents = contents_of(cell)
        kind = type(contents)
        if issubclass(kind, Tensor):
            self.cell_tensor(cell, contents, place)
        elif kind in (list, dict, OrderedDict) and len(contents) <= LARGEST:
            holder = holding.CellContainerHolder(cell)
            self.holders.append(holder)
            if id(contents) not in self.seen:
                self.seen[id(contents)] = contents
                self._look_into(holder, place, depth)
        else:
            self.holders.append(holding.CellHolder(cell))
            if kind is ModuleType:
                self._names(names_in_module(contents, facts.attributes))
            elif contents is not EMPTY:
                self.look(contents, place, depth)

    def cell_tensor(self, cell: CellType, tensor: Tensor, place: str) -> None:
        """Note a closed-over tensor."""
        self.holders.append(holding.CellHolder(cell))
        if id(tensor) not in self.seen:
            self.look(tensor, place, 0)

    def _names(self, names: tuple[tuple[dict[str, Any], str], ...]) -> None:
        for namespace, name in names:
            key = id(namespace), name
            if key not in self.seen:
                self.seen[key] = namespace
                self.holders.append(holding.NameHolder(namespace, name))
                self.look(namespace.get(name), name, DEPTH)


_Way = Callable[[Walk, Any, Any, str, int], None]


@cached_by_class
def _way_of(kind: type) -> _Way:
    """Return the method that looks at objects of a class."""
    return next(way for is_of_this_kind, way in _WAYS if is_of_this_kind(kind))


_WAYS: tuple[tuple[Callable[[type], bool], _Way], ...] = (
    (PROXIES.__contains__, Walk._proxy),
    (derived_from(Tensor), Walk._tensor),
    (derived_from(Module), Walk._module),
    (derived_from(tuple), Walk._tuple),
    (derived_from(list, dict, deque), Walk._container),
    (derived_from(set, frozenset), Walk._set),
    (derived_from(FunctionType), Walk._function),
    (derived_from(type), Walk._class_or_member),
    (derived_from(Optimizer), Walk._optimizer),
    (derived_from(Enum), Walk._class_or_member),
    (is_random_source, Walk._random_source),
    (is_array, Walk._array),
    (derived_from(*BUFFERS), Walk._buffer),
    (is_callable, Walk._callable),
    (is_iterator, Walk._iterator),
    (derived_from(ContextVar), Walk._context_variable),
    (derived_from(object), Walk._object),
)
"""What an object's class tells, and the method that looks at it: the first row that fits counts (an enum may be callable)."""
