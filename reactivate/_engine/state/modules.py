"""Modules as they were when a region began: attributes, registries, hooks, and the tensors that are state.

Noting runs for every region and every module that it can reach, so it takes flat lists in C and compares them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, UninitializedBuffer, UninitializedParameter

from reactivate._engine.state.contents import ATOMS, Note, put_dict
from reactivate._engine.state.geometry import addresses_of, moved_among, note_moved
from reactivate._engine.state.gradients import Gradients
from reactivate._engine.state.held import are_items, held_all, held_dicts
from reactivate._engine.state.notes import RewoundNotes
from reactivate._engine.state.parts import Parts
from reactivate._engine.state.rewound import RewoundTensors
from reactivate._engine.state.shadows import written_before
from reactivate._engine.state.steps import is_stepped_since, steps_so_far
from reactivate._engine.state.tensor_hooks import KeptHooks
from reactivate._engine.state.tensor_states import NO_TENSORS, TensorStates, version_of
from reactivate._engine.state.turns import everybodys
from reactivate._torch.modules import GLOBAL_FLAGS, GLOBAL_HOOKS

_HOOKS = itemgetter("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_FLAGS = itemgetter("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_REQUIRES_GRAD = attrgetter("requires_grad")
UNINITIALIZED = frozenset({UninitializedBuffer, UninitializedParameter})  # which hold nothing yet


LookInto = Callable[[Sequence[Any]], tuple[Sequence[Note], Sequence[Tensor]]]


def _has_objects(tensor: Tensor) -> bool:
    """Return whether Python attributes of a tensor lead to something that can change."""
    return any(type(item) not in ATOMS for item in vars(tensor).values())


class ModuleNotes:
    """Modules before a forward.

    Args:
        modules: the modules, outermost first.
        notes: containers and objects in attributes.
        tensors: tensors in attributes.
        parts: what the modules are made of, if somebody has looked already.
        look_into: returns (notes, tensors) that some objects lead to; tensors by their Python attributes.

    Attributes:
        parts: the attributes and registries of all modules but scripted ones.
        hooks, hook_copies: the dicts of hooks, and those with the Python attributes of parameters and tensors; copies
            of them, None where all are empty.
        kinds: the classes of the modules: to parametrise one is to change its class.
        parameters, versions, differentiable: every parameter, its version, and whether it requires a gradient.
        addresses: where the elements of each parameter were.
        tensors: buffers, and tensors in attributes, with what they held.
        states: (a module with a state protocol, its state).
        gradients: the parameters' `.grad`.
    """

    __slots__ = (
        *("addresses", "differentiable", "gradients", "hook_copies", "hooks", "kinds", "look_into", "modules", "notes"),
        *("parameters", "parts", "states", "steps", "tensors", "versions"),
    )

    def __init__(
        self,
        modules: Sequence[Module],
        notes: Sequence[Note],
        tensors: Iterable[Tensor],
        parts: Parts | None = None,
        look_into: LookInto | None = None,
    ) -> None:
        self.modules = modules
        self.notes = notes
        self.look_into = look_into
        self.states: list[tuple[Any, Any]] = []
        scripted: list[Module] = []
        if parts is None:
            scripted = [module for module in modules if isinstance(module, ScriptModule)]  # those live in C++
            own = [module for module in modules if module not in scripted] if scripted else modules
            parts = Parts([module.__dict__ for module in own])
            parts.attributes = held_all(parts.attributes)  # held strongly, graphs would chain the steps
            stateful: list[Any] = [module for module in own if hasattr(type(module), "recompute_state")]
            self.states += [(module, module.recompute_state()) for module in stateful]
        self.parts = parts
        members, state = parts.layout.parameters_in(parts.entries), parts.layout.buffers_in(parts.entries)
        for module in scripted:
            members += module.parameters(recurse=False)
            state += module.buffers(recurse=False)
        self.parameters: list[Tensor] = members
        state += tensors
        hooks = chain.from_iterable(map(_HOOKS, parts.namespaces))
        self.hooks: list[Any] = [*GLOBAL_HOOKS, *hooks, *map(vars, members), *map(vars, state)]
        self.hook_copies: list[Any] | None = None
        if any(self.hooks):
            self.hooks += *GLOBAL_FLAGS, *chain.from_iterable(map(_HOOK_FLAGS, parts.namespaces))
            self.hook_copies = held_dicts(self.hooks)
            filled = [tensor for tensor in (*members, *state) if _has_objects(tensor)]
            if filled and look_into is not None:
                more, others = look_into(filled)
                self.notes = [*notes, *more]  # a list of its own: a remembered tree has the other
                known = set(map(id, members))
                state += [tensor for tensor in others if id(tensor) not in known]
        if any(map(_REQUIRES_GRAD, state)):  # a product of a forward, or a parameter that is not registered
            members += [tensor for tensor in state if tensor.requires_grad and tensor.is_leaf]
            state = [tensor for tensor in state if not tensor.requires_grad]
        if not UNINITIALIZED.isdisjoint(map(type, state)):  # they hold nothing yet
            members += [tensor for tensor in state if type(tensor) in UNINITIALIZED]
            state = [tensor for tensor in state if type(tensor) not in UNINITIALIZED]
        try:
            self.versions: list[int] = list(map(version_of, members))
        except RuntimeError:  # made in inference mode: copied, as buffers are
            state += filter(_has_no_version, members)
            self.parameters = members = [tensor for tensor in members if not _has_no_version(tensor)]
            self.versions = list(map(version_of, members))
        state += written_before(members)
        self.tensors = TensorStates({id(tensor): tensor for tensor in state}.values()) if state else NO_TENSORS
        self.addresses = addresses_of(members)
        self.steps = steps_so_far()
        self.differentiable: list[bool] = list(map(_REQUIRES_GRAD, members))
        self.kinds: list[type] = list(map(type, modules))
        self.gradients = Gradients(members)

    def written_parameters(self) -> list[tuple[Tensor, int]]:
        """Return (parameter, noted version) of those that have another version or other memory by now, and no shadow."""
        is_stepped = steps_so_far() != self.steps
        moved = moved_among(self.parameters, self.addresses)
        if list(map(version_of, self.parameters)) == self.versions and not is_stepped and not moved:
            return []
        return [
            (item, version)
            for index, (item, version) in enumerate(zip(self.parameters, self.versions))
            if (item._version != version or index in moved or (is_stepped and is_stepped_since(item, self.steps)))
            and not self.tensors.covers(item)
        ]

    def are_hooks_current(self, copies: Sequence[Any] | None) -> bool:
        """Return whether there are the hooks of `copies`: none if that is None."""
        if copies is None:
            return not any(self.hooks)
        return all(
            len(now) == len(noted) and are_items(now.values(), list(noted.values()))
            for now, noted in zip(self.hooks, copies)
        )

    def finish(self) -> None:
        """The forward is over: find the gradients and parameters that moved, and let go of the other gradients."""
        self.gradients.finish()
        addresses = addresses_of(self.parameters)
        if addresses != self.addresses:
            for parameter, before, now in zip(self.parameters, self.addresses, addresses):
                if before and now and before != now:  # 0: sharded, or taken apart
                    note_moved(parameter)

    def unknown_gradients(self) -> Sequence[tuple[Tensor, int]]:
        """Return the gradients that the forward moved, and of which there is no copy, with their versions."""
        self.gradients.look()
        return self.gradients.unknown

    def rewound(self, *, takes_turns: bool = True) -> AbstractContextManager[None]:
        """Return the context in which the modules are what they were.

        Args:
            takes_turns: whether other threads have to wait where something is rewound.
        """
        return RewoundModules(self, takes_turns=takes_turns)

    def name_of(self, tensor: Tensor) -> str:
        """Return how messages call a tensor of a module."""
        for root in self.modules:  # the outermost come first
            for prefix, module in root.named_modules():
                for name, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
                    if value is tensor:
                        return ".".join(filter(None, (type(root).__name__, prefix, name)))
        return "a tensor of a module"


def _has_no_version(tensor: Tensor) -> bool:
    return type(tensor) not in UNINITIALIZED and tensor.is_inference()


class RewoundModules:
    """Modules as they were, for as long as the context lasts."""

    __slots__ = (
        *("_are_hooks_current", "_differentiable", "_entered", "_hook_copies", "_inner", "_kinds", "_parts", "_states"),
        *("_takes_turns", "_tensors", "_turn", "note"),
    )

    def __init__(self, note: ModuleNotes, *, takes_turns: bool = True) -> None:
        self.note = note
        self._takes_turns = takes_turns
        self._tensors = RewoundTensors(note.tensors) if note.tensors.tensors else None
        self._inner: list[AbstractContextManager[None]] = []
        if note.notes:
            self._inner.append(RewoundNotes(note.notes))
        if self._tensors is not None:
            self._inner.append(self._tensors)
        if not note.gradients.is_quiet():
            self._inner.append(note.gradients)
        if note.parameters:
            self._inner.append(KeptHooks(note.parameters))

    def __enter__(self) -> None:
        note = self.note
        self._entered: list[Any] = []
        self._states = [module.recompute_state() for module, _ in note.states]
        self._hook_copies: list[Any] | None = None
        self._differentiable: list[bool] = list(map(_REQUIRES_GRAD, note.parameters))
        self._turn = everybodys.enter(self._differs) if self._takes_turns else None
        if self._turn is None:
            self._differs()
        try:
            _set_all(note, note.kinds, note.differentiable, self._kinds, self._differentiable)
            if self._parts is not note.parts:
                note.parts.put()
            if not self._are_hooks_current:
                self._hook_copies = list(map(dict, note.hooks))
                _put_hooks(note.hooks, note.hook_copies)
            for context in self._inner:
                context.__enter__()
                self._entered.append(context)
            for module, state in note.states:
                module.load_recompute_state(state)
        except BaseException:
            self.__exit__()
            raise

    def _differs(self) -> bool:
        """Return whether anything is to be set back that other threads could see, and take down what is there now."""
        note = self.note
        self._parts: Parts | None = note.parts if note.parts.are_current() else Parts(note.parts.namespaces)
        self._are_hooks_current = note.are_hooks_current(note.hook_copies)
        self._kinds: list[type] = list(map(type, note.modules))
        are_tensors_other = self._tensors is not None and self._tensors.differs()
        return (
            are_tensors_other
            or bool(note.states)
            or self._parts is not note.parts
            or not self._are_hooks_current
            or self._kinds != note.kinds
            or not all(item.is_at(item.noted) for item in note.notes)
        )

    def __exit__(self, *error: object) -> None:
        note = self.note
        try:
            for (module, _), now in zip(note.states, self._states):
                module.load_recompute_state(now)
        finally:
            for context in reversed(self._entered):
                context.__exit__()
            if self._parts is not None and not self._parts.are_current():
                self._parts.put()
            hooks = note.hook_copies if self._hook_copies is None else self._hook_copies
            if not note.are_hooks_current(hooks):
                _put_hooks(note.hooks, hooks)
            now = list(map(type, note.modules)), list(map(_REQUIRES_GRAD, note.parameters))
            _set_all(note, self._kinds, self._differentiable, *now)
            self._parts = self._hook_copies = None  # a traceback may hold this context
            self._states = []
            if self._turn is not None:
                everybodys.leave(self._turn)


def _set_all(
    note: ModuleNotes,
    kinds: list[type],
    differentiable: list[bool],
    kinds_now: list[type],
    differentiable_now: list[bool],
) -> None:
    """Give modules their classes, and parameters their `requires_grad`."""
    if kinds != kinds_now:
        for module, kind in zip(note.modules, kinds):
            if type(module) is not kind:
                module.__class__ = kind
    if differentiable != differentiable_now:
        for tensor, flag in zip(note.parameters, differentiable):
            if tensor.is_leaf and tensor.requires_grad is not flag:
                tensor.requires_grad = flag


def _put_hooks(hooks: Sequence[Any], copies: Sequence[Any] | None) -> None:
    for live, noted in zip(hooks, copies or [{}] * len(hooks)):
        put_dict(live, noted)
