"""One walk over a function and its arguments: what a recomputation will read, noted as the forward begins.

The recomputation calls the same function with the same objects. The walk notes what mutable ones hold (see
`state/contents`), so that they can be rewound in place; which tensors must not change, or are state of which a copy is
kept; and which modules, generators and scripted functions can be reached.
"""

from __future__ import annotations

from contextvars import Context, copy_context
from types import FunctionType, GeneratorType, MethodType
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._engine.inputs.context_walk import ContextWalk
from reactivate._engine.inputs.module_walk import is_large, is_unseen_writer
from reactivate._engine.inputs.specs import GeneratorInput, IteratorInput, SavedInput, TupleInput
from reactivate._engine.inputs.stored import name_of_region, stored
from reactivate._engine.inputs.walk import DEPTH, DEPTH_OF_ARGUMENTS
from reactivate._engine.requests import note_leaves
from reactivate._engine.state.attributes import TensorsNote
from reactivate._engine.state.contents import ATOMS
from reactivate._engine.state.iterators import holds_iterator, is_iterator
from reactivate._torch.autograd import innermost_pack_hook, is_of_checkpointing
from reactivate._torch.saved import save_tensor
from reactivate._types import DEVICE, Storage


class Capture(ContextWalk):
    """The walk from one function and its arguments.

    Attributes:
        fn, args, kwargs: the function, and the specs of its arguments.
        given: the tensors of `saved`, in which the arguments come first.
        is_hooked: whether there are saved-tensor hooks around the region.
        storage: what keeps the tensors among the inputs that ops have computed; None if they stay where they are.
        name: of the region, if it has one.
        context: the context variables, with nothing in the place of containers of which copies are made.
        is_large: whether there are so many modules that they are noted as they are reached (see `_engine/state/reaching.py`).
    """

    context: Context

    def __init__(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        for_region: bool = False,
        storage: Storage = DEVICE,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.fn = fn
        self.name = name
        pack = innermost_pack_hook()
        self.is_hooked = pack is not None
        self.storage = None if storage is DEVICE or is_of_checkpointing(pack) else storage
        is_plain = pack is None and self.storage is None
        if self.storage is not None:
            note_leaves(self.storage)
        specs = self._specs
        if isinstance(fn, Module):
            self.roots = (fn,)
            specs[id(fn)] = fn
        elif type(fn) is FunctionType:  # as mostly, and methods of modules
            self._function(fn, "the function", DEPTH)
        elif type(fn) is MethodType and isinstance(fn.__self__, Module) and type(fn.__func__) is FunctionType:
            self.roots = (fn.__self__,)
            specs[id(fn.__self__)] = fn.__self__
            self._function(fn.__func__, "the function", DEPTH)
        else:
            self._look(fn, "the function", DEPTH)
        captured: list[Any] = []
        self.args = captured
        self._weak = False
        for index, item in enumerate(args):
            # As mostly; what `_argument` would do, without its calls.
            if type(item) is Tensor and item.requires_grad and is_plain and id(item) not in specs:
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
        if for_region:
            context = self.context = copy_context()
            if context and not ATOMS.issuperset(map(type, context.values())):
                self._look_at_context(context)
            if self._bindings:
                self._code()
        self.given = [item[0] for item in self.saved]
        tensors = self.reached() if self.inputs or self.tensors else self.given
        if tensors:
            note = TensorsNote(tensors)
            self.notes.append(note)
            if note.noted is not None:
                self._look_at_attributes(tensors)
                self.given = [item[0] for item in self.saved]
        if self.roots:
            self.is_large = for_region and not self._has_compiled and any(map(is_large, self.roots))
            if not self.is_large:
                self.modules = self._found()
        if self._context_notes:
            self._settle_context(context)

    def may_write_unseen(self) -> bool:
        return (self.is_large and any(map(is_unseen_writer, self.roots))) or super().may_write_unseen()

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
            self._parts_of_iterator(value, place, DEPTH_OF_ARGUMENTS)
            return spec
        self._look(value, place, DEPTH_OF_ARGUMENTS)
        return value

    def _is_made_anew(self, value: tuple[Any, ...]) -> bool:
        """Return whether a recomputation needs another tuple: around copied iterators, or tensors that hooks move."""
        is_moved = self.is_hooked or self.storage is not None
        return holds_iterator(value) or (is_moved and any(isinstance(item, Tensor) for item in value))

    def _tensor_argument(self, tensor: Tensor, place: str) -> Any:
        spec: Any = tensor
        if (self.is_hooked or tensor.requires_grad) and not self._is_state(tensor):
            spec = self._stored(tensor, place) or (SavedInput(tensor) if self.is_hooked else save_tensor(tensor, False))
        self._specs[id(tensor)] = spec
        if spec is not tensor:
            self.saved.append((tensor, spec, tensor._version))
        else:
            self._tensor(tensor, place)
        return spec

    def _stored(self, tensor: Tensor, place: str) -> Any:
        if self.storage is None or tensor.grad_fn is None:
            return None
        return stored(tensor, self.storage, f"`{place}` of {self.name or name_of_region(self.fn)}")
