"""Runs the step of a plan under a policy: on fake tensors, on fake tensors with recorded results, or for real.

A real step knows all that its values decide. A simulated one needs neither memory nor compute, so it takes the place of a
real step that does not fit, cannot run here, or takes longer. Where values decide what a step does, one real step records
the results that fake tensors cannot tell, and the simulated steps look them up. The first run, of the plain step, finds
out which of the three it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.nn import Module

from reactivate._model.apply import apply
from reactivate._region.accounts import in_words, is_shortage
from reactivate._text.words import in_one_line
from reactivate._torch.modes import lacks_values, unlogged
from reactivate._torch.modules import is_sharded
from reactivate._types import Storage
from reactivate.errors import MutationError, UnsupportedError, UsageError
from reactivate.planner.call_values import RecordedCall
from reactivate.planner.candidates import FULL, Assignment, Candidate, without_refused
from reactivate.planner.cost.measured import time_call
from reactivate.planner.distributed import Ranks
from reactivate.planner.progress import Tell
from reactivate.planner.recorded_calls import recorded_calls
from reactivate.planner.step import Running, TrainingStep
from reactivate.planner.target import RESERVE, Target, available_bytes, is_alone
from reactivate.planner.trace.answers import RealAnswers
from reactivate.planner.trace.data_scope import DataMargin
from reactivate.planner.trace.records import Costs, Trace
from reactivate.planner.trace.refused import refused_in
from reactivate.planner.trace.tracer import traced
from reactivate.storage.rehearsal import Rehearsal

QUICK = 0.2  # seconds of a real step that no simulation is compared with
MOST_OPS = 20_000  # of a step that is simulated only to find out whether sizes depend on the data
SAVING_ALL = 2  # times as much memory as a plain step a step may take that saves all calls

Watch = Callable[[int], None]
Value = TypeVar("Value")


class _StopStep(BaseException):
    """A step needs more memory than is free, or more time than another way to run it: no `except Exception` takes it."""


@contextmanager
def on_tensors(step: TrainingStep, device: torch.device | None, answers: RealAnswers | None) -> Iterator[Running]:
    """Yield what `step.on_tensors` does. Results are recorded there if it is for real, and given otherwise."""
    with ExitStack() as stack:
        run, known = stack.enter_context(step.on_tensors(device))
        if answers is not None:
            stack.enter_context(answers.recorded(known) if device is None else answers.given(known))
        yield run, known


def simulate(
    step: TrainingStep,
    policy: Assignment,
    units: Mapping[str, Module],
    costs: Costs,
    device: torch.device,
    *,
    is_real: bool = False,
    answers: RealAnswers | None = None,
    count_functions: bool = False,
    watch: Watch | None = None,
    looks_on: bool = False,
) -> Trace:
    """Run `step` once with `policy` applied to its model, and trace its memory; up to where one of its regions is refused.

    Args:
        units: the model's units by their paths.
        device: where tensors on the meta device are to seem to be.
        is_real: whether the step runs on its own tensors, in their memory.
        answers: takes results from a real step, gives them to a simulated one.
        count_functions: whether to count the calls of torch's functions, and to find where sizes depend on data.
        watch: called after each op with the bytes that are alive; it may raise.
        looks_on: whether to run the step that follows, too, for the regions that are refused there.
    """
    rehearsal = next((item for item in policy.storages.values() if isinstance(item, Rehearsal)), None)
    options: dict[str, Any] = {"count_functions": count_functions, "rehearsal": rehearsal, "watch": watch}
    options |= {"model": step.model, "answers": None if is_real else answers}
    on = on_tensors(step, None if is_real else device, answers)
    try:
        with apply(step.model, policy), on as (run, known):
            with traced(units, known, costs, **options) as trace:
                trace.is_real = is_real
                run()
            if looks_on:  # each trace begins with the state that the first one does
                trace.refused |= refused_in(run)
    except MutationError:
        if trace.refused.isdisjoint(policy.regions):
            raise
    return trace


class Simulator:
    """Runs one step under any candidates of its units.

    Args:
        step, target, units: what runs, where, and the model's units by their paths.
        ranks: those that plan the step together: they run no policy for real.
        needs_fakes: whether steps are to be simulated wherever they can be: storages are rehearsed in these.

    Attributes:
        is_real: whether steps run for real, once `first` has found out.
        refused: the paths of the regions that the engine has refused so far: candidates with one of them are left out.
    """

    def __init__(
        self,
        step: TrainingStep,
        target: Target,
        units: Mapping[str, Module],
        tell: Tell,
        ranks: Ranks,
        *,
        needs_fakes: bool,
    ) -> None:
        self.is_real = False
        self.refused: set[str] = set()
        self._step, self._target, self._units, self._tell, self._ranks = step, target, units, tell, ranks
        # How many steps run depends on measured times: other ranks would wait for the collectives of a real one.
        self._never_real = not ranks.is_alone or is_sharded(step.model)
        self._needs_fakes = needs_fakes or self._never_real or not is_alone()
        self._answers: RealAnswers | None = None
        self._of_data: frozenset[str] = frozenset()  # the modules whose sizes depend on the data of the step

    @property
    def needs_values(self) -> bool:
        """Return whether steps need values: they run for real, or with recorded results."""
        return self.is_real or self._answers is not None

    @property
    def margin(self) -> DataMargin:
        """Return the room that is left for batches with other sizes inside of the model."""
        return DataMargin(self._target.margin, self._of_data)

    @property
    def _may_run(self) -> bool:
        """Return whether a step may run that cannot be simulated: no rank may wait for one that runs none."""
        return not self._never_real and (self._target.is_here or is_alone())

    def run(
        self,
        candidates: Mapping[str, Candidate],
        costs: Costs,
        storages: Mapping[str, Storage] | None = None,
        *,
        looks_on: bool = False,
    ) -> Trace:
        """Return the step with candidates for some units, by path; a storage that these use is in rehearsal."""
        run = functools.partial(self._run, candidates, costs, storages=storages, looks_on=looks_on)
        if self.is_real:
            return _run_if_it_fits(run)
        if self._answers is None:
            return run()
        found = _simulated(functools.partial(run, answers=self._answers))
        return self._with_more_answers(candidates, costs, found) if isinstance(found, Exception) else found

    def record(
        self, functions: Mapping[str, Collection[str]], costs: Costs, plain_bytes: int
    ) -> dict[str, tuple[RecordedCall, ...]]:
        """Return the calls of some units; of none where a step that saves all calls may not fit and cannot be simulated.

        Args:
            functions: the functions that each unit calls, by path.
            plain_bytes: what the plain step takes.
        """
        self._tell("the calls of blocks, recorded")
        device = self._target.device
        units = {path: unit for path, unit in self._units.items() if path not in self.refused}
        recorded = {path: names for path, names in functions.items() if path in units}

        def record(*, is_real: bool) -> dict[str, tuple[RecordedCall, ...]]:
            on = functools.partial(on_tensors, self._step, *((None, None) if is_real else (device, self._answers)))
            return recorded_calls(self._step.model, on, units, recorded, costs)

        fits = SAVING_ALL * plain_bytes < available_bytes(device)
        if self.is_real and fits:
            return record(is_real=True)
        found = _simulated(functools.partial(record, is_real=False))
        if not isinstance(found, Exception):
            return found
        if not self.needs_values:
            raise found
        if fits and self._may_run:
            return record(is_real=True)
        self._tell("the calls of blocks are not recorded: that takes values, and too little memory is free")
        return {}

    # -- the first run ------------------------------------------------------------------------------------------------

    def first(self, costs: Costs) -> Trace:
        """Return the plain step, with the calls of functions counted, run in whichever way can be and takes less time.

        Raises:
            UsageError: it cannot be simulated without values, and the model has none.
            UnsupportedError: likewise, and it cannot run for real either: it does not fit, or other ranks would wait for it.
            Exception: whatever the step raises.
        """
        found = self._first_real(costs) if self._target.is_here and not self._needs_fakes else None
        return self._first_fake(costs) if found is None else found

    def _first_real(self, costs: Costs) -> Trace | None:
        """Run it for real, then simulate it, and stay with what takes less time; None where it does not fit."""
        self._tell("the plain step")
        answers = RealAnswers()
        try:
            real, seconds = self._timed(costs, answers)
            self.is_real = True
            if seconds <= QUICK and not real.of_data:
                return real
            began = perf_counter()
            is_short = len(real.ops) <= MOST_OPS
            fake = self._within(math.inf if real.of_data and is_short else seconds, costs, answers)
            longest = max(QUICK, perf_counter() - began)
            if fake is not None and seconds > longest:  # maybe since it was the first
                real, seconds = self._timed(costs)
        except (_StopStep, torch.OutOfMemoryError):
            self.is_real, self._answers, self._of_data = False, None, frozenset()
            return None
        if fake is None:  # nothing tells whether its sizes depend on the data
            self._of_data = frozenset(real.of_data)
            return real
        if seconds <= longest:
            return real
        self.is_real = False
        return fake

    def _timed(self, costs: Costs, answers: RealAnswers | None = None) -> tuple[Trace, float]:
        found: list[Trace] = []

        def run() -> None:
            found.append(self._plain(costs, answers, self._within_memory(), is_real=True))

        seconds = time_call(run, self._target.device)
        return found[0], seconds

    def _within(self, seconds: float, costs: Costs, answers: RealAnswers) -> Trace | None:
        """Simulate it; None if that cannot be, or takes more time."""
        self._tell("the plain step, simulated")
        began = perf_counter()

        def watch(live_bytes: int) -> None:
            if perf_counter() - began > seconds:
                raise _StopStep

        try:
            found = _simulated(functools.partial(self._with, answers, costs, watch))
        except _StopStep:
            return None
        return None if isinstance(found, Exception) else found

    def _first_fake(self, costs: Costs) -> Trace:
        """Simulate it; where it needs values, with those of a real step."""
        self._tell("the plain step, simulated")
        found = _simulated(functools.partial(self._plain, costs))
        all_fail = all(self._ranks.gather(isinstance(found, Exception)))
        if not isinstance(found, Exception):
            return found
        if not self._target.has_values:
            raise UsageError(
                f"{_failed(found)}. If that is a mistake of the step's, as shapes that do not fit are, mend it. If the step "
                "needs values, as the counts of a router do, this model has none: plan it where it has values "
                "(device='H100-SXM' plans it there for a device that is elsewhere), or plan the part of it in front of that, "
                "or behind it."
            ) from found
        if not (self._may_run or (all_fail and not self._ranks.is_alone)):
            raise _among_ranks(found) from found
        return self._first_with_values(costs, found)

    def _first_with_values(self, costs: Costs, reason: Exception) -> Trace:
        """Simulate it with the results of a real step: of the one that needs the least memory."""
        self._tell("a step with everything recomputed, for real: the simulated ones need its values")
        answers = RealAnswers()
        watch = None if self._never_real else self._within_memory()
        try:
            self._run(dict.fromkeys(self._units, FULL), costs, answers, watch, is_real=True, count_functions=True)
            found = _simulated(functools.partial(self._with, answers, costs))
            if not isinstance(found, Exception):
                self._of_data = frozenset().union(*self._ranks.gather(self._of_data))
                return found
            reason = found  # an op that no fake tensor and no real step can tell enough of
            if self._never_real:
                raise _among_ranks(reason) from reason
            self._tell("the plain step, for real: it cannot be simulated")
            plain = self._plain(costs, None, watch, is_real=True)
        except (_StopStep, torch.OutOfMemoryError):
            raise self._too_large(reason) from reason
        self.is_real, self._of_data = True, frozenset(plain.of_data)
        return plain

    def _with(self, answers: RealAnswers, costs: Costs, watch: Watch | None = None) -> Trace:
        """Simulate it with recorded results; if it needs them, other batches may come to others."""
        trace = self._plain(costs, answers, watch)
        self._answers = answers if answers.are_used else None
        self._of_data = frozenset(trace.of_data)
        return trace

    def _with_more_answers(self, candidates: Mapping[str, Candidate], costs: Costs, reason: Exception) -> Trace:
        """Run a step for real whose simulation lacks a result, and record its results for the next ones."""
        if not self._may_run:
            raise _among_ranks(reason) from reason
        self._tell("a policy, for real: a simulated step lacks values")
        try:
            return self._run(candidates, costs, self._answers, self._within_memory(), is_real=True)
        except (_StopStep, torch.OutOfMemoryError):
            raise self._too_large(reason) from reason

    # -- one run ------------------------------------------------------------------------------------------------------

    def _plain(
        self, costs: Costs, answers: RealAnswers | None = None, watch: Watch | None = None, *, is_real: bool = False
    ) -> Trace:
        return self._run({}, costs, answers, watch, is_real=is_real, count_functions=True)

    def _run(
        self,
        candidates: Mapping[str, Candidate],
        costs: Costs,
        answers: RealAnswers | None = None,
        watch: Watch | None = None,
        *,
        storages: Mapping[str, Storage] | None = None,
        **options: Any,
    ) -> Trace:
        policy = Assignment(without_refused(candidates, self.refused), storages or {})
        given = self._step, policy, self._units, costs, self._target.device
        found = simulate(*given, answers=answers, watch=watch, **options)
        refused = found.refused.intersection(policy.regions)
        if refused:
            self.refused |= refused
            found = self._run(candidates, costs, answers, watch, storages=storages, **options)
            found.failures.append(f"regions are refused: {', '.join(sorted(refused))}")
        return found

    def _within_memory(self) -> Watch:
        """Return what stops a step before it takes more than is free."""
        gradients = sum(item.nbytes for item in self._step.model.parameters() if item.requires_grad)
        free_bytes = available_bytes(self._target.device) * (1 - RESERVE) - gradients

        def watch(live_bytes: int) -> None:
            if live_bytes > free_bytes:
                raise _StopStep

        return watch

    def _too_large(self, reason: Exception) -> UnsupportedError:
        device = self._target.device
        return UnsupportedError(
            f"{_failed(reason)}, so steps have to run, and one needs more than the {in_words(available_bytes(device))} that "
            f"are free on {device}. Plan it with a smaller batch, or where more memory is free: the plan can be applied here."
        )


def _run_if_it_fits(run: Callable[..., Trace]) -> Trace:
    """Run a step for real; simulate it where memory is short by now: for a tighter plan, in the middle of a training."""
    try:
        return run(is_real=True)
    except Exception as error:
        if not is_shortage(error):
            raise
        shortage = error
    found = _simulated(run)
    if isinstance(found, Exception):
        raise shortage from None
    return found


def _simulated(run: Callable[[], Value]) -> Value | Exception:
    """Return what a simulation returns; or its error, if what it lacks are values."""
    try:
        with unlogged():
            return run()
    except Exception as error:
        if not lacks_values(error):
            raise
        return error


def _among_ranks(reason: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"{_failed(reason)}, so one step has to run, and in that ranks would wait for each other's collectives. With group=, "
        "for one batch and the device that is here, they run it together, if all of them need it. Or plan the model on one "
        "rank, and shard it then: the plan can be applied before or after that."
    )


def _failed(reason: Exception) -> str:
    return f"plan: the step does something that cannot be simulated ({in_one_line(reason)})"
