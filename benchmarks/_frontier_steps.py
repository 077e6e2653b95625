"""Steps of plans and of torch.compile, each on a copy of the model, with its peak and what it leaves; the plans' solver.

Every compiled way has code of its own to compile: torch finds what it compiled by the code object, and would take the
graphs of one budget for those of another.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from _subjects import SMALL, make_subject
from _timing import Key, Step, Tick
from _training import Call, Subject, Way, left_by
from _ways import OURS, unequal
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

import reactivate
from reactivate.errors import PlanInfeasible
from reactivate.planner.cost.stretches import measured_peak
from reactivate.planner.plan import Plan
from reactivate.planner.planner import Planner
from reactivate.planner.solve import Chain, Problem
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import find_target

SHARES = (90, 75, 50, 35, 25)
"""In percent of the plain step's peak."""
LEAST = "least"
MOST_CHOICES = 100_000

WHOLE, BLOCKS = "torch.compile, whole model", "torch.compile, by block"
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of what torch.compile would save: its partitioner has a budget of its own."""


@dataclass(frozen=True)
class Ready:
    """A step after its first run.

    Attributes:
        key: of its times.
        model: the copy that it runs.
        first_seconds: on the wall, of the first run.
        peak_bytes: above what is there before the step.
        differences: what it leaves different from the plain step, bit for bit.
    """

    key: Key
    model: nn.Module
    step: Callable[[], Tensor]
    first_seconds: float
    peak_bytes: int
    differences: list[str]


def ready(
    name: str,
    subject: Subject,
    make: Callable[[nn.Module], Call],
    device: torch.device,
    first: Callable[[Step], object] = lambda step: step(),
    like: Ready | None = None,
) -> Ready:
    """A step on a copy of the subject's model.

    Args:
        name: of the step.
        subject: what is trained.
        make: from the copy to what is called in its place.
        device: where it is.
        first: runs the step for the first time.
        like: the step that it is compared with; None for the plain one.
    """
    model = subject.copied()
    step = subject.step_of(make(model))
    began = perf_counter()
    first(step)
    first_seconds = perf_counter() - began
    gc.collect()
    peak_bytes = measured_peak(step, device)
    plain = subject.copied()
    expected = (plain, subject.step_of(plain)) if like is None else (like.model, like.step)
    return Ready((name, 1), model, step, first_seconds, peak_bytes, _differences(subject, *expected, model, step))


def _differences(
    subject: Subject, plain: nn.Module, plain_step: Callable[[], Tensor], model: nn.Module, step: Callable[[], Tensor]
) -> list[str]:
    """Of two steps from the buffers of a fresh copy on."""
    fresh = subject.copied()
    with torch.no_grad():
        for one in (plain, model):
            for buffer, first in zip(one.buffers(), fresh.buffers(), strict=True):
                buffer.copy_(first)
    return unequal(left_by(plain, plain_step), left_by(model, step))


# -- torch.compile ----------------------------------------------------------------------------------------------------


def compiled_peers(subject: Subject, backend: str) -> list[Way]:
    """The whole model, and block by block, at each of `BUDGETS`."""
    ways = []
    for system, make in ((WHOLE, _whole), (BLOCKS, partial(_by_block, subject))):
        for budget in BUDGETS:
            ways.append(Way(system, f"budget {budget:g}", partial(make, backend), partial(_with_budget, budget), True))
    return ways


def peers_by_block(subject: Subject, backend: str) -> list[Way]:
    """Block by block alone, at each of `BUDGETS`: the first has all that the compiler would keep."""
    return [way for way in compiled_peers(subject, backend) if way.system == BLOCKS]


def plans_by_block(subject: Subject, backend: str) -> Way:
    """Return the way to run a plan that was made for compiled blocks: they are compiled in place after it was applied."""
    return Way(OURS, "", partial(in_place, subject, backend), partial(_with_budget, 1.0), True)


def in_place(subject: Subject, backend: str, model: nn.Module) -> nn.Module:
    """Compile each block of a model, as most who train do."""
    for block in subject.blocks_of(model):
        block.compile(backend=backend, dynamic=False)
    return model


def compiled_plans(subject: Subject, backend: str) -> list[Way]:
    """Ways to compile a planned model: as a whole, or block by block, with nothing said of memory."""
    makes = ((WHOLE, _whole), (BLOCKS, partial(_by_block, subject)))
    first = partial(_with_budget, 1.0)
    return [Way(f"{OURS} in {system}", "", partial(make, backend), first, True) for system, make in makes]


def _whole(backend: str, model: nn.Module) -> Call:
    return partial(torch.compile(_own_code(), backend=backend, dynamic=False), model)


def _by_block(subject: Subject, backend: str, model: nn.Module) -> Call:
    """One function for all blocks, so that equal ones are compiled once."""
    compiled = torch.compile(_own_code(), backend=backend, dynamic=False)
    for block in subject.blocks_of(model):
        block.forward = partial(compiled, block.forward)  # type: ignore[method-assign]
    return model


def _own_code() -> Call:
    def call(model: Call, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return FunctionType(call.__code__.replace(co_name="call"), call.__globals__, "call")


def _with_budget(budget: float, step: Callable[[], object]) -> None:
    with functorch_config.patch(activation_memory_budget=budget), dynamo_config.patch(recompile_limit=64):
        step()


# -- plans ------------------------------------------------------------------------------------------------------------


@dataclass
class Plans:
    """The plans, by the budget in words.

    Attributes:
        first_seconds: on the wall, of the first plan, which profiles the model.
        further_seconds: of each other.
    """

    found: dict[str, Plan] = field(default_factory=dict)
    first_seconds: float = 0.0
    further_seconds: list[float] = field(default_factory=list)

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes that are there all the time."""
        return self.found[LEAST].fixed.total

    @property
    def least_bytes(self) -> int:
        """The least budget for which there is a plan, over what is there all the time."""
        return budget_of(self.found[LEAST])

    @property
    def median_seconds(self) -> float:
        """Of a plan that profiles nothing."""
        return statistics.median(self.further_seconds)

    def name_of(self, label: str) -> str:
        """Of this plan: those that do the same have one name."""
        same = (other for other, plan in self.found.items() if plan.assignment == self.found[label].assignment)
        return next(same)


def make_plans(
    subject: Subject, peaks: Mapping[str, int], plain_bytes: int, tick: Tick, *, by_block: str = ""
) -> Plans:
    """Plan for each of these budgets, with one profile of the model.

    Args:
        subject: what is trained.
        peaks: {a budget in words: bytes over parameters, gradients and inputs}.
        plain_bytes: the plain step's peak, over the same.
        tick: called after each plan.
        by_block: the backend by which each block is compiled; "" for eager plans.
    """
    plans, began = Plans(), perf_counter()
    model = in_place(subject, by_block, subject.copied()) if by_block else subject.model
    compiled = "blocks" if by_block else False
    first = reactivate.plan(
        model, subject.args, subject.kwargs, budget="100%", loss=subject.loss, head="keep", compiled=compiled
    )
    plans.first_seconds = perf_counter() - began
    budgets = {**peaks, **{f"{share} %": plain_bytes * share // 100 for share in SHARES}}
    for label, size in budgets.items():
        began = perf_counter()
        with suppress(PlanInfeasible):
            plans.found[label] = first.at(first.fixed.total + size)
        plans.further_seconds.append(perf_counter() - began)
        tick()
    plans.found[LEAST] = first.at(_least_bytes(first))
    tick()
    return plans


def _least_bytes(plan: Plan) -> int:
    try:
        return plan.at(1).budget_bytes
    except PlanInfeasible as error:
        return error.least_bytes


def budget_of(plan: Plan) -> int:
    """Return the bytes that the step may allocate."""
    return plan.budget_bytes - plan.fixed.total


def does(plan: Plan) -> dict[str, int]:
    """{what is done: with how many parts of the model}."""
    return dict(Counter(decision.candidate.name for decision in plan.decisions))


def applied(plan: Plan, model: torch.nn.Module) -> torch.nn.Module:
    """The model, which runs as planned from here on."""
    reactivate.apply(model, plan)
    return model


# -- the solver -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimum:
    """The solver against every choice that there is, on the measured chain of a small model of the same kind.

    Attributes:
        blocks: of that chain.
        choices: how many there are.
        budgets: how many were solved: each at which a faster choice begins to fit.
        equal: at how many of them the solver's time is the least that there is, to the last bit.
        worst: the largest part by which it is above that.
    """

    blocks: int
    choices: int
    budgets: int
    equal: int
    worst: float


def optimum_of(name: str, device: torch.device) -> Optimum:
    """The solver against every choice, on a small model of the same kind."""
    return against_every_choice(measured_chain(make_subject(name, SMALL[name], device), device))


def measured_chain(subject: Subject, device: torch.device) -> Chain:
    """The problem that `reactivate.plan` solves for this model."""
    step = TrainingStep(subject.model, subject.args, subject.kwargs, subject.loss)
    place = find_target(subject.model, subject.args, dict(subject.kwargs), device)
    return shortened(Planner(step, place, None, lambda text: None).prepare().search.chain)


def shortened(chain: Chain) -> Chain:
    """Its first blocks, as many as leave no more than `MOST_CHOICES`."""
    count, choices = 0, 1
    while count < len(chain.menus) and choices * len(chain.menus[count]) <= MOST_CHOICES:
        choices *= len(chain.menus[count])
        count += 1
    return Chain(chain.menus[:count], (*chain.outside[:count], chain.outside[-1]))


def against_every_choice(chain: Chain) -> Optimum:
    """Solve for each budget at which a faster choice begins to fit, and compare with that choice."""
    found = []
    for entries in product(*chain.menus):
        solution = chain.solution_of(entries)
        found.append((solution.peak_bytes, solution.seconds))
    steps: list[tuple[int, float]] = []
    for peak_bytes, seconds in sorted(found):
        if not steps or seconds < steps[-1][1]:
            steps.append((peak_bytes, seconds))
    problem = Problem(chain)
    solved = [(problem.solve(peak_bytes), peak_bytes, seconds) for peak_bytes, seconds in steps]
    if any(solution.peak_bytes > peak_bytes for solution, peak_bytes, _ in solved):
        raise RuntimeError("The solver chose what does not fit.")
    parts = [_above(solution.seconds, seconds) for solution, _, seconds in solved]
    return Optimum(len(chain.menus), len(found), len(steps), parts.count(0.0), max(parts))


def _above(seconds: float, least_seconds: float) -> float:
    if seconds == least_seconds:
        return 0.0
    return seconds / least_seconds - 1 if least_seconds else math.inf
