"""Changes that a saved call makes to modules: a recomputation that skips the call brings them about."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from reactivate._engine.state.contents import ATOMS, Note
from reactivate._engine.state.modules import ModuleNotes
from reactivate._engine.state.notes import RewoundNotes
from reactivate._engine.state.parts import Parts
from reactivate._engine.state.rewound import RewoundTensors
from reactivate._engine.state.tensor_states import NO_TENSORS, TensorStates, version_of
from reactivate._torch.modes import copy_unseen
from reactivate._torch.versions import set_versions


class ModuleChanges:
    """Modules as a saved call left them, next to what they were when the region began.

    It is brought about inside of `RewoundModules`, which puts everything back afterwards.
    """

    __slots__ = ("_counted", "contents", "made", "made_tensors", "note", "notes", "parts", "states", "versions")

    def __init__(self, note: ModuleNotes) -> None:
        self.note = note
        self.parts = None
        self.made: Sequence[Note] = ()
        self.made_tensors = NO_TENSORS
        if not note.parts.are_current():
            self.parts = Parts(note.parts.namespaces)
            self._look_at_made(self.parts.attributes)
            self.parts.hold()
        self.contents = [(tensor, copy_unseen(tensor)) for tensor in note.tensors.put_aside()]
        self._counted = [tensor for tensor, _ in self.contents if not tensor.is_inference()]
        self.versions = list(map(version_of, self._counted))
        self.notes = [(item, item.contents()) for item in note.notes if not item.is_at(item.noted)]
        self.states = [(module, module.recompute_state()) for module, _ in note.states]

    def _look_at_made(self, attributes: Sequence[Any]) -> None:
        """Note what new objects hold: the rest of the region, and calls after it, go on with them."""
        known = set(map(id, self.note.parts.attributes))
        new = [value for value in attributes if id(value) not in known and type(value) not in ATOMS]
        if new and self.note.look_into is not None:
            plain = [value for value in new if isinstance(value, Tensor) and value.grad_fn is None]
            self.made, tensors = self.note.look_into(new)
            self.made_tensors = TensorStates((*plain, *tensors))

    def bring(self) -> AbstractContextManager[Any] | None:
        """Make it so; what new objects hold, for as long as the context lasts."""
        if self.parts is not None:
            self.parts.put()
        for tensor, content in self.contents:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(content)
        set_versions(self._counted, self.versions)
        for note, contents in self.notes:
            note.put(contents)
        for module, state in self.states:
            module.load_recompute_state(state)
        if not (self.made or self.made_tensors.tensors):
            return None
        stack = ExitStack()
        stack.enter_context(RewoundNotes(self.made))
        stack.enter_context(RewoundTensors(self.made_tensors))
        return stack
