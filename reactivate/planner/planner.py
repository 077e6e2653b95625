"""Plans one step: profile, tabulate, solve, prove."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from reactivate._engine.accounts import in_words
from reactivate._inspect.step import leaves_of
from reactivate._model.apply import apply
from reactivate._text.warnings import warn
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner.budget import Budget, parse
from reactivate.planner.cost.memory import fixed_of, optimizer_memory, others_on
from reactivate.planner.cost.overhead import measure_overhead
from reactivate.planner.cost.prediction import Proof
from reactivate.planner.cost.timeline import prediction_of
from reactivate.planner.place import Place, available_bytes
from reactivate.planner.plan import Plan, digest_of
from reactivate.planner.planned import Circumstances, Decision
from reactivate.planner.points import Points
from reactivate.planner.profile.costs import Measured, Modelled, measure, seconds_of
from reactivate.planner.profile.probe import Reading, TreatmentTable, read, rounds_of
from reactivate.planner.profile.trace import Costs, Trace
from reactivate.planner.progress import Tell
from reactivate.planner.runner import StepRunner
from reactivate.planner.solver.chain import Chain
from reactivate.planner.solver.solution import Proven, Search
from reactivate.planner.step import TrainingStep, default_loss
from reactivate.planner.treatments import FULL, Assignment, Treatment, treatments_of
from reactivate.planner.trials import Trials
from reactivate.planner.units import units_of

RESERVE = 0.05  # of an accelerator's free memory: for its context's growth and the allocator's gaps
_TIMED = 2  # plain steps that are timed, beside one to warm up and one under the clock


class Planner:
    """Plans one step."""

    def __init__(self, step: TrainingStep, place: Place, optimizer: Optimizer | None, tell: Tell) -> None:
        self.step = step
        self.place = place
        self._tell = tell
        self._optimizer = optimizer
        self._overhead = measure_overhead()
        self.units = units_of(step.model)
        self._units_of_model = len(self.units)
        self._trials = Trials(step, place, self.units, tell)
        self.costs: Costs = Modelled(place.spec, place.rounding)
        self.is_predicted = not place.is_here

    # -- the plain step -----------------------------------------------------------------------------------------------

    def _look_at_plain(self) -> None:
        """Simulate the plain step, measure it where that can be, and simulate it again with what was measured."""
        with self._watching_loss():
            plain = self._trials.first(self.costs)
        self._called = {call.path: call for turn in plain.calls for call in turn}
        self.units = {path: unit for path, unit in self.units.items() if path in self._called}
        state_bytes, optimizer_top = self._optimizer_memory()
        self.fixed = fixed_of(self.step.model, self.step.args, self.step.kwargs, state_bytes)
        if self.place.is_here:
            plain = self._measure(plain)
            self.fixed = replace(self.fixed, others=self._others())  # now that libraries have taken their workspaces
        else:
            self.plain_seconds = plain.seconds
        self.optimizer_bytes = 0 if self._optimizer is None else self.fixed.total + optimizer_top
        self._scale = self.plain_seconds / plain.seconds if plain.seconds else 1.0
        self.plain = plain
        self.plain_reading = self._read(plain, {})

    def _others(self) -> int:
        step = self.step
        return others_on(self.place.device, step.model, step.args, step.kwargs, self._optimizer)

    @contextmanager
    def _watching_loss(self) -> Iterator[None]:
        """Find out what the backward begins from."""
        self._loss = "step()" if self.step.whole is not None else "loss(output)"
        if self.step.whole is not None or self.step.loss is not None:
            yield
            return

        def look(model: Any, args: Any, output: Any) -> None:
            self._loss, _ = default_loss(output)

        handle = self.step.model.register_forward_hook(look)
        try:
            yield
        finally:
            handle.remove()

    def _optimizer_memory(self) -> tuple[int, int]:
        if self._optimizer is None:
            return 0, 0
        return optimizer_memory(self._optimizer, self.step.model, self.costs, self.place.device)

    def _measure(self, simulated: Trace) -> Trace:
        available = available_bytes(self.place.device)
        policy = Assignment({} if simulated.peak_bytes < available else dict.fromkeys(self.units, FULL))
        if policy.treatments and self._simulated(policy.treatments).peak_bytes >= available:
            warn(
                f"plan: not even with everything recomputed does this step seem to fit in the {in_words(available)} that "
                "are free here, so nothing is measured: the plan is predicted, as for a device that is not here."
            )
            self.is_predicted = True
            self.plain_seconds = simulated.seconds
            return simulated
        handle = apply(self.step.model, policy)
        try:
            seconds = self._run_for_costs()
        finally:
            handle.remove()
        plain = self._simulated({})
        same = plain if not policy.treatments else self._simulated(policy.treatments)
        self.plain_seconds = seconds * plain.seconds / same.seconds
        return plain

    def _run_for_costs(self) -> float:
        """Run the step: once to warm up, once for what ops cost, then for the time, which is returned."""
        found: list[Measured] = []
        place = self.place
        device = place.device
        self._tell("the step runs, to warm up")
        self.step.run_for_real()
        self._tell("the step runs, for what its ops cost")
        self.step.run_for_real(watch=lambda run: found.append(measure(run, device, place.spec, place.rounding)))
        self._tell("the step runs, for its time")
        seconds: list[float] = []
        self.step.run_for_real(_TIMED, watch=lambda run: seconds.append(seconds_of(run, device)))
        self.costs = found[0]
        return statistics.median(seconds)

    # -- other steps --------------------------------------------------------------------------------------------------

    def _simulated(self, treatments: Mapping[str, Treatment]) -> Trace:
        return self._trials.run(treatments, self.costs)

    def _read(self, trace: Trace, treatments: Mapping[str, Treatment]) -> Reading:
        seeing = {
            path: self._called[path].functions.total() for path, treatment in treatments.items() if treatment.save_ops
        }
        return read(trace, self._scale, self._overhead, seeing)

    def _try(self, treatments: Mapping[str, Treatment]) -> tuple[Trace, Reading]:
        trace = self._simulated(treatments)
        return trace, self._read(trace, treatments)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def prepare(self) -> Planner:
        """Find out what every treatment of every unit comes to."""
        self._look_at_plain()
        self.menus = {
            path: treatments_of(unit, frozenset(self._called[path].functions)) for path, unit in self.units.items()
        }
        self.table = TreatmentTable(self.plain_reading, self.units)
        rounds = rounds_of(self.units, self.menus)
        for number, treatments in enumerate(rounds, start=1):
            self._tell(f"policies, simulated: {number} of {len(rounds)}")
            self.table.enter(self._try(treatments)[1], treatments)
        self.search = Search(self.table, self.menus, self._try)
        return self

    def plan(self, asked: Budget | None) -> Plan:
        """The plan for a budget, once it is prepared."""
        budget = self.default_budget() if asked is None else asked
        allowed = budget.total(self.fixed.total, self.plain.peak_bytes)
        self._tell("the plan, solved and proved")
        own_bytes = int((allowed - self.fixed.total) / (1 + self._trials.margin))
        found = None if self.optimizer_bytes > allowed else self.search.fit(own_bytes)
        if found is None:
            raise self._infeasible(budget, allowed)
        return self._written(found, budget, allowed)

    @property
    def chain(self) -> Chain:
        """The problem that is solved, before any plan was proved."""
        return self.table.chain(self.menus, {})

    def smallest_bytes(self) -> int:
        """The least budget for which there is a plan."""
        peak_bytes = self.search.smallest().trace.peak_bytes
        return max(self.fixed.total + peak_bytes + self._margin_of(peak_bytes), self.optimizer_bytes)

    def _margin_of(self, peak_bytes: int) -> int:
        return math.ceil(peak_bytes * self._trials.margin)

    def default_budget(self) -> Budget:
        """Return a budget of what is free on the device, less a reserve, and of what the step has there already."""
        if self.place.device.type == "cpu" and not self.is_predicted:
            raise UsageError(
                "plan needs a budget on a CPU, where nobody says what is free: budget='8GiB' (--budget 8GiB)."
            )
        if self.is_predicted:
            free = int(self.place.spec.memory_bytes * (1 - RESERVE))
        else:
            free = int(available_bytes(self.place.device) * (1 - RESERVE)) + self.fixed.total
        return parse(free)

    def _infeasible(self, budget: Budget, allowed: int) -> PlanInfeasible:
        least_bytes = self.smallest_bytes()
        fixed = self.fixed
        share = -(-100 * (least_bytes - fixed.total) // max(self.plain.peak_bytes, 1))
        others = f", others {in_words(fixed.others)}" if fixed.others else ""
        return PlanInfeasible(
            f"plan(budget={budget.text!r}): no plan keeps this step within {in_words(allowed)} ({allowed} bytes); the least "
            f"that does takes {in_words(least_bytes)}: budget={least_bytes}, or '{share}%' of the plain step's activation "
            f"peak. Of that, {in_words(fixed.total)} "
            f"are there all the time (parameters {in_words(fixed.parameters)}, gradients {in_words(fixed.gradients)}, "
            f"optimizer {in_words(fixed.optimizer)}, inputs {in_words(fixed.inputs)}{others}). Raise the budget, or make "
            "the batch smaller.",
            budget_bytes=allowed,
            least_bytes=least_bytes,
        )

    def _written(self, found: Proven, budget: Budget, allowed: int) -> Plan:
        total = self.fixed.total
        return Plan(
            budget=budget.text,
            budget_bytes=allowed,
            made_for=self._circumstances(),
            decisions=self._decisions(found),
            fixed=self.fixed,
            plain=prediction_of(self.plain, total, self.plain_seconds),
            predicted=prediction_of(found.trace, total, self.plain_seconds + found.solution.seconds),
            frontier=self._points.frontier,
            policies=self._points.policies(self.step.model),
            proof=self._proof(found),
            optimizer_bytes=self.optimizer_bytes,
            runner=StepRunner(self.step, self.place, self.costs, self.plan),
        )

    def _proof(self, found: Proven) -> Proof:
        peak_bytes = found.trace.peak_bytes
        method = "real" if self._trials.with_values else "simulated"
        return Proof(method, self.fixed.total + peak_bytes, found.rounds, self._margin_of(peak_bytes))

    def _decisions(self, found: Proven) -> tuple[Decision, ...]:
        held: Counter[str] = Counter()
        seconds: dict[str, float] = defaultdict(float)
        # A unit may be called often.
        for path, entry in zip(self.plain_reading.paths, found.solution.entries, strict=True):
            held[path] += entry.held_bytes
            seconds[path] += entry.seconds
        return tuple(
            Decision(
                path,
                type(self.units[path]).__name__,
                digest_of(self.units[path]),
                treatment,
                held[path],
                seconds[path],
            )
            for path, treatment in found.treatments.items()
        )

    @functools.cached_property
    def _points(self) -> Points:
        return Points(self.chain, self.plain_reading.paths, self.fixed.total, self.plain_seconds)

    def _circumstances(self) -> Circumstances:
        leaves = leaves_of("args", self.step.args) | leaves_of("kwargs", dict(self.step.kwargs or {}))
        inputs = tuple(
            (name, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for name, leaf in leaves.items()
        )
        device = self.place.spec.name if self.is_predicted else str(self.place.device)
        return Circumstances(
            type(self.step.model).__name__,
            inputs,
            device,
            torch.__version__,
            self._loss,
            self.is_predicted,
            self._units_of_model,
        )
