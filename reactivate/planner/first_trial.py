"""The first trial of a step: the plain one, which tells how the others can run.

A real step knows all that its values decide. A simulated one needs neither memory nor compute: it takes the place of a real
step that does not fit or cannot run here, and of one that takes longer. Where values decide, one real step tells all
simulated ones what they cannot know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch.nn import Module

from reactivate._torch.modes import lacks_values, unlogged
from reactivate._torch.modules import is_sharded
from reactivate.planner.place import RESERVE, Place, available_bytes, is_alone
from reactivate.planner.profile.answers import RealAnswers
from reactivate.planner.profile.costs import seconds_of
from reactivate.planner.profile.simulate import simulate
from reactivate.planner.profile.trace import Costs, Trace
from reactivate.planner.progress import Tell
from reactivate.planner.ranks import Ranks
from reactivate.planner.step import TrainingStep
from reactivate.planner.treatments import FULL, Assignment, Treatment
from reactivate.planner.unsimulated import among_ranks, too_large, without_values

QUICK = 0.2  # seconds of a real step that no simulation is compared with
MOST_OPS = 20_000  # of a step that is simulated only to find out whether sizes depend on the data


class _Stopped(BaseException):
    """A step needs more memory than is free, or more time than another way to run it: no `except Exception` takes it."""


@dataclass(frozen=True)
class FirstTrial:
    """The plain step, and how others can run.

    Attributes:
        trace: the plain step, with the calls of functions counted.
        with_values: whether they run for real.
        answers: those that simulated ones need; None if they need none.
        of_data: the paths of the modules whose sizes depend on the data of the step.
    """

    trace: Trace
    with_values: bool = False
    answers: RealAnswers | None = None
    of_data: frozenset[str] = frozenset()


class PlainStep:
    """The plain step, which is tried in one way after the other.

    Args:
        step: the step.
        place: where it runs.
        units: the model's units by their paths.
        tell: reports progress.
        ranks: those that plan the step together: they run no policy for real.
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
        self._ranks = ranks
        # How many steps run depends on measured times: other ranks would wait for the collectives of a real one.
        self._never_real = not ranks.is_alone or is_sharded(step.model)
        self._needs_fakes = needs_fakes or self._never_real or not is_alone()

    def tried(self, costs: Costs) -> FirstTrial:
        """Run or simulate it, whichever can be and takes less time.

        Args:
            costs: what ops cost.

        Raises:
            UsageError: it cannot be simulated without values, and the model has none.
            UnsupportedError: likewise, and it cannot run for real either: it does not fit, or other ranks would wait for it.
            Exception: whatever the step raises.
        """
        found = self._recorded(costs) if self._place.is_here and not self._needs_fakes else None
        return self._simulated(costs) if found is None else found

    # -- a step that can run here -------------------------------------------------------------------------------------

    def _recorded(self, costs: Costs) -> FirstTrial | None:
        """Run it for real; None where it does not fit."""
        self._tell("the plain step")
        answers = RealAnswers()
        try:
            trace, seconds = self._timed(costs, answers)
            if seconds <= QUICK and not trace.of_data:
                return FirstTrial(trace, with_values=True)
            began = perf_counter()
            is_short = len(trace.ops) <= MOST_OPS
            found = self._within(math.inf if trace.of_data and is_short else seconds, costs, answers)
            simulating = perf_counter() - began
            if found is not None and seconds > max(QUICK, simulating):  # maybe since it was the first
                trace, seconds = self._timed(costs)
        except (_Stopped, torch.OutOfMemoryError):
            return None
        if found is None:  # nobody knows whether its sizes depend on the data
            return FirstTrial(trace, with_values=True, of_data=frozenset(trace.of_data))
        if seconds <= max(QUICK, simulating):
            return replace(found, trace=trace, with_values=True)
        return found

    def _timed(self, costs: Costs, answers: RealAnswers | None = None) -> tuple[Trace, float]:
        found: list[Trace] = []

        def run() -> None:
            found.append(self._run({}, costs, answers, self._within_memory(), with_values=True))

        seconds = seconds_of(run, self._place.device)
        return found[0], seconds

    def _within(self, seconds: float, costs: Costs, answers: RealAnswers) -> FirstTrial | None:
        """Simulate it; None if that cannot be, or takes more time."""
        self._tell("the plain step, simulated")
        began = perf_counter()

        def watch(live_bytes: int) -> None:
            if perf_counter() - began > seconds:
                raise _Stopped

        try:
            return self._with(answers, costs, watch)
        except _Stopped:
            return None
        except Exception as error:
            if not lacks_values(error):
                raise
            return None

    # -- a step that does not fit, or is not to run -------------------------------------------------------------------

    def _simulated(self, costs: Costs) -> FirstTrial:
        """Simulate it; where it needs values, with those of a real step."""
        self._tell("the plain step, simulated")
        found, reason = None, None
        try:
            with unlogged():
                found = FirstTrial(self._run({}, costs))
        except Exception as error:
            if not lacks_values(error):
                raise
            reason = error
        all_fail = all(self._ranks.gather(reason is not None))
        if found is not None:
            return found
        assert reason is not None
        if not self._place.has_values:
            raise without_values(reason) from reason
        if not (self.may_run or (all_fail and not self._ranks.is_alone)):
            raise among_ranks(reason) from reason
        return self._with_values_of_least(costs, reason)

    @property
    def may_run(self) -> bool:
        """Return whether a step may run that cannot be simulated: no rank may wait for one that runs none."""
        return not self._never_real and (self._place.is_here or is_alone())

    def with_more_answers(
        self, treatments: Mapping[str, Treatment], costs: Costs, answers: RealAnswers, reason: Exception
    ) -> Trace:
        """Run a step for real whose simulation lacks an answer, and take its answers down for the next ones.

        Args:
            treatments: by the paths of units.
            costs: what ops cost.
            answers: those that there are.
            reason: what fake tensors have raised.
        """
        if not self.may_run:
            raise among_ranks(reason) from reason
        self._tell("a policy, for real: a simulated step lacks values")
        try:
            return self._run(treatments, costs, answers, self._within_memory(), with_values=True)
        except (_Stopped, torch.OutOfMemoryError):
            raise too_large(reason, available_bytes(self._place.device), self._place.device) from reason

    def _with_values_of_least(self, costs: Costs, reason: Exception) -> FirstTrial:
        """Simulate it with the values of a real step: of that which needs the least memory.

        Args:
            costs: what ops cost.
            reason: why it cannot be simulated without.
        """
        self._tell("a step with everything recomputed, for real: the simulated ones need its values")
        answers = RealAnswers()
        watch = None if self._never_real else self._within_memory()
        try:
            self._run(dict.fromkeys(self._units, FULL), costs, answers, watch, with_values=True)
            try:
                found = self._with(answers, costs)
                return replace(found, of_data=frozenset().union(*self._ranks.gather(found.of_data)))
            except Exception as error:  # an op that no fake tensor and no real step can tell enough of
                if not lacks_values(error):
                    raise
                reason = error
            if self._never_real:
                raise among_ranks(reason) from reason
            self._tell("the plain step, for real: it cannot be simulated")
            plain = self._run({}, costs, None, watch, with_values=True)
        except (_Stopped, torch.OutOfMemoryError):
            raise too_large(reason, available_bytes(self._place.device), self._place.device) from reason
        return FirstTrial(plain, with_values=True, of_data=frozenset(plain.of_data))

    # -- both ---------------------------------------------------------------------------------------------------------

    def _with(self, answers: RealAnswers, costs: Costs, watch: Callable[[int], None] | None = None) -> FirstTrial:
        """Simulate it with answers; if it needs them, other batches may come to others."""
        with unlogged():
            trace = self._run({}, costs, answers, watch)
        return FirstTrial(trace, answers=answers if answers.are_used else None, of_data=frozenset(trace.of_data))

    def _run(
        self,
        treatments: Mapping[str, Treatment],
        costs: Costs,
        answers: RealAnswers | None = None,
        watch: Callable[[int], None] | None = None,
        *,
        with_values: bool = False,
    ) -> Trace:
        return simulate(
            self._step,
            Assignment(treatments),
            self._units,
            costs,
            self._place.device,
            with_values=with_values,
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
