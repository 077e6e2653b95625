"""Modules as they were when a region began: attributes, registries, hooks, and the tensors that are state.

Noting runs for every region and every module that it can reach, so it takes flat lists in C and compares them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, UninitializedBuffer, UninitializedParameter

from reactivate._engine.state.contents import ATOMS, Note
from reactivate._engine.state.geometry import addresses_of, moved_among, note_moved
from reactivate._engine.state.gradients import Gradients
from reactivate._engine.state.held import are_items, held_dicts
from reactivate._engine.state.parts import Parts
from reactivate._engine.state.shadows import written_before
from reactivate._engine.state.steps import is_stepped_since, steps_so_far
from reactivate._engine.state.tensor_states import NO_TENSORS, TensorStates, version_of
from reactivate._torch.modules import GLOBAL_FLAGS, GLOBAL_HOOKS

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
        may_write_unseen: returns whether the region may write to tensors without a new version.

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
        may_write_unseen: Callable[[], bool] = bool,
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
            parts.hold()
            stateful: list[Any] = [module for module in own if hasattr(type(module), "recompute_state")]
            self.states += [(module, module.recompute_state()) for module in stateful]
        self.parts = parts
        members, state = parts.layout.parameters_in(parts.entries), parts.layout.buffers_in(parts.entries)
        for module in scripted:
            members += module.parameters(recurse=False)
            state += module.buffers(recurse=False)
        self.parameters: list[Tensor] = members
        state += tensors
        hooks = *GLOBAL_HOOKS, *parts.stamp.forward_hooks, *parts.stamp.backward_hooks
        self.hooks: list[Any] = [*hooks, *map(vars, members), *map(vars, state)]
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
        if state and any(map(_REQUIRES_GRAD, state)):  # a product of a forward, or a parameter that is not registered
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
        self.tensors = TensorStates(state, parts.layout.small, may_write_unseen) if state else NO_TENSORS
        parts.layout.small = self.tensors.before
        self.addresses = addresses_of(members)
        self.steps = steps_so_far()
        self.differentiable: list[bool] = list(map(_REQUIRES_GRAD, members))
        self.kinds: list[type] = list(map(type, modules))
        self.gradients = Gradients(members)

    def written_parameters(self) -> Sequence[tuple[Tensor, int]]:
        """Return (parameter, noted version) of those that have another version or other memory by now, and no shadow."""
        is_stepped = steps_so_far() != self.steps
        moved = moved_among(self.parameters, self.addresses)
        if not is_stepped and not moved and list(map(version_of, self.parameters)) == self.versions:
            return ()
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
