"""Policies that are tried: each in a simulated step, or in a real one where a simulation does not know what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch.nn import Module

from reactivate._torch.fake import unlogged
from reactivate._types import Storage
from reactivate.errors import UsageError
from reactivate.planner.cost.prediction import Proof
from reactivate.planner.place import Place
from reactivate.planner.profile.simulate import simulate
from reactivate.planner.profile.trace import Costs, Trace
from reactivate.planner.progress import Tell
from reactivate.planner.step import TrainingStep
from reactivate.planner.treatments import Assignment, Treatment
from reactivate.storage.rehearsal import Rehearsal

MARGIN = 0.05  # of its own peak, where the sizes of a step depend on its data: the loads of experts, say


class Trials:
    """Steps in which policies are tried.

    Args:
        step: the step.
        place: where it runs.
        units: the model's units by their paths.
        tell: reports progress.

    Attributes:
        with_values: whether they run for real: something in the step depends on values that it computes.
        margin: the part of a plan's own peak that is left free for batches with other sizes inside of the model.
    """

    def __init__(self, step: TrainingStep, place: Place, units: Mapping[str, Module], tell: Tell) -> None:
        self.with_values = False
        self.margin = 0.0
        self._step = step
        self._place = place
        self._units = units
        self._tell = tell

    def first(self, costs: Costs) -> Trace:
        """Run the plain step, with the calls of functions counted, and find out how steps can run.

        Raises:
            UsageError: it cannot be simulated, and it cannot run for real either, since the model is elsewhere.
            Exception: whatever the step raises.
        """
        self._tell("the plain step, simulated")
        try:
            with unlogged():
                return self.run({}, costs, count_functions=True)
        except UsageError:
            raise
        except Exception as error:
            if not self._place.is_here:
                raise UsageError(
                    f"plan: the step does something that cannot be simulated ({type(error).__name__}: {_first_line(error)}): "
                    "it needs values, as the counts of a router do. Plan the model where it has values and can run, or plan "
                    "the part of it in front of that, or behind it."
                ) from error
        self.with_values = True
        self._tell("the plain step, for real: it cannot be simulated")
        plain = self.run({}, costs, count_functions=True)
        self.margin = MARGIN if plain.depends_on_data else 0.0
        return plain

    def margin_of(self, peak_bytes: int) -> int:
        """Return the bytes that stay free beside a peak."""
        return math.ceil(peak_bytes * self.margin)

    def proof_of(self, fixed_bytes: int, peak_bytes: int, rounds: int) -> Proof:
        """Return what the last of some trials has proved.

        Args:
            fixed_bytes: what is there all the time.
            peak_bytes: the most that the step took above that.
            rounds: how many trials there were.
        """
        method = "real" if self.with_values else "simulated"
        return Proof(method, fixed_bytes + peak_bytes, rounds, self.margin_of(peak_bytes))

    def run(
        self,
        treatments: Mapping[str, Treatment],
        costs: Costs,
        storages: Mapping[str, Storage] | None = None,
        rehearsal: Rehearsal | None = None,
        *,
        count_functions: bool = False,
    ) -> Trace:
        """Return the step with treatments for some units.

        Args:
            treatments: by the paths of units.
            costs: what ops cost.
            storages: those that treatments use, by their names.
            rehearsal: of that storage.
            count_functions: whether to count the calls of torch's functions.
        """
        return simulate(
            self._step,
            Assignment(treatments, storages or {}),
            self._units,
            costs,
            self._place.device,
            with_values=self.with_values,
            count_functions=count_functions,
            rehearsal=rehearsal,
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
