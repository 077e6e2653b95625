"""A choice for a step that was proved, with its copies on the clock: what a plan is written from."""

from __future__ import annotations

from dataclasses import dataclass

from reactivate.planner.cost.flow import Flow
from reactivate.planner.solver.solution import Proven


@dataclass(frozen=True)
class ChosenStep:
    """A choice that was simulated.

    Attributes:
        proven: the choice.
        own_seconds: what the step takes, without waiting for copies.
        flow: the copies.
    """

    proven: Proven
    own_seconds: float
    flow: Flow

    @property
    def trace_bytes(self) -> int:
        """Return the peak of what the step allocates itself."""
        return self.proven.trace.peak_bytes

    @property
    def seconds(self) -> float:
        """Return what the step takes."""
        return self.own_seconds + self.flow.waited_seconds
