"""A walk over what a function can reach: notes of what mutable objects hold, and the tensors among them.

It ends at a stated depth and size: a trainer and its vocabulary are reachable too, and what lies beyond is used as it is, as
without this library.
"""

from __future__ import annotations

import contextlib
import io
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextvars import ContextVar, copy_context
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ProxyTypes

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._engine.inputs.kinds import (
    SMALL_BYTES,
    is_plain,
    is_random_source,
    is_small_array,
)
from reactivate._engine.inputs.unseen_writers import ReachedCode
from reactivate._engine.state.attributes import KindNote, SlotsNote, TensorsNote, namespace_of, slots_of
from reactivate._engine.state.buffers import ArrayNote, BytesNote, NumbersNote, StreamNote
from reactivate._engine.state.contents import (
    ATOMS,
    LARGEST,
    DictNote,
    LengthNote,
    ListNote,
    Note,
    SetNote,
    length_of,
    pairs_in,
)
from reactivate._engine.state.held import WeakTensor
from reactivate._engine.state.iterators import is_iterator, parts_of
from reactivate._engine.state.modules import UNINITIALIZED
from reactivate._engine.state.shadows import is_known_written

# How deep plain objects (not containers, not dataclasses) are looked into. An argument is data by intent, perhaps a cache
# of layers of tensors. A closure, a bound `self` or an attribute leads to half the program.
DEPTH_OF_ARGUMENTS = 4
DEPTH = 2
_MOST_OBJECTS = 256  # of each depth, so that those that are near are not left out for those that are far
_PROXIES = frozenset(ProxyTypes)
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


class Walk:
    """One walk.

    Attributes:
        saved: (tensor, its spec, version) of the tensors that autograd keeps.
        inputs: tensors that are read where they are, and are not state.
        tensors: tensors without a graph, of which a copy is kept.
        notes: what mutable objects hold.
        roots: the outermost modules found.
        scripts: scripted functions and modules, also those that the modules' code names.
        generators: the sources of randomness found, also in the attributes of modules.
        module_notes, module_tensors: as `notes` and `tensors`, of what attributes of modules lead to.
        code: the functions and classes found.
        left_out: where what is not noted was found, and what that is, for a message; None if nobody asks.
    """

    roots: tuple[Module, ...] = ()
    scripts: tuple[Any, ...] = ()
    generators: tuple[Any, ...] = ()
    left_out: list[str] | None = None
    _follows_functions = True

    def __init__(self) -> None:
        self.saved: list[tuple[Tensor, Any, int]] = []
        self.inputs: list[Input] = []
        self.tensors: list[Tensor] = []
        self.notes: list[Note] = []
        self.module_notes: list[Note] = []
        self.module_tensors: list[Tensor] = []
        self.code = ReachedCode()
        self._specs: dict[Any, Any] = {}  # by the id of the value; of names and classes by more
        self._objects = [0] * (DEPTH_OF_ARGUMENTS + 1)  # at each depth
        self._weak = True

    def may_write_unseen(self) -> bool:
        """Return whether code that was found may write to tensors without a new version."""
        return self.code.may_write_unseen()

    def reached(self) -> list[Tensor]:
        """Return every tensor found that is no module's."""
        inputs = (item.tensor.get() if isinstance(item.tensor, WeakTensor) else item.tensor for item in self.inputs)
        return [*(tensor for tensor, *_ in self.saved), *inputs, *self.tensors]

    def found(self, kinds: type | tuple[type, ...]) -> list[Any]:
        """Return every object of some classes that the walk came to, whether or not it looked into it."""
        return [item for item in self._specs.values() if isinstance(item, kinds)]

    def _look_at_attributes(self, tensors: Sequence[Tensor]) -> None:
        """Look at what the Python attributes of tensors lead to, and those of the tensors that are found there."""
        seen = set(map(id, tensors))
        while tensors:
            for tensor in tensors:
                self._look_at_all(vars(tensor), "a tensor", DEPTH)
            tensors = [tensor for tensor in self.reached() if id(tensor) not in seen]
            seen.update(map(id, tensors))
            if tensors:
                self.notes.append(TensorsNote(tensors))

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
        if kind in _PROXIES:
            with contextlib.suppress(ReferenceError):  # nothing is left of what it stands for
                self._look(value.__repr__.__self__, place, depth)
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
            if self._follows_functions:
                self._function(value, place, depth)
        elif callable(value) and kind is not type and not isinstance(value, type):
            self._callable(value, kind, place, depth)
        elif isinstance(value, type):
            self._class(value)
        elif is_random_source(value, kind):
            self.generators += (value,)
            self._attributes_of_a_container(value, kind, place, depth)
        elif is_small_array(value):
            self.notes.append(ArrayNote(value))
            self._parts_of_array(value, kind, place, depth)
        elif isinstance(value, array):
            if value.itemsize * len(value) <= SMALL_BYTES:
                self.notes.append(NumbersNote(value))
            else:
                self._leave_out(value, place, "too large")
        elif kind in _BUFFERS:
            self._buffer(value, kind, place, depth)
        elif is_iterator(kind):
            self._parts_of_iterator(value, place, depth)
        elif isinstance(value, Enum):
            self._class(kind)
        elif kind is ContextVar:
            if value not in copy_context():  # what it is set to is looked at with all of the context
                with contextlib.suppress(LookupError):  # it has no default
                    self._look(value.get(), f"{place}.get()", depth)
        else:
            self._object(value, kind, place, depth)

    def _parts_of_array(self, value: Any, kind: type, place: str, depth: int) -> None:
        """Look at the objects in an array, and at its attributes if it is of a class of the user's."""
        if value.dtype.hasobject:
            for item in value.flat:
                if type(item) not in ATOMS:
                    self._look(item, place, depth)
        self._attributes_of_a_container(value, kind, place, depth)

    def _buffer(self, value: Any, kind: type, place: str, depth: int) -> None:
        """Note the contents of a buffer or an in-memory stream, if they are small."""
        if kind is memoryview:
            with contextlib.suppress(ValueError):  # it has been released
                self._look(value.obj, place, depth)
        elif kind is bytearray:
            if len(value) <= SMALL_BYTES:
                self.notes.append(BytesNote(value))
            else:
                self._leave_out(value, place, "too large")
        elif not value.closed:
            position = value.tell()
            length = value.seek(0, io.SEEK_END)
            value.seek(position)
            if length <= SMALL_BYTES:
                self.notes.append(StreamNote(value))
            else:
                self._leave_out(value, place, "too large")

    def _parts_of_iterator(self, value: Any, place: str, depth: int) -> None:
        """Note the containers that an iterator goes through, and the functions that it calls."""
        for part in parts_of(value):
            if type(part) not in ATOMS:
                self._look(part, place, depth)

    def _container(self, value: Any, kind: type, place: str, depth: int) -> None:
        if (len(value) if kind is list or kind is dict else length_of(value)) > LARGEST:
            self.notes.append(LengthNote(value))
            self._leave_out(value, place, "too large")
            return
        note = (DictNote if isinstance(value, dict) else ListNote)(value, weak=self._weak)
        self.notes.append(note)
        items = pairs_in(value) if kind in (dict, list) else note.items()
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
        if not is_plain(kind):
            self._leave_out(value, place, "too large" if hasattr(value, "nbytes") else "not made of Python attributes")
            return
        if depth <= 0 and not is_data:
            self._leave_out(value, place, "too deep")
            return
        if self._objects[depth] >= _MOST_OBJECTS:
            self._leave_out(value, place, "one of too many")
            return
        self._objects[depth] += 1
        self._attributes(value, place, depth if is_data else depth - 1)
        self._class(kind)

    def _leave_out(self, value: Any, place: str, reason: str) -> None:
        if self.left_out is not None and not type(value).__module__.startswith(("reactivate.", "torch._C")):
            self.left_out.append(f"`{place}` ({type(value).__name__}: {reason})")

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

    def _slots(self, value: Any, names: tuple[str, ...], place: str, depth: int) -> None:
        """Note the slots of an object, and look at them."""
        note = SlotsNote(value, names, weak=self._weak)
        self.notes.append(note)
        self._look_at_all(note.filled(), place, depth)

    def _look_at_all(self, attributes: dict[str, Any], place: str, depth: int) -> None:
        for name, item in pairs_in(attributes):
            if type(item) not in ATOMS:
                self._look(item, f"{place}.{name}", depth)

    def _class(self, kind: type) -> None:
        """Note the attributes of a class and of those it is derived from, and look at them."""
        raise NotImplementedError

    def _function(self, fn: FunctionType, place: str, depth: int) -> None:
        """Note what a function consists of and what its code reads, and look at that."""
        raise NotImplementedError

    def _callable(self, fn: Any, kind: type, place: str, depth: int) -> None:
        """Look at what an object that can be called consists of."""
        raise NotImplementedError

    def _state_of_module(self, tensor: Tensor) -> None:
        if tensor.grad_fn is None:
            self.module_tensors.append(tensor)

    def _stored(self, tensor: Tensor, place: str) -> Any:
        """Hand a tensor that an op has computed, at a place, to the storage for inputs; None if it stays where it is."""
        return None
