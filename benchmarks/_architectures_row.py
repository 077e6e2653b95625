"""One architecture: its plans for three budgets, measured, and what planning has left of the model."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy
import torch
from _architectures_list import ARCHITECTURES, Case
from _model_facts import changes, facts_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import reactivate
from reactivate.errors import PlanInfeasible
from reactivate.planner.plan import Plan

BUDGETS = ("80%", "50%", "30%")


@dataclass(frozen=True)
class Found:
    """A budget.

    Attributes:
        budget: as it was asked for, or "least".
        verdict: "planned"; "infeasible", with the least that has a plan; or the error.
        budget_bytes, promised_bytes, measured_bytes: of what the step itself allocates, above parameters, gradients and
            inputs.
        differences: what the planned step leaves different from the plain one, bit for bit.
        seconds: for the plan.
    """

    budget: str
    verdict: str
    budget_bytes: int
    promised_bytes: int
    measured_bytes: int
    differences: list[str]
    seconds: float

    @property
    def holds(self) -> bool:
        """Return whether the measured peak is within the budget."""
        return self.measured_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Row:
    """An architecture.

    Attributes:
        name, family, source: as in the list.
        parameters: how many numbers.
        method: how plans were proved: "simulated" or "real".
        plain_bytes: the measured peak of the plain step.
        plain_error: of the plain step's prediction, as a part of that.
        planning_seconds: of the first plan.
        found: the budgets.
        changed: what of the model is other than before planning.
        forward: what its forward returns otherwise than one that was never planned.
        warnings: those of planning, each once.
        error: what `plan` raised; empty if it did not.
    """

    name: str
    family: str
    source: str
    parameters: int = 0
    method: str = ""
    plain_bytes: int = 0
    plain_error: float = 0.0
    planning_seconds: float = 0.0
    found: tuple[Found, ...] = ()
    changed: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Return whether there is a plan for every budget, or the least; all held, all exact, and the model left alone."""
        fine = all(item.holds and not item.differences for item in self.found)
        verdicts = {item.verdict for item in self.found}
        return (
            bool(self.found)
            and fine
            and verdicts <= {"planned", "infeasible"}
            and not (self.error or self.changed or self.forward)
        )


def measure_row(name: str) -> Row:
    """Plan an architecture and run the plans.

    Args:
        name: of the list.
    """
    architecture = ARCHITECTURES[name]
    row = {"name": name, "family": architecture.family, "source": architecture.source}
    torch.set_num_threads(1)
    plain, case = _made(architecture.make), _made(architecture.make)
    parameters = sum(item.numel() for item in case.model.parameters())
    _seeded()
    before = facts_of(case.model)
    began = perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            first = reactivate.plan(case.model, case.args, case.kwargs, budget="100%", loss=case.loss)
        except Exception as error:  # the row says which
            return Row(
                **row, parameters=parameters, error=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            )
    seconds = perf_counter() - began
    changed = changes(before, facts_of(case.model))
    forward = _compared(_outputs(plain), _outputs(case))
    plain_bytes = peak_of(plain)
    found = [item for budget in BUDGETS for item in _found(first, budget, plain, case)]
    return Row(
        **row,
        parameters=parameters,
        method=first.proof.method,
        plain_bytes=plain_bytes,
        plain_error=(first.plain.peak_bytes - first.fixed.total) / plain_bytes - 1,
        planning_seconds=seconds,
        found=tuple({(item.verdict, item.budget_bytes): item for item in found}.values()),
        changed=tuple(changed[:8]),
        forward=tuple(forward),
        warnings=tuple(dict.fromkeys(str(item.message)[:200] for item in caught if "plan" in str(item.message))),
    )


def _found(first: Plan, budget: str, plain: Case, case: Case) -> Iterator[Found]:
    began = perf_counter()
    verdict = "planned"
    try:
        plan = first.at(budget)
    except PlanInfeasible as error:
        verdict, plan = "infeasible", first.at(error.least_bytes)
    seconds = perf_counter() - began
    with reactivate.apply(case.model, plan):
        differences = _compared(_gradients(plain), _gradients(case))
        measured = peak_of(case)
    total = plan.fixed.total
    label = budget if verdict == "planned" else "least"
    promised = plan.predicted.peak_bytes - total
    yield Found(label, verdict, plan.budget_bytes - total, promised, measured, differences, seconds)


def _made(make: Callable[[], Case]) -> Case:
    _seeded()
    return make()


def _seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)  # what transformers draws its masks from


@contextmanager
def _as_it_was(case: Case) -> Iterator[None]:
    """Put back buffers and gradients: steps of a comparison begin alike."""
    buffers = {name: item.clone() for name, item in case.model.named_buffers()}
    yield
    with torch.no_grad():
        for name, item in case.model.named_buffers():
            item.copy_(buffers[name])
    case.model.zero_grad()


def _outputs(case: Case) -> dict[str, Tensor]:
    with _as_it_was(case):
        _seeded()
        output = case.model(*case.args, **case.kwargs)
        return {f"output {number}": leaf.detach() for number, leaf in enumerate(_leaves(output))}


def _leaves(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if hasattr(output, "values") else output if isinstance(output, (list, tuple)) else ()
    return [leaf for item in items for leaf in _leaves(item)]


def _gradients(case: Case) -> dict[str, Tensor]:
    with _as_it_was(case):
        case.model.zero_grad()
        _seeded()
        case.step()
        found = {
            f"gradient of {name}": item.grad for name, item in case.model.named_parameters() if item.grad is not None
        }
        found |= {f"buffer {name}": item.clone() for name, item in case.model.named_buffers()}
        return {**found, "random numbers": torch.get_rng_state()}


def _compared(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())[:4]
    return [name for name in one if not _same(one[name], other[name])][:4]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def peak_of(case: Case) -> int:
    """Return the most bytes that a step allocates, by the profiler, above what is there: gradients too."""
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with _as_it_was(case):
        _seeded()
        case.step()
        _seeded()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            case.step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
