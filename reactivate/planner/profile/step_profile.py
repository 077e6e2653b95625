"""The findings of the profile of one batch that hold for others."""

from __future__ import annotations

from dataclasses import dataclass

from reactivate.planner.profile.trace import Costs


@dataclass(frozen=True)
class StepProfile:
    """The findings of a profile that hold for the step with arguments of other shapes.

    Attributes:
        costs: of ops.
        scale: from the seconds of ops to those of a step.
        others_bytes: what else is on an accelerator.
        optimizer_bytes: what the optimizer keeps, and the most that its step allocates beside that.
        is_predicted: whether nothing ran after all.
        uncertainty: by which part of it the time of the step was another when it was measured again.
    """

    costs: Costs
    scale: float
    others_bytes: int
    optimizer_bytes: tuple[int, int]
    is_predicted: bool
    uncertainty: float = 0.0
