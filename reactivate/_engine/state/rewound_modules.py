"""Modules as they were when a region began, for the time of a recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

from reactivate._engine.state.contents import put_dict
from reactivate._engine.state.geometry import give_back, kept_elsewhere
from reactivate._engine.state.modules import ModuleNotes
from reactivate._engine.state.notes import RewoundNotes
from reactivate._engine.state.parts import Parts
from reactivate._engine.state.rewound import RewoundTensors
from reactivate._engine.state.tensor_hooks import KeptHooks
from reactivate._engine.state.turns import everybodys
from reactivate._torch.modes import run_unseen

_REQUIRES_GRAD = attrgetter("requires_grad")


class RewoundModules:
    """Modules as they were, for as long as the context lasts.

    Args:
        note: the modules, and what they were.
        takes_turns: whether other threads have to wait where something is rewound.
    """

    __slots__ = (
        *(
            "_are_hooks_current",
            "_differentiable",
            "_elsewhere",
            "_entered",
            "_hook_copies",
            "_inner",
            "_kinds",
            "_notes",
        ),
        *("_parts", "_states", "_takes_turns", "_tensors", "_turn", "note"),
    )

    def __init__(self, note: ModuleNotes, *, takes_turns: bool = True) -> None:
        self.note = note
        self._takes_turns = takes_turns
        self._notes = RewoundNotes(note.notes) if note.notes else None
        self._tensors = RewoundTensors(note.tensors) if note.tensors.tensors else None
        inner: Any = self._notes, self._tensors, None if note.gradients.is_quiet() else note.gradients
        self._inner: list[AbstractContextManager[None]] = [context for context in inner if context is not None]
        if note.parameters:
            self._inner.append(KeptHooks(note.parameters))

    def __enter__(self) -> None:
        note = self.note
        self._entered: list[Any] = []
        self._states = [module.recompute_state() for module, _ in note.states]
        self._hook_copies: list[Any] | None = None
        self._differentiable: list[bool] = list(map(_REQUIRES_GRAD, note.parameters))
        self._elsewhere = run_unseen(kept_elsewhere, note.parameters, note.addresses)
        self._turn = everybodys.enter(self._differs) if self._takes_turns else None
        if self._turn is None:
            self._differs()
        try:
            if self._kinds != note.kinds or self._differentiable != note.differentiable:
                _set_all(note, note.kinds, note.differentiable)
            if self._parts is not note.parts:
                note.parts.put()
                if self._notes is not None:
                    self._notes.are_same = False  # an attribute may be noted as well
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
        are_notes_other = self._notes is not None and self._notes.differs()
        return (
            are_tensors_other
            or are_notes_other
            or self._parts is not note.parts
            or not self._are_hooks_current
            or self._kinds != note.kinds
            or bool(note.states)
        )

    def __exit__(self, *error: object) -> None:
        note = self.note
        try:
            for (module, _), now in zip(note.states, self._states):
                module.load_recompute_state(now)
        finally:
            for context in reversed(self._entered):
                context.__exit__(None, None, None)
            if self._parts is not None and not self._parts.are_current():
                self._parts.put()
            hooks = note.hook_copies if self._hook_copies is None else self._hook_copies
            if not note.are_hooks_current(hooks):
                _put_hooks(note.hooks, hooks)
            _set_all(note, self._kinds, self._differentiable)
            if self._elsewhere:
                run_unseen(give_back, self._elsewhere)
                self._elsewhere = ()
            self._parts = self._hook_copies = None  # a traceback may hold this context
            self._states = []
            if self._turn is not None:
                everybodys.leave(self._turn)


def _set_all(note: ModuleNotes, kinds: list[type], differentiable: list[bool]) -> None:
    """Give modules their classes, and parameters their `requires_grad`."""
    if list(map(type, note.modules)) != kinds:
        for module, kind in zip(note.modules, kinds):
            if type(module) is not kind:
                module.__class__ = kind
    if list(map(_REQUIRES_GRAD, note.parameters)) != differentiable:
        for tensor, flag in zip(note.parameters, differentiable):
            if tensor.is_leaf and tensor.requires_grad is not flag:
                tensor.requires_grad = flag


def _put_hooks(hooks: Sequence[Any], copies: Sequence[Any] | None) -> None:
    for live, noted in zip(hooks, copies or [{}] * len(hooks)):
        put_dict(live, noted)
