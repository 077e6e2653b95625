"""A tracker with the published signature and meaning of Megatron's and TransformerEngine's, on the CPU.

Written for the tests: states are live handles that `set_states` takes as they are; a fork writes to the generator of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class CpuRngStatesTracker:
    """Named states of the CPU generator; with `notes_current`, as Megatron has it, a stream may be forked inside itself."""

    def __init__(self, notes_current: bool) -> None:
        self.states_: dict[str, Any] = {}
        self.notes_current = notes_current
        if notes_current:
            self._current_state_name = "default-rng"

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        around, outer = torch.get_rng_state(), getattr(self, "_current_state_name", "default-rng")
        if outer != "default-rng":
            self.states_[outer] = around
        torch.set_rng_state(self.states_[name])
        if self.notes_current:
            self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(around if outer == "default-rng" else self.states_[outer])
            if self.notes_current:
                self._current_state_name = outer


class GraphSafeTracker:
    """Named generators that are never replaced, as a CUDA graph needs them: their handles are given out live."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Generator] = {}

    def get_states(self) -> dict[str, torch.Generator]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Generator]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = torch.Generator().manual_seed(seed)

    def draw(self, name: str, size: int) -> Tensor:
        return torch.rand(size, generator=self.states_[name])
