"""Policies that are tried: each in a real step, or in a simulated one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping

from torch.nn import Module

from reactivate._region.accounts import is_shortage
from reactivate._torch.modes import lacks_values, unlogged
from reactivate._types import Storage
from reactivate.planner.by_value.call_costs import RecordedCall
from reactivate.planner.by_value.recorded_calls import recorded_calls
from reactivate.planner.cost.prediction import Proof
from reactivate.planner.data_margin import DataMargin
from reactivate.planner.first_trial import FirstTrial, PlainStep
from reactivate.planner.place import Place, available_bytes
from reactivate.planner.profile.simulate import simulate
from reactivate.planner.profile.trace import Costs, Trace
from reactivate.planner.progress import Tell
from reactivate.planner.ranks import Ranks
from reactivate.planner.step import TrainingStep
from reactivate.planner.treatments import Assignment, Treatment
from reactivate.storage.rehearsal import Rehearsal

SAVING_ALL = 2  # times as much memory as a plain step a step may take that saves all calls


class Trials:
    """Steps in which policies are tried.

    Args:
        step: the step.
        place: where it runs.
        units: the model's units by their paths.
        tell: reports progress.
        ranks: those that plan the step together.
        needs_fakes: whether steps are to be simulated wherever they can be: storages are rehearsed in these.
    """

    def __init__(
        self,
        step: TrainingStep,
        place: Place,
        units: Mapping[str, Module],
        tell: Tell,
        ranks: Ranks,
        *,
        needs_fakes: bool,
    ) -> None:
        self._step = step
        self._place = place
        self._units = units
        self._tell = tell
        self._plain = PlainStep(step, place, units, tell, ranks, needs_fakes=needs_fakes)
        self._found: FirstTrial | None = None

    def first(self, costs: Costs) -> Trace:
        """Return the plain step, with the calls of functions counted; it tells how all others run.

        Args:
            costs: what ops cost.

        Raises:
            Exception: see `PlainStep.tried`.
        """
        self._found = self._plain.tried(costs)
        return self._found.trace

    @property
    def _known(self) -> FirstTrial:
        assert self._found is not None, "the first trial comes first"
        return self._found

    @property
    def with_values(self) -> bool:
        """Return whether steps run for real."""
        return self._known.with_values

    @property
    def margin(self) -> DataMargin:
        """Return the room that is left for batches with other sizes inside of the model."""
        return DataMargin(self._place.margin, self._known.of_data)

    def record(
        self, functions: Mapping[str, Collection[str]], costs: Costs, plain_bytes: int
    ) -> dict[str, tuple[RecordedCall, ...]]:
        """Return the calls of some units; of none where a step that saves all calls may not fit and cannot be simulated.

        Args:
            functions: that they call, by their paths.
            costs: what ops cost.
            plain_bytes: what the plain step takes.
        """
        self._tell("the calls of blocks, recorded")
        device = self._place.device
        record = functools.partial(
            recorded_calls, self._step, self._units, functions, costs, device, self._known.answers
        )
        fits = SAVING_ALL * plain_bytes < available_bytes(device)
        if self.with_values and fits:
            return record(with_values=True)
        try:
            with unlogged():
                return record(with_values=False)
        except Exception as error:
            if not (self.need_values and lacks_values(error)):
                raise
        if fits and self._plain.may_run:
            return record(with_values=True)
        self._tell("the calls of blocks are not recorded: that takes values, and too little memory is free")
        return {}

    @property
    def need_values(self) -> bool:
        """Return whether steps need values: they run for real, or with answers."""
        return self.with_values or self._known.answers is not None

    def proof_of(self, trace: Trace, fixed_bytes: int, rounds: int) -> Proof:
        """Return what the last of some trials has proved.

        Args:
            trace: the last one.
            fixed_bytes: what is there all the time.
            rounds: how many trials there were.
        """
        method = "real" if trace.is_real else "simulated"
        return Proof(method, fixed_bytes + trace.peak_bytes, rounds, trace.margin_bytes)

    def run(
        self,
        treatments: Mapping[str, Treatment],
        costs: Costs,
        storages: Mapping[str, Storage] | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> Trace:
        """Return the step with treatments for some units.

        Args:
            treatments: by the paths of units.
            costs: what ops cost.
            storages: those that treatments use, by their names.
            rehearsal: of that storage.
        """
        known = self._known
        run = functools.partial(
            simulate,
            self._step,
            Assignment(treatments, storages or {}),
            self._units,
            costs,
            self._place.device,
            rehearsal=rehearsal,
        )
        if known.with_values:
            return _run_if_it_fits(run)
        if known.answers is None:
            return run()
        try:
            with unlogged():
                return run(answers=known.answers)
        except Exception as error:
            if not lacks_values(error):
                raise
            return self._plain.with_more_answers(treatments, costs, known.answers, error)


def _run_if_it_fits(run: Callable[..., Trace]) -> Trace:
    """Run a step for real; simulate it where memory is short by now: for a tighter plan, in the middle of a training.

    Raises:
        Exception: whatever the step raises: that memory ran out, if it cannot be simulated.
    """
    try:
        return run(with_values=True)
    except Exception as error:
        if not is_shortage(error):
            raise
        shortage = error
    try:
        with unlogged():
            return run()
    except Exception as error:
        if not lacks_values(error):
            raise
        raise shortage from None
