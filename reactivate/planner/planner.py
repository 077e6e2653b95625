"""Plans one step: trace and measure the plain one, tabulate candidates, search, and write the plan."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch.optim import Optimizer

from reactivate._model.apply import apply
from reactivate._modules.spans import module_at
from reactivate._region.accounts import in_words
from reactivate._text.warnings import warn
from reactivate._types import Storage
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner.budget import Budget, parse
from reactivate.planner.call_values import make_menus
from reactivate.planner.candidates import FULL, KEEP, Assignment, Candidate, list_candidates, without_refused
from reactivate.planner.compiled_steps import CompiledSteps
from reactivate.planner.containers import with_containers
from reactivate.planner.contents import Circumstances, Decision, Point, Proof, StorageUse
from reactivate.planner.cost.measured import measure_step
from reactivate.planner.cost.memory import fixed_memory, optimizer_memory, others_on, workspaces_on
from reactivate.planner.cost.op_costs import RooflineCosts
from reactivate.planner.cost.overhead import Overhead, measure_overhead
from reactivate.planner.distributed import Ranks
from reactivate.planner.head import Head, HeadSearch, head_search
from reactivate.planner.infeasible import (
    about_blocks,
    about_other_checkpoints,
    about_repeated,
    about_written,
    infeasible,
    no_room,
)
from reactivate.planner.offload import Offer, offer_of
from reactivate.planner.plan import Plan, storage_arguments
from reactivate.planner.prediction import predict
from reactivate.planner.progress import Tell
from reactivate.planner.runner import StepRunner
from reactivate.planner.search import ProvenStep, Search, SharedSearch, storage_menus
from reactivate.planner.shapes import call_inputs
from reactivate.planner.simulator import Simulator
from reactivate.planner.solve import ever_faster
from reactivate.planner.step import BLOCKS, StepFacts, TrainingStep
from reactivate.planner.table import CandidateTable, TraceSummary, plan_rounds, summarize
from reactivate.planner.target import Target, available_bytes
from reactivate.planner.trace.records import Costs, Trace, UnitCall
from reactivate.planner.units import find_units, module_class_name, unit_digests


@dataclass(frozen=True)
class StepProfile:
    """The findings of a run that hold for the step with arguments of other shapes.

    Attributes:
        costs: of ops.
        is_predicted: whether nothing ran after all.
        scale: from the seconds of ops to those of a step.
        others_bytes: what else is on an accelerator.
        optimizer_bytes: what the optimizer keeps, and the most that its step allocates beside that.
        uncertainty: by which part of it the time of the step was another when it was measured again.
    """

    costs: Costs
    is_predicted: bool
    scale: float = 1.0
    others_bytes: int = 0
    optimizer_bytes: tuple[int, int] = (0, 0)
    uncertainty: float = 0.0


class Planner:
    """Plans one step.

    Args:
        step, target, optimizer: what runs, where, and what updates its parameters.
        storages: where tensors may be kept, by name.
        known: the profile of the same step with other arguments: nothing is measured then.
        needs_fakes: whether steps are to be simulated wherever they can be.
        head: whether the loss may be computed by rows.

    Attributes:
        profile: what is known of the step by now.
    """

    def __init__(
        self,
        step: TrainingStep,
        target: Target,
        optimizer: Optimizer | None,
        tell: Tell,
        storages: Mapping[str, Storage] | None = None,
        known: StepProfile | None = None,
        *,
        needs_fakes: bool = False,
        head: Head = "rows",
        ranks: Ranks | None = None,
    ) -> None:
        self.step, self.target, self.optimizer, self._head = step, target, optimizer, head
        self._storages, self._tell = storages or {}, tell
        self._facts = StepFacts("", step.model.training)
        self._overhead = measure_overhead() if target.is_here else target.spec.overhead
        self.units = find_units(step.model)
        self._units_of_model = len(self.units)
        self._ranks = ranks or Ranks()
        self._ranks.check_same("the model", unit_digests(self.units))
        self._is_profiled = known is not None
        costs = RooflineCosts(target.spec, target.rounding)
        self.profile = StepProfile(costs, not target.is_here) if known is None else known
        here = replace(target, is_here=False) if self._is_profiled else target
        is_faked = needs_fakes or bool(storages)
        self._simulator = Simulator(step, here, self.units, tell, self._ranks, needs_fakes=is_faked)
        self._compiled: CompiledSteps | None = None  # where candidates are measured on compiled blocks

    # -- the plain step -----------------------------------------------------------------------------------------------

    def trace_plain(self) -> None:
        """Trace the plain step, measure it where that can be, and trace it again with what was measured.

        Raises:
            PlanInfeasible: what is there all the time is larger than the device; nothing has run then.
        """
        self.fixed = fixed_memory(self.step)
        self._check_room()
        if not self._is_profiled:
            costs, device = self.profile.costs, self.target.device
            needs = optimizer_memory(self.optimizer, self.step.model, costs, device)
            self.profile = replace(self.profile, optimizer_bytes=needs)
        self.fixed = replace(self.fixed, optimizer=self.profile.optimizer_bytes[0])
        self._check_room()
        with self.step.observed(lambda facts: setattr(self, "_facts", facts)):
            plain = self._simulator.first(self.profile.costs)
        self.step.check_ran(any(plain.calls), any(op.is_backward for op in plain.ops))
        self.fixed = replace(self.fixed, gradients=self.step.gradient_bytes)  # known by now
        units, self._called = self.units, _calls_in(plain)
        self.units = {path: unit for path, unit in units.items() if path in self._called}
        self.plain_seconds = plain.seconds * self.profile.scale
        if self.target.is_here and not self._is_profiled:
            plain = self._measure(plain)  # by now libraries have taken their workspaces
            others = others_on(self.target.device, self.step, self.optimizer)
            scale = self.plain_seconds / plain.seconds if plain.seconds else 1.0
            self.profile = replace(self.profile, scale=scale, others_bytes=others)
        elif not self._is_profiled:
            others = self.fixed.others + workspaces_on(self.target.spec, plain)
            self.profile = replace(self.profile, others_bytes=others)
        self.fixed = replace(self.fixed, others=self.profile.others_bytes)
        self.optimizer_bytes = 0 if self.optimizer is None else self.fixed.total + self.profile.optimizer_bytes[1]
        called = _calls_in(plain)  # of other blocks, perhaps, when it runs again
        self.units = {path: unit for path, unit in units.items() if path in called}
        self._called = {**called, **self._called}  # the first knows all functions
        self.plain = plain
        self.plain_summary = self._summarize(plain, {})

    def _check_room(self) -> None:
        """See to it that the device of each rank has room for what is there all the time, as far as that is known."""
        for others, memory_bytes in self._ranks.gather((self.fixed, self.target.memory_bytes)):
            if 0 < memory_bytes < others.total:
                raise no_room(others, self._device, memory_bytes)

    def _measure(self, plain: Trace) -> Trace:
        """Measure the step for real, with everything recomputed if the plain one does not fit; return it with these costs."""
        available = available_bytes(self.target.device)
        if self.step.compiled == BLOCKS and (compiled := self._measure_compiled(plain, available)) is not None:
            return compiled
        policy = Assignment({} if self._fits(plain, available) else dict.fromkeys(self.units, FULL))
        costs = self.profile.costs
        if policy.candidates and not self._fits(self._least(costs), available):
            warn(
                f"plan: not even with everything recomputed does this step seem to fit in the {in_words(available)} that "
                "are free here, so nothing is measured: the plan is predicted, as for a device that is not here."
            )
            self.profile = replace(self.profile, is_predicted=True)
            return plain
        with apply(self.step.model, Assignment(without_refused(policy.candidates, self._simulator.refused))):
            measured, seconds, uncertainty = measure_step(self.step, self.target, self._tell)
        self.profile = replace(self.profile, costs=measured, uncertainty=uncertainty)
        priced = measured.priced(plain, costs) if isinstance(costs, RooflineCosts) else None
        plain = self._simulator.run({}, measured) if priced is None else priced
        same = self._simulator.run(policy.candidates, measured) if policy.candidates else plain
        self.plain_seconds = seconds * plain.seconds / same.seconds
        return plain

    def _measure_compiled(self, plain: Trace, available: int) -> Trace | None:
        """Measure the step with its blocks compiled, as all that follow; None if the plain one does not fit."""
        if not self._fits(plain, available):
            warn(
                f'plan(compiled="blocks"): the step without recomputation seems not to fit in the {in_words(available)} that '
                "are free here, so no candidate is measured on compiled blocks. Their costs are those of the eager step; the "
                "plan is proved by the compiled one."
            )
            return None
        self._least(self.profile.costs)
        self._tell("the plain step, its blocks compiled")
        self._compiled = CompiledSteps(self.step, self.target, self.units, self._tell, self._simulator.refused)
        self._overhead = Overhead(0.0, 0.0, 0.0, 0.0)  # it is in what is measured
        self.menus = self._list_menus()
        self._compiled.time(self.menus)
        found = self._compiled.run({})
        self.plain_seconds = found.seconds
        return found

    def _least(self, costs: Costs) -> Trace:
        """Return the step with everything recomputed, and find the units that cannot be, there and in the step after it."""
        return self._simulator.run(dict.fromkeys(self.units, FULL), costs, looks_on=True)

    def _fits(self, trace: Trace, available_bytes: int) -> bool:
        """Return whether a step fits on every rank: either all of them run it, or none."""
        return all(self._ranks.gather(trace.peak_bytes < available_bytes))

    # -- candidates ---------------------------------------------------------------------------------------------------

    def attempt(
        self, candidates: Mapping[str, Candidate], offer: Offer | None = None, *, at_once: bool = False
    ) -> tuple[Trace, TraceSummary]:
        """Trace the step with candidates for some units.

        Args:
            candidates: by the paths of units.
            offer: the storage that they use.
            at_once: whether that lets go and brings back at once, whatever else it has.
        """
        if self._compiled is not None:
            trace = self._compiled.run(candidates)
        else:
            storages = {} if offer is None else {offer.name: offer.rehearsed(at_once=at_once)}
            trace = self._simulator.run(candidates, self.profile.costs, storages)
        return trace, self._summarize(trace, candidates)

    def _summarize(self, trace: Trace, candidates: Mapping[str, Candidate]) -> TraceSummary:
        seen = {path: self._called[path].functions.total() for path, item in candidates.items() if item.sees_functions}
        margin = self._simulator.margin if self._compiled is None else self._compiled.margin(self._simulator.margin)
        return summarize(margin.over(trace), self.profile.scale, self._overhead, seen)

    def prepare(self) -> Planner:
        """Find out what every candidate of every unit comes to."""
        self.trace_plain()
        return self.tabulate()

    def tabulate(self) -> Planner:
        """Find that out, once the plain step is known."""
        least = dict.fromkeys(self.units, FULL)  # what that needs is known exactly
        trace = self._least(self.profile.costs) if self._compiled is None else self._compiled.run(least)
        summary = self._summarize(trace, least)
        self.table = CandidateTable(self.plain_summary, self.units, self._simulator.refused)
        self.table.enter(summary, least)
        self.menus = self._ranks.gather(self._list_menus())[0]  # times differ by rank
        while rounds := plan_rounds(self.menus, self.table):
            for number, candidates in enumerate(rounds, start=1):
                way = "simulated" if self._compiled is None else "compiled"
                self._tell(f"policies, {way}: {number} of {len(rounds)}")
                self.table.enter(self.attempt(candidates)[1], candidates)
        self.all_menus = with_containers(self.step.model, self.menus, self.table, self.attempt)
        self.search = Search(self.table, self.all_menus, self.attempt, self.plain_seconds)
        return self

    def _list_menus(self) -> dict[str, tuple[Candidate, ...]]:
        functions = {path: call.functions.keys() for path, call in self._called.items()}
        if self._compiled is not None:
            return {
                path: self._compiled.menu(path) or list_candidates(unit, frozenset(functions[path]))
                for path, unit in self.units.items()
            }
        if self.step.compiled == BLOCKS:
            return dict.fromkeys(self.units, (KEEP, FULL))
        record = functools.partial(self._simulator.record, costs=self.profile.costs, plain_bytes=self.plain.peak_bytes)
        return make_menus(self.units, functions, self.table, record)

    @functools.cached_property
    def _head_search(self) -> HeadSearch | None:
        """Prepared when a plan needs it; None where no loss can be computed by rows, or is to be."""
        has_loss = any(op.name.startswith("nll_loss") for op in self.plain.ops)  # which a cross-entropy of labels runs
        if self._head == "keep" or not has_loss:
            return None
        self._tell("the loss by rows")
        step = self.step.model, self.units, self.all_menus, self.table, self.attempt
        return head_search(*step, self.plain, self.plain_seconds)

    @functools.cached_property
    def _storage_searches(self) -> tuple[Search, ...]:
        """Prepared when a plan needs them: where everything fits nothing is moved."""
        if self._simulator.needs_values and self._storages:
            warn(
                "plan(storage=...): this step depends on values that it computes, so what a storage does in it cannot be "
                "proved: it is rehearsed without values. The plan is made without storages."
            )
            return ()
        found = []
        for offer in [offer_of(name, storage, self.target) for name, storage in self._storages.items()]:
            at_once = functools.partial(self.attempt, offer=offer, at_once=True)
            menus = storage_menus(offer, self.menus, self.table, at_once, self._tell)
            attempt = functools.partial(self.attempt, offer=offer)
            found.append(Search(self.table, menus, attempt, self.plain_seconds, offer=offer))
        return tuple(found)

    @property
    def _other_searches(self) -> tuple[Search, ...]:
        """The searches that have more than candidates of units: the loss by rows, or a storage."""
        head = self._head_search
        return (*(() if head is None else (head.search,)), *self._storage_searches)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def plan(self, asked: Budget | None) -> Plan:
        """Return the plan for a budget, once candidates are tabulated; None: for the default one."""
        budget = self.default_budget() if asked is None else asked
        allowed = self.allowed_bytes(budget)
        self._tell("the plan, solved and proved")
        is_enough = all(self._ranks.gather(self.optimizer_bytes <= allowed))
        found = self._fastest(allowed - self.fixed.total) if is_enough else None
        if found is None:
            least, head = self.smallest_bytes(), self._head_search
            advice = ("" if head is None else head.advice()) + about_repeated(self.plain)
            advice += about_other_checkpoints(self.plain, self.units)
            advice += about_written([path for path in self.units if path in self._simulator.refused])
            advice += about_blocks(self.units, module_class_name(self.step.model))
            asked_by = None if asked is None else budget.text
            device = self._device, self.target.memory_bytes
            raise infeasible(asked_by, allowed, least, self.fixed, self.plain.peak_bytes, device, advice)
        return self._written(found, budget, allowed)

    def allowed_bytes(self, budget: Budget) -> int:
        """Return what a budget allows, all included: no more than the device has."""
        allowed = budget.total(self.fixed.total, self.plain.peak_bytes)
        return min(allowed, self.target.memory_bytes or allowed)

    def default_budget(self) -> Budget:
        """Return a budget of what is free on the device, less a reserve, and of what the step has there already."""
        return parse(self.target.free_bytes(self.fixed.total, is_predicted=self.profile.is_predicted))

    def smallest_bytes(self) -> int:
        """Return the least budget for which there is a plan."""
        found = [self._shared(-self.fixed.total).smallest(), *(search.smallest() for search in self._other_searches)]
        least = min(one.trace.needed_bytes for one in found if one is found[0] or not one.trace.failures)
        return max(self._ranks.gather(max(self.fixed.total + least, self.optimizer_bytes)))

    def _fastest(self, budget_bytes: int) -> ProvenStep | None:
        """Return the fastest choice that holds: with or without the loss by rows, without storages or with one."""
        found = self._shared(budget_bytes).fit()
        choices = [] if found is None else [found]
        if found is None or found.solution.seconds > 0:
            for search in self._other_searches:
                if search.offer is not None:
                    self._tell(f"the plan with {search.offer.name}, solved and proved")
                elif found is not None and search.promised_seconds(budget_bytes) >= found.seconds:
                    continue  # a proof takes several traces of the step, and seldom shows less than is promised
                other = search.fit(budget_bytes)
                choices += [] if other is None else [other]
        return min(choices, key=lambda choice: choice.seconds, default=None)

    def _shared(self, budget_bytes: int) -> SharedSearch:
        return SharedSearch(self._ranks, self.search, budget_bytes, self.plain.needed_bytes)

    @property
    def _device(self) -> str:
        """The device that is planned for, by name."""
        return self.target.spec.name if self.profile.is_predicted else str(self.target.device)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _written(self, choice: ProvenStep, budget: Budget, allowed: int) -> Plan:
        total, trace = self.fixed.total, choice.trace
        method = "compiled" if self._compiled is not None else "real" if trace.is_real else "simulated"
        step = self.step, self.target, self.profile.costs
        return Plan(
            budget=budget.text,
            budget_bytes=allowed,
            made_for=self._circumstances(),
            decisions=self._decisions(choice),
            fixed=self.fixed,
            plain=predict(self.plain, total, self.plain_seconds),
            predicted=predict(trace, total, choice.own_seconds, choice.flow),
            frontier=self._frontier(choice),
            policies=self._policies,
            proof=Proof(method, total + trace.peak_bytes, choice.rounds, trace.margin_bytes),
            optimizer_bytes=self.optimizer_bytes,
            storages=_uses_of(choice),
            offered=tuple(map(repr, self._storages.values())),
            live=self._storages,
            uncertainty=self.profile.uncertainty,
            runner=StepRunner(*step, not self._ranks.is_alone, self.plan, self.smallest_bytes, self._simulator.refused),
        )

    def _circumstances(self) -> Circumstances:
        step, facts, units, is_predicted = self.step, self._facts, self._units_of_model, self.profile.is_predicted
        inputs = tuple(
            (name, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
            for name, leaf in call_inputs(step.args, step.kwargs).items()
        )
        made_for = module_class_name(step.model), inputs, self._device, torch.__version__, facts.loss, is_predicted
        return Circumstances(*made_for, units, facts.trains, units - len(self.units))

    def _decisions(self, choice: ProvenStep) -> tuple[Decision, ...]:
        """Return what is done with each unit, and with the heads. A unit may be called often."""
        held: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        seconds: dict[str, float] = defaultdict(float)
        for path, option in zip(self.plain_summary.paths, choice.solution.options, strict=True):
            held[option.span or path] += option.held_bytes
            seconds[option.span or path] += option.seconds
        for path, call in zip(choice.summary.paths, choice.summary.calls, strict=True):  # no spans where any are moved
            moved[path] += sum(call.moved)
        heads = choice.search.heads
        seconds |= dict.fromkeys(heads, choice.search.head_seconds / max(len(heads), 1))
        chosen = {**choice.candidates, **heads}
        facts = unit_digests({path: module_at(self.step.model, path) for path in chosen})
        return tuple(
            Decision(path, kind, digest, chosen[path], held[path], seconds[path], moved[path])
            for path, kind, digest in facts
        )

    def _frontier(self, choice: ProvenStep) -> tuple[Point, ...]:
        """Return the plans for other budgets; with the loss by rows, or the smallest with a storage, if the plan has that."""
        total = self.fixed.total
        points = list(self._points)
        if choice.search.heads:
            points += choice.search.frontier(total, "planned, loss by rows")
        for use in _uses_of(choice):
            smallest = choice.search.smallest()
            items = [choice] if smallest.trace.failures else [smallest, choice]
            points += [Point(f"planned, {use.name}", total + item.trace.peak_bytes, item.seconds) for item in items]
        points.sort(key=lambda point: (point.peak_bytes, point.seconds))
        return tuple(ever_faster(points, attrgetter("seconds")))

    @functools.cached_property
    def _points(self) -> tuple[Point, ...]:
        return self.search.frontier(self.fixed.total)

    @functools.cached_property
    def _policies(self) -> tuple[Point, ...]:
        return self.search.policies(self.step.model, self.fixed.total)


def _uses_of(choice: ProvenStep) -> tuple[StorageUse, ...]:
    """Return the storage that a choice uses, if it uses one."""
    offer = choice.search.offer
    if offer is None or not any(candidate.storage for candidate in choice.candidates.values()):
        return ()
    link, kept = offer.link, choice.flow.stored_bytes
    out, back = (None, None) if link is None else (link.out_bytes_per_second, link.back_bytes_per_second)
    return (StorageUse(offer.name, repr(offer.storage), kept, out, back, storage_arguments(offer.storage)),)


def holding_compiled(found: Plan, compiled: bool | str, plan: Callable[[Budget], Plan]) -> Plan:
    """Return a plan whose compiled step was run and holds the budget.

    Each plan that does not hold is tightened by what it takes too much. What stays when no smaller plan takes less is the
    compiler's: then there is none.

    Args:
        found: the plan for the budget, simulated.
        plan: from a smaller budget to its plan.

    Raises:
        PlanInfeasible: there is none; says what the smallest one takes.
    """
    asked, least_bytes, tried = found, 0, 0
    while True:
        measured = found.measure(compiled=compiled).measured_bytes
        tried += 1
        if measured <= asked.budget_bytes:
            proof = replace(found.proof, method="compiled", peak_bytes=measured, rounds=tried)
            return replace(found, budget=asked.budget, budget_bytes=asked.budget_bytes, proof=proof)
        least_bytes = min(measured, least_bytes or measured)
        over_bytes = measured - asked.budget_bytes
        try:
            found = plan(parse(min(found.budget_bytes, found.predicted.peak_bytes) - over_bytes))
        except (PlanInfeasible, UsageError):
            raise PlanInfeasible(
                f"plan(budget={asked.budget!r}, compiled={compiled!r}): no compiled step keeps within {asked.budget_bytes} "
                f"bytes; the smallest that was found takes {least_bytes}. {_LARGER[compiled == BLOCKS]}, or raise the "
                "budget.",
                budget_bytes=asked.budget_bytes,
                least_bytes=least_bytes,
            ) from None


_LARGER = (
    'The graph of its backward holds the gradients of all parameters at once: compile block by block, compiled="blocks"',
    "Its candidates are blocks that are recomputed: make the batch smaller",
)
"""What to do about the memory of a compiled step: of the whole model, and of its blocks."""


def _calls_in(trace: Trace) -> dict[str, UnitCall]:
    return {call.path: call for turn in trace.calls for call in turn}
