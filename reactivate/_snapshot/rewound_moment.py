"""A rewinding: everything as it was at a moment, for the time of a recomputation, and then as it was before that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from torch import Tensor

from reactivate._snapshot.geometry import addresses_of, give_memory_back, kept_elsewhere
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.parts import Parts
from reactivate._snapshot.rewound_tensors import RewoundTensors
from reactivate._snapshot.state_lock import STATE_LOCK, Scope
from reactivate._snapshot.tensor_hooks import Hooks, are_same_hooks, hooks_on, put_hooks_on
from reactivate._snapshot.tensor_states import NO_TENSORS
from reactivate._snapshot.trees import Tree
from reactivate._torch.modes import copy_unseen, run_unseen

_REQUIRES_GRAD, _IS_LEAF, _GRADIENT = map(attrgetter, ("requires_grad", "is_leaf", "grad"))
_is_tensor = Tensor.__instancecheck__  # `isinstance` as a function of one argument


class RewoundMoment:
    """Objects, modules and tensors as they were at a moment, for as long as the context lasts.

    Args:
        moment: what they were.
        arguments: what stands for the moment's arguments in the recomputation, in their order; None for what is gone.
        others: what else it is called with.

    What the recomputation hooks on tensors among these is taken away again, and gradients that it clears are put back.
    """

    _is_bare = True  # there is nothing to set back now: a function of its arguments alone
    _light: Tree | None = None  # that of the moment, if it still held when the context was entered
    _tensors: RewoundTensors | None = None
    _parts: Parts | None = None
    _kinds: Sequence[type] = ()
    _differentiable: Sequence[bool] = ()
    _protocols: Sequence[Any] = ()
    _elsewhere: Sequence[Any] = ()
    _gradients: Sequence[tuple[Tensor, Tensor | None]] = ()
    _others: Sequence[int] = ()  # the numbers of objects that hold something else than at the moment
    _contents: Mapping[int, Any] = MappingProxyType({})  # what these held, by their numbers
    _wanted_hooks: Hooks = ()
    _tensor_hooks: Hooks = ()
    _are_tensor_hooks_other = False
    _leaves: Sequence[Tensor] = ()
    _graded: Sequence[Tensor | None] = ()  # their gradients

    def __init__(self, moment: Moment, arguments: Iterable[Any] = (), others: Iterable[Any] = ()) -> None:
        self._moment = moment
        self._hook_copies = moment.hook_copies
        if moment.states is not NO_TENSORS:
            self._tensors = RewoundTensors(moment.states)
        found = [*arguments, *moment.parameters, *others]
        self._hooked: Sequence[Tensor] = list(filter(_is_tensor, found))
        if moment.tensor_hooks:
            self._wanted_hooks = [hooks for item, hooks in zip(found, moment.tensor_hooks) if _is_tensor(item)]

    def __enter__(self) -> None:
        moment = self._moment
        if moment.light is not None and moment.light.still_holds():
            self._is_bare, self._light = False, moment.light
            self._parts, self._kinds = moment.parts, moment.kinds
            return
        if self._hooked:
            self._tensor_hooks = hooks_on(self._hooked)
            self._leaves = list(filter(_IS_LEAF, self._hooked))
            self._graded = list(map(_GRADIENT, self._leaves))
        if self._tensor_hooks or self._wanted_hooks:
            self._are_tensor_hooks_other = not are_same_hooks(self._tensor_hooks, self._wanted_hooks)
        if not (moment.has_state or moment.leaves or self._are_tensor_hooks_other or any(moment.hooks)):
            return
        self._is_bare = False
        if moment.protocols:
            self._protocols = [module.recompute_state() for module, _ in moment.protocols]
        if moment.parameters:
            self._differentiable = list(map(_REQUIRES_GRAD, moment.parameters))
            if addresses_of(moment.parameters) != moment.addresses:
                self._elsewhere = run_unseen(kept_elsewhere, moment.parameters, moment.addresses)
        STATE_LOCK.take_turn_if(self._differs)
        try:
            self._rewind()
        except BaseException:
            self.__exit__()
            raise

    def _differs(self) -> Scope:
        """Return what is to be set back that other threads could see, and note what is there now."""
        moment = self._moment
        parts = moment.parts
        self._are_hooks_other = not moment.are_hooks_current(moment.hook_copies)
        is_shared = self._are_hooks_other or self._are_tensor_hooks_other
        if moment.holders:
            self._others = moment.others()
            is_shared |= any(moment.holders[index].is_shared for index in self._others)
        if parts is not None:
            self._kinds = list(map(type, moment.modules))
            self._parts = parts if parts.are_current() else Parts(parts.namespaces)
            is_shared |= self._parts is not parts or self._kinds != moment.kinds or bool(moment.protocols)
        are_tensors_other = self._tensors is not None and self._tensors.differs()
        return Scope.EVERYTHING if is_shared else Scope.TENSORS if are_tensors_other else Scope.NOTHING

    def _rewind(self) -> None:
        moment = self._moment
        tensors, self._tensors = self._tensors, None  # until they are rewound: an error may come before
        if self._kinds != moment.kinds or self._differentiable != moment.differentiable:
            _set_all(moment, moment.kinds, moment.differentiable)
        if moment.parts is not None and self._parts is not moment.parts:
            moment.parts.put()
            self._others = range(len(moment.holders))  # perhaps one of these was a part
        # Before the objects, since a dict of attributes may be noted both ways: here its present contents are noted.
        if self._are_hooks_other:
            self._hook_copies = [(*item, *item.values()) for item in moment.hooks]
            moment.put_hooks(moment.hook_copies)
        if self._are_tensor_hooks_other:
            put_hooks_on(self._hooked, self._wanted_hooks)
        if self._others:
            self._put_contents()
        if tensors is not None:
            tensors.__enter__()
            self._tensors = tensors
        if moment.leaves:
            moment.look_at_gradients()
        if moment.accumulated:
            self._gradients = [(leaf, leaf.grad) for leaf, _ in moment.accumulated]
            for leaf, before in moment.accumulated:
                leaf.grad = None if before is None else copy_unseen(before)
        for module, state in moment.protocols:
            module.load_recompute_state(state)

    def _put_contents(self) -> None:
        moment = self._moment
        self._contents = present = {}
        for index in self._others:
            holder, contents = moment.holders[index], moment.contents[index]
            if not holder.is_at(contents):
                present[index] = holder.get()
                holder.put(contents)

    def __exit__(self, *error: object) -> None:
        moment = self._moment
        if self._is_bare:
            self._put_back_what_tensors_have()
            if any(moment.hooks):
                moment.put_hooks(None)
            return
        if self._light is not None and self._light.still_holds():
            vars(self).clear()
            return
        try:
            if self._protocols:
                for (module, _), now in zip(moment.protocols, self._protocols):
                    module.load_recompute_state(now)
        finally:
            for leaf, gradient in self._gradients:
                leaf.grad = gradient
            if self._hooked:
                self._put_back_what_tensors_have()
            if self._tensors is not None:
                self._tensors.__exit__()
            if moment.holders:
                self._put_back_contents()
            if self._parts is not None and not self._parts.are_current():
                self._parts.put()
            if not moment.are_hooks_current(self._hook_copies):
                moment.put_hooks(self._hook_copies)
            if moment.modules or moment.parameters:
                _set_all(moment, self._kinds, self._differentiable)
            if self._elsewhere:
                run_unseen(give_memory_back, self._elsewhere)
            vars(self).clear()  # a traceback may hold this context

    def _put_back_what_tensors_have(self) -> None:
        """Put back the hooks on tensors, and the gradients that have been cleared: others may have been added to since."""
        put_hooks_on(self._hooked, self._tensor_hooks)
        for leaf, gradient in zip(self._leaves, self._graded):
            if gradient is not None and leaf.grad is None:
                leaf.grad = gradient

    def _put_back_contents(self) -> None:
        moment = self._moment
        # The last first: an object that was noted twice was found rewound the second time.
        for index in sorted({*self._contents, *moment.others()}, reverse=True):
            holder, contents = moment.holders[index], self._contents.get(index, moment.contents[index])
            if not holder.is_at(contents):
                holder.put(contents)


def _set_all(moment: Moment, kinds: Sequence[type], differentiable: Sequence[bool]) -> None:
    """Give modules their classes, and parameters their `requires_grad`."""
    if list(map(type, moment.modules)) != kinds:
        for module, kind in zip(moment.modules, kinds):
            if type(module) is not kind:
                module.__class__ = kind
    if list(map(_REQUIRES_GRAD, moment.parameters)) != differentiable:
        for tensor, flag in zip(moment.parameters, differentiable):
            if tensor.is_leaf and tensor.requires_grad is not flag:
                tensor.requires_grad = flag
