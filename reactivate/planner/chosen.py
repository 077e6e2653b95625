"""A choice for a step that was proved, with its copies on the clock: what a plan is written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reactivate.planner.cost.flow import Flow
from reactivate.planner.solver.solution import Proven
from reactivate.planner.treatments import Treatment


@dataclass(frozen=True)
class ChosenStep:
    """A choice that was simulated.

    Attributes:
        proven: the choice.
        own_seconds: what the step takes, without waiting for copies.
        flow: the copies.
        heads: {path: what is done with it} of the modules whose loss is computed by rows.
        head_seconds: how much longer the step takes by that.
    """

    proven: Proven
    own_seconds: float
    flow: Flow
    heads: Mapping[str, Treatment] = field(default_factory=dict)
    head_seconds: float = 0.0

    @property
    def trace_bytes(self) -> int:
        """Return the peak of what the step allocates itself."""
        return self.proven.trace.peak_bytes

    @property
    def needed_bytes(self) -> int:
        """Return the same, with what is to be left free beside it."""
        return self.proven.trace.needed_bytes

    @property
    def seconds(self) -> float:
        """Return what the step takes."""
        return self.own_seconds + self.flow.waited_seconds
