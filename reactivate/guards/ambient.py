"""Ambient state (Rule 11): what is set around a call and decides what its ops do.

Flags of torch, autocast, function modes (`torch.device` as a context is one), dispatch modes of the user's, the current
device and stream: a recomputation runs under those that were around the forward pass. (Context variables are the engine's
affair: it runs every recomputation in the context of its forward pass.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from reactivate._snapshot.ambient import AmbientState
from reactivate._types import Call, Guard


class Ambient(Guard):
    """Everything that is set around the forward pass."""

    name = "ambient"
    _last: AmbientState | None = None

    def before(self, call: Call) -> AmbientState:
        last = self._last
        if last is not None and last.is_set():
            return last  # many regions share it
        settings = AmbientState()
        settings.note_modes()
        if settings.rest is None or not (settings.rest.function_modes or settings.rest.dispatch_modes):
            self._last = settings  # a mode must not be held, and is compared as it likes
        return settings

    def recompute(self, snapshot: AmbientState) -> AbstractContextManager[Any]:
        return snapshot.rewound()
