"""Plans one step: profile, tabulate, solve, prove."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from torch.optim import Optimizer

from reactivate._model.apply import apply
from reactivate._region.accounts import in_words
from reactivate._text.warnings import warn
from reactivate._types import Storage
from reactivate.planner.budget import Budget, parse
from reactivate.planner.by_value.menus import menus_of
from reactivate.planner.chosen import ChosenStep
from reactivate.planner.containers import with_containers
from reactivate.planner.cost.flow import Flow
from reactivate.planner.cost.memory import fixed_of, optimizer_memory, others_on
from reactivate.planner.cost.overhead import measure_overhead
from reactivate.planner.cost.prediction import Fixed, Point
from reactivate.planner.cost.timeline import prediction_of
from reactivate.planner.digest import digests_of
from reactivate.planner.head_search import Head, HeadSearch
from reactivate.planner.offers import Offer, offers_of
from reactivate.planner.place import Place, available_bytes
from reactivate.planner.plan import Plan
from reactivate.planner.points import Points
from reactivate.planner.profile.looks import look_at
from reactivate.planner.profile.op_costs import Modelled
from reactivate.planner.profile.probe import Reading, TreatmentTable, read
from reactivate.planner.profile.rounds import rounds_of
from reactivate.planner.profile.step_profile import StepProfile
from reactivate.planner.profile.trace import Costs, Trace
from reactivate.planner.progress import Tell
from reactivate.planner.ranks import Ranks
from reactivate.planner.runner import StepRunner
from reactivate.planner.solver.chain import Chain
from reactivate.planner.solver.solution import Search
from reactivate.planner.step import StepFacts, TrainingStep
from reactivate.planner.storage_search import StorageSearch
from reactivate.planner.together import SharedSearch
from reactivate.planner.treatments import FULL, Assignment, Treatment
from reactivate.planner.trials import Trials
from reactivate.planner.units import units_of
from reactivate.planner.unsimulated import NO_STORAGES
from reactivate.planner.written import about_repeated, circumstances_of, decisions_of, infeasible, no_room, storages_of
from reactivate.storage.rehearsal import Rehearsal


class Planner:
    """Plans one step."""

    def __init__(
        self,
        step: TrainingStep,
        place: Place,
        optimizer: Optimizer | None,
        tell: Tell,
        storages: Mapping[str, Storage] | None = None,
        known: StepProfile | None = None,
        *,
        needs_fakes: bool = False,
        head: Head = "rows",
        ranks: Ranks | None = None,
    ) -> None:
        self.step, self.place, self.optimizer, self._head = step, place, optimizer, head
        self._profiled = known
        self._storages, self._tell = storages or {}, tell
        self._facts = StepFacts("", step.model.training)
        self._overhead = measure_overhead() if place.is_here else place.spec.overhead
        self.units = units_of(step.model)
        self._units_of_model = len(self.units)
        here = place if known is None else replace(place, is_here=False)
        self._ranks = ranks or Ranks()
        self.is_shared = not self._ranks.is_alone
        self._ranks.check_same("the model", digests_of(self.units))
        needs_fakes = needs_fakes or bool(storages)
        self._trials = Trials(step, here, self.units, tell, self._ranks, needs_fakes=needs_fakes)
        self.costs: Costs = Modelled(place.spec, place.rounding) if known is None else known.costs
        self.is_predicted = not place.is_here if known is None else known.is_predicted
        self._uncertainty = 0.0 if known is None else known.uncertainty

    # -- the plain step -----------------------------------------------------------------------------------------------

    def look_at_plain(self) -> None:
        """Simulate the plain step, measure it where that can be, and simulate it again with what was measured.

        Raises:
            PlanInfeasible: what is there all the time is larger than the device; nothing has run then.
        """
        fixed = functools.partial(fixed_of, self.step.model, self.step.args, self.step.kwargs)
        self._check_room(fixed(0))
        needs = functools.partial(optimizer_memory, self.optimizer, self.step.model, self.costs, self.place.device)
        self._optimizer_needs = needs() if self._profiled is None else self._profiled.optimizer_bytes
        self.fixed = fixed(self._optimizer_needs[0])
        self._check_room(self.fixed)
        with self.step.observed(lambda facts: setattr(self, "_facts", facts)):
            plain = self._trials.first(self.costs)
        self.step.check_ran(any(plain.calls), any(op.is_backward for op in plain.ops))
        self._called = {call.path: call for turn in plain.calls for call in turn}
        self.units = {path: unit for path, unit in self.units.items() if path in self._called}
        if self._profiled is not None:
            self.plain_seconds = plain.seconds * self._profiled.scale
            self.fixed = replace(self.fixed, others=self._profiled.others_bytes)
        elif self.place.is_here:
            plain, step = self._measure(plain), self.step  # by now libraries have taken their workspaces
            others = others_on(self.place.device, step.model, step.args, step.kwargs, self.optimizer)
            self.fixed = replace(self.fixed, others=others)
        else:
            self.plain_seconds = plain.seconds
        self.optimizer_bytes = 0 if self.optimizer is None else self.fixed.total + self._optimizer_needs[1]
        self._scale = self.plain_seconds / plain.seconds if plain.seconds else 1.0
        self.plain = plain
        self.plain_reading = self._read(plain, {})

    def _check_room(self, fixed: Fixed) -> None:
        """See to it that the device of each rank has room for what is there all the time.

        Raises:
            PlanInfeasible: it has not.
        """
        for others, memory_bytes in self._ranks.gather((fixed, self.place.memory_bytes)):
            if 0 < memory_bytes < others.total:
                raise no_room(others, self._device, memory_bytes)

    def _measure(self, simulated: Trace) -> Trace:
        available = available_bytes(self.place.device)
        policy = Assignment({} if self._fits(simulated, available) else dict.fromkeys(self.units, FULL))
        if policy.treatments and not self._fits(self._simulated(policy.treatments), available):
            warn(
                f"plan: not even with everything recomputed does this step seem to fit in the {in_words(available)} that "
                "are free here, so nothing is measured: the plan is predicted, as for a device that is not here."
            )
            self.is_predicted = True
            self.plain_seconds = simulated.seconds
            return simulated
        handle = apply(self.step.model, policy)
        try:
            looked = look_at(self.step, self.place, self._tell)
        finally:
            handle.remove()
        priced = looked.costs.priced(simulated, self.costs) if isinstance(self.costs, Modelled) else None
        self.costs, self._uncertainty = looked.costs, looked.uncertainty
        plain = self._simulated({}) if priced is None else priced
        same = plain if not policy.treatments else self._simulated(policy.treatments)
        self.plain_seconds = looked.seconds * plain.seconds / same.seconds
        return plain

    def _fits(self, trace: Trace, available_bytes: int) -> bool:
        """Return whether a step fits on every rank: either all of them run it, or none."""
        return all(self._ranks.gather(trace.peak_bytes < available_bytes))

    def profiled(self) -> StepProfile:
        """Return what running the step has told."""
        found = self.costs, self._scale, self.fixed.others, self._optimizer_needs, self.is_predicted
        return StepProfile(*found, self._uncertainty)

    # -- other steps --------------------------------------------------------------------------------------------------

    def _simulated(
        self,
        treatments: Mapping[str, Treatment],
        storages: Mapping[str, Storage] | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> Trace:
        return self._trials.run(treatments, self.costs, storages, rehearsal)

    def _read(self, trace: Trace, treatments: Mapping[str, Treatment]) -> Reading:
        seeing = {
            path: self._called[path].functions.total()
            for path, treatment in treatments.items()
            if treatment.sees_functions
        }
        return read(self._trials.margin.over(trace), self._scale, self._overhead, seeing)

    def attempt(
        self, treatments: Mapping[str, Treatment], offer: Offer | None = None, *, at_once: bool = False
    ) -> tuple[Trace, Reading]:
        """Simulate the step with these treatments.

        Args:
            treatments: by the paths of units.
            offer: the storage that they use.
            at_once: whether that lets go and brings back at once, whatever else it has.
        """
        storage, rehearsal = (None, None) if offer is None else offer.rehearsed(at_once=at_once)
        storages = {} if offer is None or storage is None else {offer.name: storage}
        trace = self._simulated(treatments, storages, rehearsal)
        return trace, self._read(trace, treatments)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def prepare(self) -> Planner:
        """Find out what every treatment of every unit comes to."""
        self.look_at_plain()
        return self.tabulate()

    def tabulate(self) -> Planner:
        """Find that out, once the plain step is known."""
        self.table = TreatmentTable(self.plain_reading, self.units)
        least = dict.fromkeys(self.units, FULL)  # what that needs is known exactly
        self.table.enter(self.attempt(least)[1], least)
        functions = {path: call.functions.keys() for path, call in self._called.items()}
        record = functools.partial(self._trials.record, costs=self.costs, plain_bytes=self.plain.peak_bytes)
        self.menus = self._ranks.gather(menus_of(self.units, functions, self.table, record))[0]  # times differ by rank
        rounds = rounds_of(self.units, self.menus, self.table)
        for number, treatments in enumerate(rounds, start=1):
            self._tell(f"policies, simulated: {number} of {len(rounds)}")
            self.table.enter(self.attempt(treatments)[1], treatments)
        self.all_menus = with_containers(self.step.model, self.menus, self.table, self.attempt)
        self.search = Search(self.table, self.all_menus, self.attempt)
        return self

    @functools.cached_property
    def _head_searches(self) -> tuple[HeadSearch, ...]:
        """One, prepared when a plan needs it; none where no loss can be computed by rows, or is to be."""
        has_loss = any(op.name.startswith("nll_loss") for op in self.plain.ops)  # which a cross-entropy of labels runs
        if self._head == "keep" or not has_loss:
            return ()
        self._tell("the loss by rows")
        found = HeadSearch.of(self, self.step.model)
        return () if found is None else (found,)

    @functools.cached_property
    def _storage_searches(self) -> tuple[StorageSearch, ...]:
        """Prepared when a plan needs them: where everything fits nothing is moved."""
        if self._trials.need_values and self._storages:
            warn(NO_STORAGES)
            return ()
        offers = offers_of(self._storages, self.place)
        return tuple(StorageSearch(offer, self, self._tell).prepare() for offer in offers)

    def plan(self, asked: Budget | None) -> Plan:
        """The plan for a budget, once it is prepared."""
        budget = self.default_budget() if asked is None else asked
        allowed = self.allowed_bytes(budget)
        self._tell("the plan, solved and proved")
        is_enough = all(self._ranks.gather(self.optimizer_bytes <= allowed))
        found = self._fastest(self.own_bytes(allowed)) if is_enough else None
        if found is None:
            least, advice = self.smallest_bytes(), "".join(search.advice() for search in self._head_searches)
            advice += about_repeated(self.plain)
            asked_by = None if asked is None else budget.text
            device = self._device, self.place.memory_bytes
            raise infeasible(asked_by, allowed, least, self.fixed, self.plain.peak_bytes, device, advice)
        return self._written(found, budget, allowed)

    def allowed_bytes(self, budget: Budget) -> int:
        """Return what a budget allows, all included: no more than the device has."""
        allowed = budget.total(self.fixed.total, self.plain.peak_bytes)
        return min(allowed, self.place.memory_bytes or allowed)

    @property
    def _device(self) -> str:
        """The device that is planned for, by name."""
        return self.place.spec.name if self.is_predicted else str(self.place.device)

    def own_bytes(self, allowed_bytes: int) -> int:
        """Return what of a budget is for the step itself: without what is there all the time."""
        return allowed_bytes - self.fixed.total

    def _fastest(self, budget_bytes: int) -> ChosenStep | None:
        """The fastest choice that holds: without storages, or with one of them."""
        found = self._shared(budget_bytes).fit()
        choices = [] if found is None else [ChosenStep(found, self.plain_seconds + found.solution.seconds, Flow())]
        if found is None or found.solution.seconds > 0:
            searches: tuple[HeadSearch | StorageSearch, ...] = (*self._head_searches, *self._storage_searches)
            choices += [other for search in searches if (other := search.fit(budget_bytes)) is not None]
        return min(choices, key=lambda choice: choice.seconds, default=None)

    def _shared(self, budget_bytes: int) -> SharedSearch:
        return SharedSearch(self._ranks, self.search, budget_bytes, self.plain.needed_bytes)

    def smallest_bytes(self) -> int:
        """The least budget for which there is a plan."""
        peaks = [self._shared(-self.fixed.total).smallest().trace.needed_bytes]
        searches: tuple[HeadSearch | StorageSearch, ...] = (*self._head_searches, *self._storage_searches)
        peaks += [found.needed_bytes for search in searches if (found := search.smallest()) is not None]
        own_bytes = max(self.fixed.total + min(peaks), self.optimizer_bytes)
        return max(self._ranks.gather(own_bytes))

    def default_budget(self) -> Budget:
        """Return a budget of what is free on the device, less a reserve, and of what the step has there already."""
        return parse(self.place.free_bytes(self.fixed.total, is_predicted=self.is_predicted))

    def _written(self, choice: ChosenStep, budget: Budget, allowed: int) -> Plan:
        total, trace = self.fixed.total, choice.proven.trace
        return Plan(
            budget=budget.text,
            budget_bytes=allowed,
            made_for=circumstances_of(
                self.step,
                self._device,
                self._facts,
                self._units_of_model,
                self._units_of_model - len(self.units),
                is_predicted=self.is_predicted,
            ),
            decisions=decisions_of(choice, self.plain_reading.paths, self.step.model),
            fixed=self.fixed,
            plain=prediction_of(self.plain, total, self.plain_seconds),
            predicted=prediction_of(trace, total, choice.own_seconds, choice.flow),
            frontier=self._points.frontier_with(self._points_of(choice)),
            policies=self._points.policies(self.step.model),
            proof=self._trials.proof_of(trace, total, choice.proven.rounds),
            optimizer_bytes=self.optimizer_bytes,
            storages=storages_of(choice, [search.offer for search in self._used(choice)]),
            offered=tuple(map(repr, self._storages.values())),
            live=self._storages,
            uncertainty=self._uncertainty,
            runner=StepRunner(self.step, self.place, self.costs, self),
        )

    def _used(self, choice: ChosenStep) -> tuple[StorageSearch, ...]:
        names = {treatment.storage for treatment in choice.proven.treatments.values()} - {""}
        return tuple(search for search in self._storage_searches if search.offer.name in names) if names else ()

    def _points_of(self, choice: ChosenStep) -> list[Point]:
        """Return those with what the plan has beside treatments: the loss by rows; or a storage, the smallest and itself."""
        total = self.fixed.total
        found = [point for search in self._head_searches if choice.heads for point in search.points(total)]
        for search in self._used(choice):
            items = [item for item in (search.smallest(), choice) if item]
            found += [Point(f"planned, {search.offer.name}", total + item.trace_bytes, item.seconds) for item in items]
        return found

    @property
    def chain(self) -> Chain:
        """The problem that is solved, before any plan was proved."""
        return self.table.chain(self.menus, {})

    @functools.cached_property
    def _points(self) -> Points:
        return Points(self.chain, self.plain_reading.paths, self.fixed.total, self.plain_seconds)
