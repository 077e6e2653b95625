"""The search for plans that compute the loss by rows.

Nobody says which module is the head, and the loss may be computed in the model, by a library or in the training loop. So one
trial takes the loss by rows of whatever the modules beside the blocks return, and those whose logits a loss has read are the
heads. That trial takes the place of the plain step: the blocks have the treatments that they had, and the differences that
these make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from torch.nn import Module

from reactivate._loss.observed import LogitsRead, observed_logits
from reactivate._modules.paths import is_below
from reactivate._region.accounts import in_words
from reactivate.planner.chosen import ChosenStep
from reactivate.planner.cost.flow import Flow
from reactivate.planner.cost.prediction import Point
from reactivate.planner.points import Points
from reactivate.planner.profile.probe import Reading, TreatmentTable
from reactivate.planner.profile.trace import Trace
from reactivate.planner.solver.chain import Chain
from reactivate.planner.solver.solution import Proven, Search
from reactivate.planner.treatments import BY_ROWS, Treatment

CHUNKS = 8
Head = Literal["rows", "keep"]
HEADS = get_args(Head)


class WithHead(Protocol):
    """A step whose treatments without a head are known."""

    units: dict[str, Module]
    all_menus: Mapping[str, Sequence[Treatment]]
    table: TreatmentTable
    plain: Trace
    plain_seconds: float

    def attempt(self, treatments: Mapping[str, Treatment]) -> tuple[Trace, Reading]:
        """Simulate the step with these treatments."""


@dataclass(frozen=True)
class HeadSearch:
    """Looks for plans that compute the loss by rows.

    Attributes:
        heads: {path: what is done with it} of the modules whose logits a loss reads.
        logits: the largest that it read; None for none.
        seconds: how much longer the step takes by it.
        chain, paths: the problem that is solved, and the unit of each of its blocks.
        search: solves it.
        plain_seconds: what the plain step takes.
    """

    heads: dict[str, Treatment]
    logits: LogitsRead | None
    seconds: float
    chain: Chain
    paths: tuple[str, ...]
    plain_seconds: float
    search: Search

    @classmethod
    def of(cls, step: WithHead, model: Module) -> HeadSearch | None:
        """Find the heads; None where no loss reads logits that can be computed by rows.

        Args:
            step: the step that is planned.
            model: its model.
        """
        with observed_logits() as read:
            trace, reading = step.attempt(dict.fromkeys(_candidates(model, step.units), BY_ROWS))
        heads = dict.fromkeys(sorted({item.place for item in read}), BY_ROWS)
        if not heads or reading.paths != step.table.plain.paths:
            return None
        table = step.table.beside(reading)
        search = Search(table, step.all_menus, lambda chosen: step.attempt({**chosen, **heads}))
        scale = step.plain_seconds / step.plain.seconds if step.plain.seconds else 1.0
        seconds = max(0.0, (trace.seconds - step.plain.seconds) * scale)
        largest = max(read, key=lambda item: item.nbytes)
        return cls(heads, largest, seconds, table.chain(step.all_menus, {}), reading.paths, step.plain_seconds, search)

    def fit(self, budget_bytes: int) -> ChosenStep | None:
        """The fastest choice that holds; None if there is none.

        Args:
            budget_bytes: of what the step allocates itself.
        """
        found = self.search.fit(budget_bytes)
        return None if found is None else self._chosen(found)

    def smallest(self) -> ChosenStep:
        """The choice with the least peak."""
        return self._chosen(self.search.smallest())

    def _chosen(self, found: Proven) -> ChosenStep:
        seconds = self.plain_seconds + self.seconds + found.solution.seconds
        return ChosenStep(found, seconds, Flow(), self.heads, self.seconds)

    def points(self, fixed_bytes: int) -> tuple[Point, ...]:
        """Return the plans for other budgets.

        Args:
            fixed_bytes: what is there all the time.
        """
        points = Points(self.chain, self.paths, fixed_bytes, self.plain_seconds + self.seconds).frontier
        return tuple(replace(point, label="planned, loss by rows") for point in points)

    def advice(self) -> str:
        """Say what else there is to do about logits that hold the peak of the smallest choice; nothing if they do not."""
        ops = self.smallest().proven.trace.ops
        top = max(ops, key=lambda op: op.top_bytes)
        if self.logits is None or top.position != max(op.position for op in ops):
            return ""
        place = self.logits.place or "the model"
        return (
            f" Its peak is in the loss: the logits that {place} returns take {in_words(self.logits.nbytes)}, and their "
            f"gradient as much. reactivate.chunked_cross_entropy(hidden, weight, targets, chunks={CHUNKS}) in the place of "
            f"head and loss has {in_words(-(-self.logits.nbytes // CHUNKS))} of each at a time; its gradients are the plain "
            "ones up to rounding."
        )


def _candidates(model: Module, units: Mapping[str, Module]) -> list[str]:
    """List the modules that may return logits: those with a matrix that are in no unit, and the model itself."""
    return [
        path
        for path, module in model.named_modules()
        if not any(is_below(path, unit) for unit in units) and (not path or _has_matrix(module))
    ]


def _has_matrix(module: Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
