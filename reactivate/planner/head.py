"""Plans that compute the loss by rows.

Which module is the head is not declared, and the loss may be computed in the model, by a library or in the training loop.
So one trace takes the loss by rows of whatever the modules beside the blocks return, and those whose logits a loss has
read are the heads. That trace takes the place of the plain step: the blocks have the candidates that they had, and the
differences that these make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch.nn import Module

from reactivate._loss.observed import LogitsRead, observed_logits
from reactivate._modules.paths import is_below
from reactivate._region.accounts import in_words
from reactivate.planner.candidates import BY_ROWS, Candidate
from reactivate.planner.search import Attempt, Search
from reactivate.planner.table import CandidateTable
from reactivate.planner.trace.records import Trace

CHUNKS = 8
Head = Literal["rows", "keep"]
HEADS = get_args(Head)


@dataclass(frozen=True)
class HeadSearch:
    """The search for plans that compute the loss by rows, and the largest logits that the loss has read."""

    search: Search
    logits: LogitsRead

    def advice(self) -> str:
        """Say what else there is to do about logits that hold the peak of the smallest choice; nothing if they do not."""
        ops = self.search.smallest().trace.ops
        top = max(ops, key=lambda op: op.top_bytes)
        if top.position != max(op.position for op in ops):
            return ""
        return (
            f" Its peak is in the loss: the logits that {self.logits.place or 'the model'} returns take "
            f"{in_words(self.logits.nbytes)}, and their gradient as much. reactivate.loss.chunked_cross_entropy(hidden, "
            f"weight, targets, chunks={CHUNKS}) in the place of head and loss has "
            f"{in_words(-(-self.logits.nbytes // CHUNKS))} of "
            "each at a time; its gradients are the plain ones up to rounding."
        )


def head_search(
    model: Module,
    units: Mapping[str, Module],
    menus: Mapping[str, Sequence[Candidate]],
    table: CandidateTable,
    attempt: Attempt,
    plain: Trace,
    plain_seconds: float,
) -> HeadSearch | None:
    """Find the heads of a model; None where no loss reads logits that can be computed by rows.

    Args:
        model, units: the model, and its units by their paths.
        menus, table: the candidates of these, and what they come to.
        attempt: traces a step with candidates.
    """
    with observed_logits() as read:
        trace, summary = attempt(dict.fromkeys(_may_return_logits(model, units), BY_ROWS))
    heads = dict.fromkeys(sorted({item.place for item in read}), BY_ROWS)
    if not heads or summary.paths != table.plain.paths:
        return None
    scale = plain_seconds / plain.seconds if plain.seconds else 1.0
    seconds = max(0.0, (trace.seconds - plain.seconds) * scale)
    search = Search(
        table.beside(summary),
        menus,
        lambda chosen: attempt({**chosen, **heads}),
        plain_seconds,
        heads=heads,
        head_seconds=seconds,
    )
    return HeadSearch(search, max(read, key=lambda item: item.nbytes))


def _may_return_logits(model: Module, units: Mapping[str, Module]) -> list[str]:
    """List the modules with a matrix that are in no unit, and the model itself."""
    return [
        path
        for path, module in model.named_modules()
        if not any(is_below(path, unit) for unit in units)
        and (not path or any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)))
    ]
