"""Changes of modules within a forward: where a recomputation has to bring them when it skips a saved call."""

from __future__ import annotations

import torch

from reactivate._compat import copy_unseen, set_versions
from reactivate._state.contents import held
from reactivate._state.modules import ModuleNotes, assign


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
