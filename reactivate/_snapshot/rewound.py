"""A rewinding: everything as it was at a moment, for the time of a recomputation, and then as it was before that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from reactivate._snapshot.geometry import give_back, kept_elsewhere
from reactivate._snapshot.holders import Contents
from reactivate._snapshot.locks import STATE_LOCK
from reactivate._snapshot.moment import Moment
from reactivate._snapshot.parts import Parts
from reactivate._snapshot.rewound_tensors import RewoundTensors
from reactivate._torch.modes import copy_unseen, run_unseen

_REQUIRES_GRAD = attrgetter("requires_grad")
_BACKWARD, _ACCUMULATED = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_UNCHANGED: Any = object()


class RewoundMoment:
    """Objects, modules and tensors as they were at a moment, for as long as the context lasts.

    Args:
        moment: what they were.
        arguments: tensors that the recomputation is called with: what it hooks on them is taken away again.
        takes_turns: whether other threads have to wait where something is rewound.
    """

    __slots__ = (
        *(
            "_are_hooks_current",
            "_are_same",
            "_contents",
            "_differentiable",
            "_elsewhere",
            "_gradients",
            "_hook_copies",
            "_hooked",
        ),
        *("_kinds", "_moment", "_parts", "_protocols", "_takes_turns", "_tensor_hooks", "_tensors", "_turn"),
    )

    def __init__(self, moment: Moment, arguments: Sequence[Tensor] = (), *, takes_turns: bool = True) -> None:
        self._moment = moment
        self._takes_turns = takes_turns
        self._tensors = RewoundTensors(moment.states) if moment.states.tensors or moment.states.written else None
        self._hooked = [*arguments, *moment.parameters]

    def __enter__(self) -> None:
        moment = self._moment
        self._protocols = [module.recompute_state() for module, _ in moment.protocols]
        self._hook_copies: Any = _UNCHANGED
        self._contents: list[Any] = []
        self._are_same = False
        self._gradients: Sequence[tuple[Tensor, Tensor | None]] = ()
        self._differentiable: list[bool] = list(map(_REQUIRES_GRAD, moment.parameters))
        self._elsewhere = run_unseen(kept_elsewhere, moment.parameters, moment.addresses) if moment.parameters else ()
        self._tensor_hooks = _hooks_on(self._hooked) if self._hooked else None
        self._turn = STATE_LOCK.enter(self._differs) if self._takes_turns else None
        if self._turn is None:
            self._differs()
        try:
            self._rewind()
        except BaseException:
            self.__exit__()
            raise

    def _differs(self) -> bool:
        """Return whether anything is to be set back that other threads could see, and note what is there now."""
        moment, parts = self._moment, self._moment.parts
        self._parts: Parts | None = None
        if parts is not None:
            self._parts = parts if parts.are_current() else Parts(parts.namespaces)
        self._are_hooks_current = moment.are_hooks_current(moment.hook_copies)
        self._kinds: list[type] = list(map(type, moment.modules))
        are_tensors_other = self._tensors is not None and self._tensors.differs()
        held = zip(moment.holders, moment.contents)
        others = [holder.is_shared for holder, contents in held if not holder.is_at(contents)] if moment.holders else ()
        self._are_same = not others and self._parts is parts
        are_objects_other = any(others)
        return (
            are_tensors_other
            or are_objects_other
            or self._parts is not parts
            or not self._are_hooks_current
            or self._kinds != moment.kinds
            or bool(moment.protocols)
        )

    def _rewind(self) -> None:
        moment = self._moment
        if self._kinds != moment.kinds or self._differentiable != moment.differentiable:
            _set_all(moment, moment.kinds, moment.differentiable)
        if self._parts is not moment.parts and moment.parts is not None:
            moment.parts.put()
        if not self._are_hooks_current:
            self._hook_copies = [(*item, *item.values()) for item in moment.hooks]
            moment.put_hooks(moment.hook_copies)
        pairs = () if self._are_same else zip(moment.holders, moment.contents)
        for holder, contents in pairs:
            if holder.is_at(contents):
                self._contents.append(_UNCHANGED)
            else:
                self._contents.append(holder.get())
                holder.put(contents)
        if self._tensors is not None:
            tensors, self._tensors = self._tensors, None
            tensors.__enter__()
            self._tensors = tensors
        moment.look_at_gradients()
        if moment.accumulated:
            self._gradients = [(leaf, leaf.grad) for leaf, _ in moment.accumulated]
            for leaf, before in moment.accumulated:
                leaf.grad = None if before is None else copy_unseen(before)
        for module, state in moment.protocols:
            module.load_recompute_state(state)

    def __exit__(self, *error: object) -> None:
        moment = self._moment
        try:
            for (module, _), now in zip(moment.protocols, self._protocols):
                module.load_recompute_state(now)
        finally:
            _put_hooks_on(self._hooked, self._tensor_hooks)
            for leaf, gradient in self._gradients:
                leaf.grad = gradient
            if self._tensors is not None:
                self._tensors.__exit__()
            if moment.holders:
                self._put_back_contents()
            if self._parts is not None and not self._parts.are_current():
                self._parts.put()
            hooks = moment.hook_copies if self._hook_copies is _UNCHANGED else self._hook_copies
            if not moment.are_hooks_current(hooks):
                moment.put_hooks(hooks)
            if moment.modules or moment.parameters:
                _set_all(moment, self._kinds, self._differentiable)
            if self._elsewhere:
                run_unseen(give_back, self._elsewhere)
            # A traceback may hold this context.
            self._parts = self._tensors = None
            self._elsewhere, self._protocols, self._hooked, self._gradients = (), [], [], ()
            self._hook_copies = self._tensor_hooks = None
            if self._turn is not None:
                STATE_LOCK.leave(*self._turn)

    def _put_back_contents(self) -> None:
        # The last first: an object that was noted twice was found rewound the second time.
        moment, present = self._moment, self._contents
        if self._are_same and not present:
            present = [_UNCHANGED] * len(moment.holders)
        for index in range(len(present) - 1, -1, -1):
            contents: Contents = moment.contents[index] if present[index] is _UNCHANGED else present[index]
            if not moment.holders[index].is_at(contents):
                moment.holders[index].put(contents)
        self._contents = []


def _hooks_on(tensors: Sequence[Tensor]) -> list[Any] | None:
    """Copy the hooks on tensors, None if there are none: what a recomputation registers goes, so that each fires once."""
    if any(map(_BACKWARD, tensors)) or any(map(_ACCUMULATED, tensors)):
        return [None if item is None else dict(item) for item in _dicts_on(tensors)]
    return None


def _dicts_on(tensors: Sequence[Tensor]) -> Iterable[Any]:
    return [*map(_BACKWARD, tensors), *map(_ACCUMULATED, tensors)]


def _put_hooks_on(tensors: Sequence[Tensor], before: list[Any] | None) -> None:
    if before is not None or any(map(_BACKWARD, tensors)) or any(map(_ACCUMULATED, tensors)):
        hooks = list(_dicts_on(tensors))
        for now, hooked in zip(hooks, before or [None] * len(hooks)):
            if now is not None and dict(now) != (hooked or {}):
                now.clear()
                now.update(hooked or {})


def _set_all(moment: Moment, kinds: list[type], differentiable: list[bool]) -> None:
    """Give modules their classes, and parameters their `requires_grad`."""
    if list(map(type, moment.modules)) != kinds:
        for module, kind in zip(moment.modules, kinds):
            if type(module) is not kind:
                module.__class__ = kind
    if list(map(_REQUIRES_GRAD, moment.parameters)) != differentiable:
        for tensor, flag in zip(moment.parameters, differentiable):
            if tensor.is_leaf and tensor.requires_grad is not flag:
                tensor.requires_grad = flag
