"""A moment: the contents of all objects that a region reaches, at the beginning of its forward.

Random streams and settings are kept elsewhere. The contents are read again only if something differs in a recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, filterfalse
from operator import attrgetter, is_, itemgetter
from types import MappingProxyType
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module

from reactivate._snapshot.caches import WeakIdentitySet
from reactivate._snapshot.geometry import addresses_of, is_moved, moved
from reactivate._snapshot.held import ATOMS, are_items, held_all
from reactivate._snapshot.holders import Contents, Holder, put_dict
from reactivate._snapshot.inputs import Constant
from reactivate._snapshot.module_walk import attributes_of_tensors
from reactivate._snapshot.parts import Parts
from reactivate._snapshot.quick_look import QuickLook, others_among
from reactivate._snapshot.shadows import UNINITIALIZED, written_before
from reactivate._snapshot.steps import fused_steps, last_step_of, steps_so_far
from reactivate._snapshot.tensor_hooks import Hooks, hooks_on
from reactivate._snapshot.tensor_states import NO_TENSORS, TensorStates, is_vector, version_of
from reactivate._snapshot.trees import Tree
from reactivate._torch.modes import copy_unseen
from reactivate._torch.modules import GLOBAL_FLAGS, GLOBAL_HOOKS, is_in_flat_parameter
from reactivate._types import Unrestored

GRADIENT = "a gradient"
"""What messages call the gradient of a leaf."""

_GRADIENT, _REQUIRES_GRAD, _IS_LEAF = map(attrgetter, ("grad", "requires_grad", "is_leaf"))
_HOOK_FLAGS = itemgetter("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_NO_COPIES: Mapping[int, Tensor] = MappingProxyType({})
_accumulated = WeakIdentitySet()  # leaves that some forward accumulated a gradient of


class Moment:
    """A moment: the contents of some objects and modules, when it was taken.

    Args:
        holders: objects whose contents count.
        tensors: tensors that are state.
        arguments: tensors that the region is called with, or finds in what it is called with: their hooks and gradients
            count.
        tree: modules, if there are any.
        may_write_unseen: returns whether the region may write to tensors without a new version.

    Attributes:
        holders, contents: the objects, and what they held, in the order in which they are rewound.
        look: tells quickly whether objects that the modules lead to have changed; None without such objects.
        states: the tensors that are state, with what they held: arguments, buffers, attributes.
        tree: modules, with what else these lead to; None without modules. Other regions have it as well.
        light: the tree, if it is all that is noted, and has no tensors: then other regions have the moment as well.
        parts: their attributes and registries.
        modules, kinds: the modules, and their classes: to parametrize one is to change its class.
        parameters, versions, differentiable: every parameter, its version, and whether it requires a gradient.
        addresses: where the elements of each parameter were.
        hooks, hook_copies: the dicts of hooks, and those with the Python attributes of tensors; what they held, None where
            all were empty.
        tensor_hooks: on the arguments, and behind these on the parameters.
        protocols: (a module with a state protocol, its state).
        leaves: those whose gradients the forward may change, as long as it runs.
        accumulated: (leaf, a copy of its gradient before the forward) where the forward itself changed the gradient.
        has_state: whether there is anything but hooks, and gradients while the forward runs.
        unknown: those gradients of which there is no copy, with their versions.
    """

    # Defaults of the class, so that a moment sets only what its region has: most regions have little of this.
    holders: Sequence[Holder] = ()
    contents: Sequence[Contents] = ()
    look: QuickLook | None = None
    _looked_at = range(0)  # the numbers of those
    states: TensorStates = NO_TENSORS
    tree: Tree | None = None
    light: Tree | None = None
    parts: Parts | None = None
    modules: Sequence[Module] = ()
    kinds: Sequence[type] = ()
    protocols: Sequence[tuple[Any, Any]] = ()
    parameters: list[Tensor] = []  # noqa: RUF012
    versions: Sequence[int] = ()
    addresses: Sequence[int] = ()
    differentiable: Sequence[bool] = ()
    hooks: Sequence[Any] = ()
    hook_copies: list[Contents] | None = None
    tensor_hooks: Hooks = ()
    leaves: Sequence[Tensor] = ()
    accumulated: Sequence[tuple[Tensor, Tensor | None]] = ()
    unknown: Sequence[tuple[Tensor, int]] = ()
    _gradient_copies: Mapping[int, Tensor] = _NO_COPIES
    _steps = 0
    has_state = False

    def __init__(
        self,
        holders: Sequence[Holder],
        tensors: Sequence[Tensor],
        arguments: Sequence[Tensor],
        tree: Tree | None,
        may_write_unseen: Callable[[], bool] = bool,
    ) -> None:
        if holders:
            self.has_state = True
            self.holders, self.contents = holders, [holder.record() for holder in holders]
        leaves = list(filter(_IS_LEAF, arguments))
        self.hooks = list(map(vars, arguments))
        if tensors or tree is not None:
            leaves += filter(_IS_LEAF, self._note_tensors(tensors, tree, may_write_unseen))
        elif any(self.hooks):
            self._look_at_hooks((), ())
        if arguments or self.parameters:
            self.tensor_hooks = hooks_on([*arguments, *self.parameters])
        if leaves:
            self.leaves = leaves
            self._gradients: Sequence[Tensor | None] = list(map(_GRADIENT, leaves))
            self._gradient_versions = _versions_of(self._gradients)
            if _accumulated:
                self._gradient_copies = {
                    id(leaf): copy_unseen(gradient)
                    for leaf, gradient in zip(leaves, self._gradients)
                    if gradient is not None and _accumulated.has(leaf)
                }

    def _note_tensors(
        self, tensors: Sequence[Tensor], tree: Tree | None, may_write_unseen: Callable[[], bool]
    ) -> list[Tensor]:
        """Note modules and all tensors that are state, and return the parameters."""
        self.has_state = True
        kept = None
        parameters: list[Tensor] = []
        buffers: Sequence[Tensor] = ()
        if tensors:
            self.hooks = [*self.hooks, *map(vars, tensors)]
        if tree is not None:
            kept = tree.kept
            parameters, buffers = self._note_tree(tree)
        state = [*tensors, *buffers]
        if any(self.hooks):
            state += self._look_at_hooks([*parameters, *buffers], parameters)
        if state and (any(map(_REQUIRES_GRAD, state)) or not UNINITIALIZED.isdisjoint(map(type, state))):
            parameters, state = self._sort_out(parameters, state)
        if parameters:
            self.parameters = parameters
            state += self._note_parameters(parameters)
            if False in self.differentiable and may_write_unseen():  # as running statistics are written
                state += [item for item in parameters if not item.requires_grad and is_vector(item)]
        if state:
            self.states = TensorStates(state, None if kept is None else kept.small_layout, may_write_unseen)
            if kept is not None:
                kept.small_layout = self.states.layout
        return parameters

    def _note_tree(self, tree: Tree) -> tuple[list[Tensor], list[Tensor]]:
        """Note what modules are made of, and return their parameters and the tensors that are state."""
        self.tree, self.modules, self.kinds, parts = tree, tree.modules, tree.kinds, tree.parts
        self.parts = parts
        if tree.stateful:
            self.protocols = [(module, module.recompute_state()) for module in tree.stateful]
        if tree.holders:
            self.look, self._looked_at = tree.look, range(len(self.holders), len(self.holders) + len(tree.holders))
            self.holders = [*self.holders, *tree.holders]
            self.contents = [*self.contents, *tree.contents]
        parameters = [*parts.layout.parameters(parts.entries)]
        buffers = [*parts.layout.buffers(parts.entries), *tree.tensors]
        for module in tree.scripted:
            parameters += module.parameters(recurse=False)
            buffers += module.buffers(recurse=False)
        ours = filterfalse(is_in_flat_parameter, parameters) if tree.has_wrappers else parameters
        self.hooks = [*self.hooks, *GLOBAL_HOOKS, *parts.hooks, *map(vars, ours), *map(vars, buffers)]
        return parameters, buffers

    def _note_parameters(self, parameters: list[Tensor]) -> list[Tensor]:
        """Note versions, addresses and flags of parameters, and return those that are state: a forward wrote to them."""
        state: list[Tensor] = []
        try:
            self.versions = list(map(version_of, parameters))
        except RuntimeError:  # made in inference mode: copied, as buffers are
            state = list(filter(_has_no_version, parameters))
            parameters[:] = [tensor for tensor in parameters if not _has_no_version(tensor)]
            self.versions = list(map(version_of, parameters))
        self.addresses = addresses_of(parameters)
        self._steps = steps_so_far()
        self.differentiable = list(map(_REQUIRES_GRAD, parameters))
        return [*state, *written_before(parameters)]

    def _look_at_hooks(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Copy the dicts of hooks and attributes, and return tensors of modules that these lead to."""
        if self.parts is not None:
            self.hooks = [*self.hooks, *GLOBAL_FLAGS, *chain.from_iterable(map(_HOOK_FLAGS, self.parts.namespaces))]
        self.has_state = True
        self.hook_copies = [(*item, *held_all(tuple(item.values()))) for item in self.hooks]
        filled = [tensor for tensor in tensors if any(type(item) not in ATOMS for item in vars(tensor).values())]
        if not filled:
            return []
        walk = attributes_of_tensors(filled)
        self.holders = [*self.holders, *walk.holders]
        self.contents = [*self.contents, *(holder.record() for holder in walk.holders)]
        known = set(map(id, parameters))
        return [tensor for tensor in walk.tensors if id(tensor) not in known]

    def share(self, tree: Tree) -> None:
        """Let other regions have the moment of a tree, if that has no tensors, hooks or protocols."""
        if not (self.parameters or self.protocols or self.hook_copies) and self.states is NO_TENSORS:
            self.light = tree
            tree.moment = ref(self)

    @staticmethod
    def _sort_out(parameters: list[Tensor], state: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Move what is no state to the parameters: leaves that are not registered, and what holds nothing yet."""
        leaves = [tensor for tensor in state if tensor.requires_grad and tensor.is_leaf]
        state = [tensor for tensor in state if not tensor.requires_grad]
        empty = [tensor for tensor in state if type(tensor) in UNINITIALIZED]
        return parameters + leaves + empty, [tensor for tensor in state if type(tensor) not in UNINITIALIZED]

    def others(self) -> list[int]:
        """Return the numbers of the objects that hold something else by now."""
        seen = range(0) if self.look is None else self._looked_at
        numbers = (*range(seen.start), *range(seen.stop, len(self.holders)))
        found = others_among(numbers, self.holders, self.contents)
        return found if self.look is None else sorted([*found, *map(seen.__getitem__, self.look.others())])

    # -- gradients ----------------------------------------------------------------------------------------------------

    def look_at_gradients(self) -> None:
        """Find the gradients that moved, as long as the forward runs: a backward inside may need a recomputation."""
        now = list(map(_GRADIENT, self.leaves))
        are_same = all(map(is_, now, self._gradients))
        if are_same and not self._gradient_versions:  # there are none
            return
        versions = _versions_of(now)
        if are_same and versions == self._gradient_versions:
            return
        accumulated: list[tuple[Tensor, Tensor | None]] = []
        unknown: list[tuple[Tensor, int]] = []
        nones = [None] * len(now)
        rows = zip(self.leaves, now, self._gradients, versions or nones, self._gradient_versions or nones)
        for leaf, gradient, before, version, version_before in rows:
            if gradient is not before or version != version_before:
                _accumulated.add(leaf)
                accumulated.append((leaf, self._gradient_copies.get(id(leaf))))
                if before is not None and version_before is not None and id(leaf) not in self._gradient_copies:
                    unknown.append((before, version_before))
        self.accumulated, self.unknown, self.has_state = accumulated, unknown, True

    # -- what has a gradient since ------------------------------------------------------------------------------------

    def differentiable_since(self) -> list[tuple[Tensor, int]]:
        """Return the tensors that are state and require a gradient only now, each with the version that it had."""
        if True not in map(_REQUIRES_GRAD, self.states.tensors):  # as mostly
            return []
        known = set(map(id, self.parameters))
        pairs = zip(self.states.tensors, self.states.versions)
        # An inference tensor is state even if it requires a gradient, which it cannot get later.
        return [
            (tensor, version)
            for tensor, version in pairs
            if tensor.requires_grad and id(tensor) not in known and not tensor.is_inference()
        ]

    def hide_graphs(self, hidden: Mapping[int, Constant], leaves: Sequence[tuple[Tensor, int]]) -> None:
        """Let objects hold constants again: what stands for each, and leaves that required no gradient."""
        if hidden:
            self.contents = [[hidden.get(id(item), item) for item in contents] for contents in self.contents]
            self.look = None
            self.parts = None if self.parts is None else self.parts.with_others(hidden)
        if leaves:
            self.parameters = [*self.parameters, *(leaf for leaf, _ in leaves)]
            self.versions = [*self.versions, *(version for _, version in leaves)]
            self.differentiable = [*self.differentiable, *(False for _ in leaves)]
            self.addresses = addresses_of(self.parameters)

    # -- the end of the forward, and what was written since ---------------------------------------------------------

    def finish(self) -> list[Unrestored]:
        """The forward is over: note which parameters it moved, let go of gradients, and return what `unrestored` does."""
        parameters = self.parameters
        if parameters and (addresses := addresses_of(parameters)) != self.addresses:
            for parameter, before, now in zip(parameters, self.addresses, addresses):
                if before and now and before != now:  # 0: sharded, or taken apart
                    moved.add(parameter)
        found = self.unrestored()
        if self.leaves:
            self.leaves = self._gradients = ()
            self._gradient_copies = _NO_COPIES
        return found

    def unrestored(self) -> list[Unrestored]:
        """Return what was modified since, and of what there is no copy: parameters and gradients."""
        found: list[Unrestored] = []
        if self.parameters:
            is_stepped = fused_steps[0] != self._steps
            if is_stepped or moved or list(map(version_of, self.parameters)) != self.versions:
                found = self._moved_parameters(is_stepped)
        if self.leaves:
            self.look_at_gradients()
        if self.unknown:
            found += [Unrestored(gradient, GRADIENT, version) for gradient, version in self.unknown]
        return found

    def _moved_parameters(self, is_stepped: bool) -> list[Unrestored]:
        rows = zip(self.parameters, self.versions, self.addresses)
        return [
            Unrestored(item, self.name_of(item), version)
            for item, version, address in rows
            if (
                item._version != version or is_moved(item, address) or (is_stepped and last_step_of(item) > self._steps)
            )
            and not self.states.covers(item)
        ]

    def note_writes(self, tensors: Iterable[tuple[Tensor, int]]) -> None:
        """Take down what the forward wrote to without a copy being there: see `TensorStates.note_writes`."""
        if self.states is NO_TENSORS:
            self.states, self.has_state = TensorStates(()), True
        self.states.note_writes(tensors)

    def are_hooks_current(self, copies: Sequence[Contents] | None) -> bool:
        """Return whether there are the hooks of `copies`: none if that is None."""
        if copies is None:
            return not any(self.hooks)
        return all(are_items((*now, *now.values()), noted) for now, noted in zip(self.hooks, copies))

    def put_hooks(self, copies: Sequence[Contents] | None) -> None:
        """Let there be the hooks of `copies`."""
        for live, noted in zip(self.hooks, copies or [()] * len(self.hooks)):
            put_dict(live, noted)

    def name_of(self, tensor: Tensor) -> str:
        """Return how messages call a tensor of a module."""
        for root in self.modules:  # the outermost come first
            for prefix, module in root.named_modules():
                for name, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
                    if value is tensor:
                        return ".".join(filter(None, (type(root).__name__, prefix, name)))
        return "a tensor of a module"

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors that are state, and parameters."""
        return *self.states.tensors, *(item.tensor for item in self.states.written), *self.parameters

    def held(self) -> Iterable[Tensor]:
        """Return the copies of tensors."""
        return self.states.held()


def _versions_of(gradients: Sequence[Tensor | None]) -> list[int | None]:
    for gradient in gradients:
        if gradient is not None:
            return [None if item is None else item._version for item in gradients]
    return []  # as mostly


def _has_no_version(tensor: Tensor) -> bool:
    return type(tensor) not in UNINITIALIZED and tensor.is_inference()
