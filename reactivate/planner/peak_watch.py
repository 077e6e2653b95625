"""Watches whether training keeps to a plan whose sizes depend on the data, where the allocator tells its peak."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from reactivate._region.accounts import in_words
from reactivate._text.warnings import warn


class PeakWatch:
    """Warns once, at the call of the model after the step that took more than the plan's budget.

    Args:
        budget_bytes: the budget.
        device: an accelerator.
    """

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self._budget_bytes = budget_bytes
        self._device = device
        self._known_bytes = max(budget_bytes, self._peak_bytes())  # what went on before the plan is not the plan's

    def __reduce__(self) -> tuple[Any, ...]:
        return PeakWatch, (self._budget_bytes, self._device)

    def _peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device))

    def __call__(self, model: Module, args: Any) -> None:
        """The model is called."""
        if self._known_bytes < 0 or not torch.is_grad_enabled():
            return
        peak_bytes = self._peak_bytes()
        if peak_bytes > self._known_bytes:
            self._known_bytes = -1
            warn(
                f"A step took {in_words(peak_bytes)}, and the plan's budget is {in_words(self._budget_bytes)}: sizes in this "
                "model depend on its data, and those of the batch that was planned were smaller. Plan with that batch, or "
                f"with a budget that is smaller by {in_words(peak_bytes - self._budget_bytes)}."
            )
