"""The context variables among what is reached: any function may ask for their values, so all of them are looked at."""

from __future__ import annotations

from contextvars import Context
from typing import Any

from reactivate._engine.inputs.module_walk import ModuleWalk
from reactivate._engine.inputs.walk import DEPTH
from reactivate._engine.state.contents import ATOMS, LARGEST
from reactivate._engine.state.context_values import COPIED, ContextNote, Copied
from reactivate._engine.state.held import held

_OURS = "reactivate."
"""The beginning of the names of this package's own context variables, which hold no state of a region."""


class ContextWalk(ModuleWalk):
    """A walk that looks into the values of context variables."""

    is_large = False
    _context_notes: tuple[ContextNote, ...] = ()

    def _look_at_context(self, context: Context) -> None:
        """Look at what the variables hold, and note the containers that nothing else has led to."""
        self._copied: dict[int, Copied] = {}
        for variable, value in context.items():
            if type(value) not in ATOMS and not variable.name.startswith(_OURS):
                noted = self._noted(value, f"the context variable `{variable.name}`")
                if type(noted) is Copied:
                    self._context_notes += (ContextNote(variable, noted),)

    def _noted(self, value: Any, place: str) -> Any:
        """Return what a note holds for a value: of a container what it holds, so that the container can go."""
        kind = type(value)
        if kind in ATOMS or id(value) in self._specs:
            return value
        if id(value) in self._copied:
            return self._copied[id(value)]
        is_tuple = kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_make"))
        if not (is_tuple or kind in COPIED) or len(value) > LARGEST:
            self._look(value, place, DEPTH)
            return held(value)
        noted = self._copied[id(value)] = Copied(value)
        items = list(value.values() if isinstance(value, dict) else value)
        keys = noted.keys or range(len(items))
        noted.parts = [self._noted(item, f"{place}[{key!r}]") for key, item in zip(keys, items)]
        if is_tuple and all(part is item for part, item in zip(noted.parts, items)):
            return value
        return noted

    def _settle_context(self, context: Context) -> None:
        """Let go of the containers, but for those that modules hold too: of these a recomputation has no second one.

        Args:
            context: the region's own. It has nothing in the place of the containers.
        """
        held_by_modules = {id(note.target) for note in self.module_notes}
        for key, copied in self._copied.items():
            if key not in held_by_modules:
                copied.let_go()
        for note in self._context_notes:
            if self.is_large:  # which modules reach what is not known yet: rewound in place
                self._look(context[note.target], f"the context variable `{note.name}`", DEPTH)
            elif note.noted.original is None:
                self.notes.append(note)
                context.run(note.target.set, None)
