"""Modules (Rule 12): a recomputation sees them as the forward did, and does not advance them a second time.

Of every module that the region can reach:

- attributes (`training`, a counter, a list of losses), children and hooks are what they were; what the recomputation does
  to them is undone;
- buffers, and tensors in attributes, have the bytes that they had, in the same memory (see `_engine/state/shadows.py`);
- parameters that something wrote to since are refused where the recomputation reads them (Rule 15);
- a module with `recompute_state()` and `load_recompute_state(state)` keeps whatever else it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from reactivate._engine.state.module_changes import ModuleChanges
from reactivate._engine.state.modules import ModuleNotes
from reactivate._engine.state.reached import ReachedNotes
from reactivate._engine.state.rewound_modules import RewoundModules
from reactivate._types import Call, Guard, Unrestored


class Stateful(Protocol):
    """A module with state that is neither in buffers nor in attributes: in nested objects, in a kernel library."""

    def recompute_state(self) -> Any:
        """A copy of the state."""

    def load_recompute_state(self, state: Any) -> None:
        """Set what `recompute_state` gave."""


class Modules(Guard):
    """Attributes, children, hooks, buffers and parameters of modules."""

    name = "modules"

    def before(self, call: Call) -> AnyNotes | None:
        modules = call.modules
        if call.is_large:
            return ReachedNotes(call)
        if not modules:
            return None
        what = call.module_notes, call.module_tensors, call.parts, call.look_into
        return ModuleNotes(modules, *what, call.may_write_unseen)

    def finish(self, token: AnyNotes | None) -> None:
        if token is not None:
            token.finish()

    def unrestored(self, token: AnyNotes | None) -> Sequence[Unrestored]:
        if token is None:
            return ()
        written, unknown = token.written_parameters(), token.unknown_gradients()
        if not (written or unknown):
            return ()
        found = [Unrestored(item, token.name_of(item), version) for item, version in written]
        return found + [Unrestored(item, "a gradient", version) for item, version in unknown]

    def recompute(self, snapshot: AnyNotes) -> AbstractContextManager[Any]:
        return RewoundModules(snapshot) if isinstance(snapshot, ModuleNotes) else snapshot.rewound()

    def skip(self, call: Call, token: AnyNotes | None) -> Callable[[], AbstractContextManager[Any] | None] | None:
        if token is None:
            return None
        return ModuleChanges(token).bring if isinstance(token, ModuleNotes) else token.changes()

    @staticmethod
    def rewound(state: AnyNotes) -> AbstractContextManager[None]:
        """Return the context of `recompute` for a whole step: without the lock, which other threads would wait for."""
        if isinstance(state, ModuleNotes):
            return RewoundModules(state, takes_turns=False)
        return state.rewound(takes_turns=False)


AnyNotes = ModuleNotes | ReachedNotes
