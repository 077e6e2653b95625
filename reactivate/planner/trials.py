"""Policies that are tried: each in a real step, or in a simulated one.

A real step knows all that its values decide. A simulated one needs neither memory nor compute: it takes the place of a real
step that does not fit or cannot run here, and of one that takes longer. Where values decide, one real step tells all
simulated ones what they cannot know.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from time import perf_counter

import torch
from torch.nn import Module

from reactivate._torch.fake import unlogged
from reactivate._torch.sharding import is_sharded
from reactivate._types import Storage
from reactivate.errors import UsageError
from reactivate.planner.by_value.call_costs import RecordedCall
from reactivate.planner.by_value.recorded_calls import recorded_calls
from reactivate.planner.cost.prediction import Proof
from reactivate.planner.place import RESERVE, Place, available_bytes, is_alone
from reactivate.planner.profile.answers import RealAnswers
from reactivate.planner.profile.costs import seconds_of
from reactivate.planner.profile.simulate import simulate
from reactivate.planner.profile.trace import Costs, Trace
from reactivate.planner.progress import Tell
from reactivate.planner.step import TrainingStep
from reactivate.planner.treatments import FULL, Assignment, Treatment
from reactivate.planner.unsimulated import among_ranks, too_large, without_values
from reactivate.storage.rehearsal import Rehearsal

MARGIN = 0.05  # of its own peak, where the sizes of a step depend on its data: the loads of experts, say


QUICK = 0.2  # seconds of a real step that no simulation is compared with
SAVING_ALL = 2  # times as much memory as a plain step a step may take that saves all calls
MOST_OPS = 20_000  # of a step that is simulated only to find out whether sizes depend on the data


class _Stopped(BaseException):
    """A step needs more memory than is free, or more time than another way to run it: no `except Exception` takes it."""


class Trials:
    """Steps in which policies are tried.

    Args:
        step: the step.
        place: where it runs.
        units: the model's units by their paths.
        tell: reports progress.
        needs_fakes: whether steps are to be simulated wherever they can be: storages are rehearsed in these.
        is_shared: whether other ranks try policies of the same step, so that none runs for real.

    Attributes:
        with_values: whether they run for real.
        margin: the part of a plan's own peak that is left free for batches with other sizes inside of the model.
    """

    def __init__(
        self,
        step: TrainingStep,
        place: Place,
        units: Mapping[str, Module],
        tell: Tell,
        *,
        needs_fakes: bool,
        is_shared: bool = False,
    ) -> None:
        self.with_values = False
        self.margin = 0.0
        self._answers: RealAnswers | None = None  # those that simulated steps need
        self._step = step
        self._place = place
        self._units = units
        self._tell = tell
        # How many steps run depends on measured times: other ranks would wait for the collectives of a real one.
        self._never_real = is_shared or is_sharded(step.model)
        self._needs_fakes = needs_fakes or self._never_real or not is_alone()

    def first(self, costs: Costs) -> Trace:
        """Run the plain step, with the calls of functions counted, and find out how steps can run.

        Raises:
            UsageError: it cannot be simulated without values, and the model has none.
            UnsupportedError: likewise, and it cannot run for real either: it does not fit, or other ranks would wait for it.
            Exception: whatever the step raises.
        """
        recorded = self._recorded(costs) if self._place.is_here and not self._needs_fakes else None
        return self._simulated(costs) if recorded is None else recorded

    def _recorded(self, costs: Costs) -> Trace | None:
        """Run the plain step for real; None where it does not fit, or where a simulation takes less time."""
        self._tell("the plain step")
        self.with_values = True
        answers = RealAnswers()
        try:
            trace, seconds = self._timed(costs, self._within_memory(), answers)
            if seconds > QUICK:  # maybe since it was the first
                trace, seconds = self._timed(costs, self._within_memory())
        except (_Stopped, torch.OutOfMemoryError):
            self.with_values = False
            return None
        if seconds <= QUICK and not trace.depends_on_data:
            return trace
        began = perf_counter()
        is_short = len(trace.ops) <= MOST_OPS
        simulated = self._simulated_within(costs, math.inf if trace.depends_on_data and is_short else seconds, answers)
        if simulated is None and trace.depends_on_data:  # nobody knows whether its sizes do
            self.margin = MARGIN
        if simulated is None or seconds <= max(QUICK, perf_counter() - began):
            self.with_values = True
            return trace
        return simulated

    def _simulated_within(self, costs: Costs, seconds: float, answers: RealAnswers) -> Trace | None:
        """Simulate the plain step; None if that cannot be, or takes more time."""
        self._tell("the plain step, simulated")
        self.with_values = False
        began = perf_counter()

        def watch(live_bytes: int) -> None:
            if perf_counter() - began > seconds:
                raise _Stopped

        try:
            return self._with_answers(answers, costs, watch)
        except (_Stopped, Exception):  # whatever fake tensors raise where they need values
            return None

    def _with_answers(self, answers: RealAnswers, costs: Costs, watch: Callable[[int], None] | None = None) -> Trace:
        """Simulate the plain step; where it needs answers, all later ones get them, and other batches may come to others."""
        self._answers = answers
        try:
            with unlogged():
                return self.run({}, costs, count_functions=True, watch=watch)
        finally:
            self._answers = answers if answers.are_used else None
            self.margin = MARGIN if answers.are_used else 0.0

    def _timed(
        self, costs: Costs, watch: Callable[[int], None], answers: RealAnswers | None = None
    ) -> tuple[Trace, float]:
        found: list[Trace] = []

        def run() -> None:
            found.append(self._real({}, costs, watch, answers))

        seconds = seconds_of(run, self._place.device)
        return found[0], seconds

    def _real(
        self,
        treatments: Mapping[str, Treatment],
        costs: Costs,
        watch: Callable[[int], None],
        answers: RealAnswers | None = None,
    ) -> Trace:
        """Run a step for real, and take down what values decide in it."""
        return simulate(
            self._step,
            Assignment(treatments),
            self._units,
            costs,
            self._place.device,
            with_values=True,
            answers=answers,
            count_functions=True,
            watch=watch,
        )

    def _within_memory(self) -> Callable[[int], None]:
        """Return what stops a step before it takes more than is free."""
        gradients = sum(item.nbytes for item in self._step.model.parameters() if item.requires_grad)
        free_bytes = available_bytes(self._place.device) * (1 - RESERVE) - gradients

        def watch(live_bytes: int) -> None:
            if live_bytes > free_bytes:
                raise _Stopped

        return watch

    def _simulated(self, costs: Costs) -> Trace:
        """Simulate the plain step; where it needs values, with those of a real step."""
        self._tell("the plain step, simulated")
        try:
            with unlogged():
                return self.run({}, costs, count_functions=True)
        except UsageError:
            raise
        except Exception as error:
            if not self._place.has_values:
                raise without_values(error) from error
            if self._never_real or not (self._place.is_here or is_alone()):
                raise among_ranks(error) from error
            return self._with_values_of_least(costs, error)

    def _with_values_of_least(self, costs: Costs, reason: Exception) -> Trace:
        """Simulate the plain step with the values of a real one: of that which needs the least memory.

        Args:
            costs: what ops cost.
            reason: why it cannot be simulated without.
        """
        self._tell("a step with everything recomputed, for real: the simulated ones need its values")
        answers = RealAnswers()
        try:
            self._real(dict.fromkeys(self._units, FULL), costs, self._within_memory(), answers)
            try:
                return self._with_answers(answers, costs)
            except Exception as error:  # an op that no fake tensor and no real step can tell enough of
                reason = error
            self._tell("the plain step, for real: it cannot be simulated")
            self.with_values = True
            plain = self._real({}, costs, self._within_memory())
        except (_Stopped, torch.OutOfMemoryError):
            raise too_large(reason, available_bytes(self._place.device), self._place.device) from reason
        self.margin = MARGIN if plain.depends_on_data else 0.0
        return plain

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
        record = functools.partial(recorded_calls, self._step, self._units, functions, costs, device, self._answers)
        if not self.with_values or SAVING_ALL * plain_bytes < available_bytes(device):
            return record(with_values=self.with_values)
        try:
            with unlogged():
                return record(with_values=False)
        except Exception:  # whatever fake tensors raise where they need values
            self._tell("the calls of blocks are not recorded: too little memory is free")
            return {}

    @property
    def need_values(self) -> bool:
        """Return whether steps need values: they run for real, or with answers."""
        return self.with_values or self._answers is not None

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
        watch: Callable[[int], None] | None = None,
    ) -> Trace:
        """Return the step with treatments for some units.

        Args:
            treatments: by the paths of units.
            costs: what ops cost.
            storages: those that treatments use, by their names.
            rehearsal: of that storage.
            count_functions: whether to count the calls of torch's functions.
            watch: called after each op with the bytes that are alive; it may raise.
        """
        return simulate(
            self._step,
            Assignment(treatments, storages or {}),
            self._units,
            costs,
            self._place.device,
            with_values=self.with_values,
            answers=None if self.with_values else self._answers,
            count_functions=count_functions,
            rehearsal=rehearsal,
            watch=watch,
        )
