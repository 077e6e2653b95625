"""A check that the solver finds the optimum of the cost model: every choice of a small chain is looked at."""

from __future__ import annotations

import math
from itertools import product

import torch
from _frontier_models import Subject
from _frontier_results import Optimum

from reactivate.planner.place import place_of
from reactivate.planner.planner import Planner
from reactivate.planner.solver.chain import Chain
from reactivate.planner.solver.solve import solve
from reactivate.planner.step import TrainingStep

MOST_CHOICES = 100_000


def measured_chain(subject: Subject, device: torch.device) -> Chain:
    """The problem that `reactivate.plan` solves for this model."""
    step = TrainingStep(subject.model, subject.args, subject.kwargs, subject.loss)
    place = place_of(subject.model, subject.args, dict(subject.kwargs), device)
    return shortened(Planner(step, place, None, lambda text: None).prepare().chain)


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
        solution = chain.solution_of(chain.picks_of(entries))
        found.append((solution.peak_bytes, solution.seconds))
    steps: list[tuple[int, float]] = []
    for peak_bytes, seconds in sorted(found):
        if not steps or seconds < steps[-1][1]:
            steps.append((peak_bytes, seconds))
    solved = [(solve(chain, peak_bytes), peak_bytes, seconds) for peak_bytes, seconds in steps]
    if any(solution.peak_bytes > peak_bytes for solution, peak_bytes, _ in solved):
        raise RuntimeError("The solver chose what does not fit.")
    parts = [_above(solution.seconds, seconds) for solution, _, seconds in solved]
    return Optimum(len(chain.menus), len(found), len(steps), parts.count(0.0), max(parts))


def _above(seconds: float, least_seconds: float) -> float:
    if seconds == least_seconds:
        return 0.0
    return seconds / least_seconds - 1 if least_seconds else math.inf
