"""The largest batch, or other dimension, for which there is a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from reactivate._text.warnings import warn
from reactivate._text.words import in_one_line
from reactivate._torch.ops import flatten, unflatten
from reactivate._types import Storage
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner.budget import Budget
from reactivate.planner.head import Head
from reactivate.planner.plan import Plan
from reactivate.planner.planner import Planner
from reactivate.planner.progress import Tell
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import Target


def largest(
    step: TrainingStep,
    target: Target,
    optimizer: Optimizer | None,
    tell: Tell,
    budget: Budget | None,
    maximize: str | Mapping[str, int],
    storages: Mapping[str, Storage],
    head: Head = "rows",
) -> Plan:
    """A plan for the largest size of a dimension with which the step fits.

    Args:
        maximize: "batch", or {name: dimension}: that of every tensor argument in which it has the size of the first.

    Raises:
        UsageError: there is no such dimension, or the step does not run with another size.
        PlanInfeasible: not even size 1 fits.
    """
    sizes = _Sizes.of(step, maximize)
    if budget is not None and budget.share is not None:
        raise UsageError(
            f"plan(maximize={sizes.name!r}) with budget={budget.text!r}: a share of the plain step grows with the "
            f"{sizes.name}, so that any fits. Give the budget in bytes."
        )

    def attempt(wanted: int) -> Plan:
        tell(f"{sizes.name} {wanted}")
        return Planner(sizes.step(wanted), target, optimizer, tell, storages, head=head).prepare().plan(budget)

    def simulate(wanted: int) -> Planner:
        """Simulate the step; or run it, if only its values tell what it does."""
        try:
            return Planner(sizes.step(wanted), replace(target, is_here=False), optimizer, tell).prepare()
        except UsageError:
            if not target.is_here:
                raise
        return Planner(sizes.step(wanted), target, optimizer, tell).prepare()

    return _search(attempt, _guess(simulate, budget, sizes.size), sizes.name, sizes.size)


def _search(attempt: Callable[[int], Plan], guess: int, name: str, size: int) -> Plan:
    """From a guess to the largest size that fits: up or down by ever larger steps, then halve.

    A size above the one that was given may not run at all: a table of positions has an end.
    """
    fits: dict[int, Plan] = {}
    low, high = 0, 0  # fits, does not
    error: Exception | None = None
    wanted, stride = max(1, guess), 1
    while not high or high - low > 1:
        try:
            fits[wanted] = attempt(wanted)
            low = wanted
        except PlanInfeasible as found:
            error, high = found, wanted
            if wanted == 1:
                raise
        except UsageError:
            raise
        except Exception as found:  # whatever a model raises at a size that it does not take: a warning tells
            error, high = found, wanted
            if wanted <= size:
                raise
        if not high:
            wanted, stride = wanted + stride, stride * 2
        elif not low and not fits:
            wanted, stride = max(1, wanted - stride), stride * 2
        else:
            wanted = (low + high) // 2
    assert error is not None
    if not isinstance(error, PlanInfeasible):
        warn(
            f"plan(maximize=...): {low} is the largest {name} with which the model runs; with {high} it raises "
            f"{in_one_line(error)}. The budget would allow more."
        )
    return replace(fits[low], largest=low)


def _guess(simulate: Callable[[int], Planner], budget: Budget | None, size: int) -> int:
    """Return where the least peaks of two sizes, simulated, lead to, if memory grows along a line."""
    first = simulate(size)
    allowed = first.allowed_bytes(budget or first.default_budget())
    error: Exception | None = None
    for wanted in filter(None, dict.fromkeys((2 * size, size + 1, size - 1))):  # a table of positions may end before
        try:
            other = simulate(wanted)
        except UsageError:
            raise
        except Exception as found:  # likewise: the next size is tried, and an error tells if none runs
            error = error or found
            continue
        peak = first.smallest_bytes()
        slope = max(1, (other.smallest_bytes() - peak) / (wanted - size))
        return max(1, int(size + (allowed - peak) / slope))
    raise UsageError(
        f"plan(maximize=...): the step does not run with another size than {size} ({error}). What else has that size, "
        "targets in the loss say, must be an argument of the model."
    ) from error


@dataclass(frozen=True)
class _Sizes:
    """Steps that differ in the size of one dimension of the tensor arguments: of all that have the size of the first."""

    given: TrainingStep
    name: str
    dimension: int
    size: int

    @classmethod
    def of(cls, step: TrainingStep, maximize: str | Mapping[str, int]) -> _Sizes:
        """Check `maximize`, and find out which size there is."""
        named = {"batch": 0} if maximize == "batch" else maximize
        if not isinstance(named, Mapping) or len(named) != 1 or not all(type(item) is int for item in named.values()):
            raise UsageError(
                f"plan(maximize={maximize!r}) takes 'batch', the first dimension of the arguments, or one other by its name "
                "and number: {'length': 1}."
            )
        if step.whole is not None:
            raise UsageError(
                "plan(maximize=...) changes the arguments of the model, and step() takes none. Pass args and loss."
            )
        ((name, dimension),) = named.items()
        for leaf in flatten((step.args, dict(step.kwargs or {})))[0]:
            if isinstance(leaf, Tensor) and leaf.ndim > dimension:
                return cls(step, name, dimension, int(leaf.shape[dimension]))
        raise UsageError(f"plan(maximize=...): no argument has a dimension {dimension} to be the {name}.")

    def step(self, wanted: int) -> TrainingStep:
        """Return the step with another size."""
        if wanted == self.size:
            return self.given

        def resize(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim <= self.dimension or leaf.shape[self.dimension] != self.size:
                return leaf
            indices = torch.arange(wanted, device=leaf.device) % self.size
            return leaf.detach().index_select(self.dimension, indices).requires_grad_(leaf.requires_grad)

        leaves, structure = flatten((self.given.args, dict(self.given.kwargs or {})))
        args, kwargs = unflatten([resize(leaf) for leaf in leaves], structure)
        return replace(self.given, args=args, kwargs=kwargs)
