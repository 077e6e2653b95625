"""Modules as they were when a region began: attributes, registries, hooks, and the tensors that are state.

Noting runs for every region and every module that it can reach, so it copies dicts in C and compares them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module

from reactivate._compat import copy_unseen, is_distributed, set_versions
from reactivate._standin import StandIn, copies_of
from reactivate._state.contents import Note, are_items, given_back, held, put_dict
from reactivate._state.gradients import Gradients
from reactivate._state.notes import RewoundNotes
from reactivate._state.shadows import RewoundTensors, TensorStates, is_known_written, version_of
from reactivate._state.steps import is_stepped_since, steps_so_far
from reactivate._state.tensor_hooks import KeptHooks
from reactivate._state.turns import everybodys

_REGISTRIES = itemgetter("_parameters", "_buffers", "_modules")
_HOOKS = itemgetter("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_FLAGS = itemgetter("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_REQUIRES_GRAD = attrgetter("requires_grad")

Namespace = dict[str, Any]


class ModuleNotes:
    """Modules before a forward.

    Attributes:
        modules: the modules, outermost first.
        namespaces, copies: every module's `__dict__` and registries, and copies of them.
        hooks, hook_copies: the dicts of hooks, and those with the parameters' Python attributes; copies of them, None
            where all are empty.
        kinds: the classes of the modules: to parametrise one is to change its class.
        parameters, versions, differentiable: every parameter, its version, and whether it requires a gradient.
        notes: containers and objects in attributes.
        tensors: buffers, and tensors in attributes, with what they held.
        states: (a module with a state protocol, its state).
        gradients: the parameters' `.grad`.
    """

    __slots__ = (
        *("_count", "_flat", "copies", "differentiable", "gradients", "hook_copies", "hooks", "kinds", "modules"),
        *("namespaces", "notes", "parameters", "states", "steps", "tensors", "versions"),
    )

    def __init__(
        self, modules: Sequence[Module], notes: Sequence[Note], tensors: Iterable[Tensor], users: Iterable[Module]
    ) -> None:
        self.modules = modules
        self.notes = notes
        own = [module for module in modules if not isinstance(module, ScriptModule)]  # those live in C++
        namespaces: list[Namespace] = list(map(vars, own))
        registries = list(chain.from_iterable(map(_REGISTRIES, namespaces)))
        self.namespaces = [*namespaces, *registries]
        self.copies: list[Namespace] = [*copies_of(namespaces), *map(dict.copy, registries)]
        self._count = len(namespaces)
        for module in users:
            self._hold_graphs_weakly(module)
        self._flat: tuple[list[int], list[Any], list[str]] | None = None
        members = [item for registry in registries[0::3] for item in registry.values() if item is not None]
        state = [item for registry in registries[1::3] for item in registry.values() if item is not None]
        if len(own) < len(modules):
            for module in modules:
                if isinstance(module, ScriptModule):
                    members += module.parameters(recurse=False)
                    state += module.buffers(recurse=False)
        self.parameters: list[Tensor] = members
        self.hooks: list[Any] = [*chain.from_iterable(map(_HOOKS, namespaces)), *map(vars, members)]
        self.hook_copies: list[Any] | None = None
        if any(self.hooks):
            self.hooks += chain.from_iterable(map(_HOOK_FLAGS, namespaces))
            self.hook_copies = list(map(dict, self.hooks))
        state += tensors
        if any(map(_REQUIRES_GRAD, state)):  # a product of a forward, or a parameter that is not registered
            members += [tensor for tensor in state if tensor.requires_grad and tensor.is_leaf]
            state = [tensor for tensor in state if not tensor.requires_grad]
        state += filter(is_known_written, members)
        self.tensors = TensorStates({id(tensor): tensor for tensor in state}.values())
        self.versions: list[int] = list(map(version_of, members))
        self.steps = steps_so_far()
        self.differentiable: list[bool] = list(map(_REQUIRES_GRAD, members))
        self.kinds: list[type] = list(map(type, modules))
        self.gradients = Gradients(members)
        self.states: list[tuple[Any, Any]] = [
            (module, _state_of(module)) for module in own if hasattr(type(module), "replay_state")
        ]

    def _hold_graphs_weakly(self, module: Module) -> None:
        """Replace tensors with graphs in the copy of its attributes: held strongly they would chain the steps."""
        namespace = vars(module)
        for name, value in namespace.items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                copy = next(copy for live, copy in zip(self.namespaces, self.copies) if live is namespace)
                copy[name] = held(value)

    def written_parameters(self) -> list[tuple[Tensor, int]]:
        """Return (parameter, noted version) of those that have another version by now, and no shadow."""
        is_stepped = steps_so_far() != self.steps
        if list(map(version_of, self.parameters)) == self.versions and not is_stepped:
            return []
        return [
            (item, version)
            for item, version in zip(self.parameters, self.versions)
            if (item._version != version or (is_stepped and is_stepped_since(item, self.steps)))
            and not self.tensors.covers(item)
        ]

    def present(self) -> list[Namespace]:
        """Return copies of attributes and registries as they are now."""
        namespaces = self.namespaces
        return [*copies_of(namespaces[: self._count]), *map(dict.copy, namespaces[self._count :])]

    def are_namespaces_current(self, copies: Sequence[Namespace]) -> bool:
        """Return whether attributes and registries hold the items of `copies`."""
        namespaces = self.namespaces
        if copies is self.copies:  # flat lists of which are kept, to be compared in C
            if self._flat is None:
                self._flat = _flat(copies)
            lengths, noted, keys = self._flat
        else:
            lengths, noted, keys = _flat(copies)
        return (
            list(map(len, namespaces)) == lengths
            and all(map(is_, chain.from_iterable(map(dict.values, namespaces)), noted))
            and list(chain.from_iterable(namespaces)) == keys
        )

    def are_hooks_current(self, copies: Sequence[Any] | None) -> bool:
        """Return whether there are the hooks of `copies`: none if that is None."""
        if copies is None:
            return not any(self.hooks)
        return all(
            len(now) == len(noted) and are_items(now.values(), list(noted.values()))
            for now, noted in zip(self.hooks, copies)
        )

    def finish(self) -> None:
        """The forward is over: find the gradients that moved, and let go of the others."""
        self.gradients.finish()

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

    def changes(self) -> Callable[[], None]:
        """Return what brings the modules to where they are now."""
        return ModuleChanges(self).bring

    def is_written_unseen(self) -> bool:
        """Return whether a recomputation has to write to more than attributes."""
        tensors = self.tensors
        return bool(tensors.groups or self.states or self.notes) or any(
            not shadow.is_current(tensor, tensor._version) for tensor, shadow in zip(tensors.tensors, tensors.shadows)
        )

    def name_of(self, tensor: Tensor) -> str:
        """Return how messages call a tensor of a module."""
        for root in self.modules:  # the outermost come first
            for prefix, module in root.named_modules():
                for name, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
                    if value is tensor:
                        return ".".join(filter(None, (type(root).__name__, prefix, name)))
        return "a tensor of a module"


def _state_of(module: Any) -> Any:
    return module.replay_state()


def _flat(copies: Sequence[Namespace]) -> tuple[list[int], list[Any], list[str]]:
    return (
        list(map(len, copies)),
        list(chain.from_iterable(map(dict.values, copies))),
        list(chain.from_iterable(copies)),
    )


class RewoundModules:
    """Modules as they were, for as long as the context lasts."""

    __slots__ = (
        *("_copies", "_differentiable", "_entered", "_hook_copies", "_inner", "_kinds", "_states"),
        *("_is_current", "_takes_turns", "_turn", "note"),
    )

    def __init__(self, note: ModuleNotes, *, takes_turns: bool = True) -> None:
        self.note = note
        self._takes_turns = takes_turns
        self._inner = (
            RewoundNotes(note.notes),
            RewoundTensors(note.tensors),
            note.gradients,
            KeptHooks(note.parameters),
        )

    def __enter__(self) -> None:
        note = self.note
        self._entered: list[Any] = []
        self._states = [module.replay_state() for module, _ in note.states]
        self._copies: list[Namespace] | None = None
        self._hook_copies: list[Any] | None = None
        self._kinds: list[type] = list(map(type, note.modules))
        self._differentiable: list[bool] = list(map(_REQUIRES_GRAD, note.parameters))
        self._is_current: tuple[bool, bool] | None = None
        self._turn = everybodys.enter(self._differs) if self._takes_turns else None
        if self._is_current is None:  # nobody had to ask
            self._differs()
        assert self._is_current is not None
        is_current, are_hooks_current = self._is_current
        try:
            _set_all(note, note.kinds, note.differentiable, self._kinds, self._differentiable)
            if not is_current:
                self._copies = note.present()
                _assign_all(note.namespaces, note.copies)
            if not are_hooks_current:
                self._hook_copies = list(map(dict, note.hooks))
                _put_hooks(note.hooks, note.hook_copies)
            for context in self._inner:
                context.__enter__()
                self._entered.append(context)
            for module, state in note.states:
                module.load_replay_state(state)
        except BaseException:
            self.__exit__()
            raise

    def _differs(self) -> bool:
        """Return whether anything is to be set back that other threads could see."""
        note = self.note
        self._is_current = note.are_namespaces_current(note.copies), note.are_hooks_current(note.hook_copies)
        return not all(self._is_current) or note.is_written_unseen() or self._kinds != note.kinds

    def __exit__(self, *error: object) -> None:
        note = self.note
        try:
            for (module, _), now in zip(note.states, self._states):
                module.load_replay_state(now)
        finally:
            for context in reversed(self._entered):
                context.__exit__()
            present = note.copies if self._copies is None else self._copies
            if not note.are_namespaces_current(present):
                _assign_all(note.namespaces, present)
            hooks = note.hook_copies if self._hook_copies is None else self._hook_copies
            if not note.are_hooks_current(hooks):
                _put_hooks(note.hooks, hooks)
            now = list(map(type, note.modules)), list(map(_REQUIRES_GRAD, note.parameters))
            _set_all(note, self._kinds, self._differentiable, *now)
            self._copies = self._hook_copies = None  # a traceback may hold this context
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


def _assign_all(namespaces: Sequence[Namespace], copies: Sequence[Namespace]) -> None:
    for namespace, noted in zip(namespaces, copies):
        assign(namespace, noted)


def assign(namespace: Namespace, noted: Namespace) -> None:
    """Give `namespace` the noted items, but for what a sharding library has moved to another form."""
    items = {name: given_back(item) for name, item in noted.items()}
    for name, item in items.items():
        now = namespace.get(name)
        if now is not item and isinstance(now, Tensor) and isinstance(item, Tensor) and _is_sharded(item, now):
            items[name] = now
    if [*items] != [name for name, item in namespace.items() if not isinstance(item, StandIn)]:
        put_dict(namespace, items)
        return
    for name, item in items.items():  # touch what differs: another thread may read the rest
        if namespace[name] is not item:
            namespace[name] = item


def _is_sharded(before: Tensor, now: Tensor) -> bool:
    # `functional_call` swaps parameters for the time of a forward: these are put back. A sharding library knows better
    # which form of a parameter is needed now.
    return is_distributed(before) or is_distributed(now) or (before.shape != now.shape and before.requires_grad)


class ModuleChanges:
    """Modules as a saved call left them, next to what they were when the region began.

    It is brought about inside of `RewoundModules`, which puts everything back afterwards.
    """

    __slots__ = ("contents", "namespaces", "note", "notes", "states", "versions")

    def __init__(self, note: ModuleNotes) -> None:
        self.note = note
        self.namespaces = [
            (live, {name: held(item) for name, item in now.items()})
            for live, now, noted in zip(note.namespaces, note.present(), note.copies)
            if [*now] != [*noted] or any(now[name] is not noted[name] for name in now)
        ]
        tensors, count = note.tensors, len(note.tensors.shadows)
        moved = [
            tensor for tensor, shadow in zip(tensors.tensors, tensors.shadows) if tensor._version != shadow.version
        ]
        self.contents = [(tensor, copy_unseen(tensor)) for tensor in (*moved, *tensors.tensors[count:])]
        self.versions = [tensor._version for tensor, _ in self.contents]
        self.notes = [(item, item.contents()) for item in note.notes if not item.is_at(item.noted)]
        self.states = [(module, module.replay_state()) for module, _ in note.states]

    def bring(self) -> None:
        """Make it so."""
        for live, items in self.namespaces:
            assign(live, items)
        with torch.no_grad():
            for tensor, content in self.contents:
                tensor.copy_(content)
        set_versions([tensor for tensor, _ in self.contents], self.versions)
        for note, contents in self.notes:
            note.put(contents)
        for module, state in self.states:
            module.load_replay_state(state)
