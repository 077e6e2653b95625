"""The calls of a model on ranks that have one plan: they agree on the shapes of each call before it begins."""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch.nn import Module

from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.planner.distributed import Ranks
from reactivate.planner.shapes import CallShapes
from reactivate.policies._base import PerCall


class SharedCalls:
    """The calls of some ranks, or of this one alone.

    Args:
        ranks: these. They get a group of their own, whose collectives are not among those of a step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks.apart()
        before = self._ranks.issued()
        self._ranks.gather(None)
        self._each = self._ranks.issued() - before

    @property
    def count(self) -> int:
        """Return how many there have been."""
        return self._ranks.issued() // max(self._each, 1)

    def shapes_of(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallShapes:
        """Return the shapes of a call, of which each dimension is the largest one of all ranks.

        Raises:
            UsageError: the ranks call the model in unlike ways.
        """
        found = self._ranks.gather(CallShapes.of(model, args, kwargs))
        for rank, other in enumerate(found):
            if not other.is_like(found[0]):
                raise UsageError(
                    f'plan(shapes="adaptive"): rank {rank} calls the model with {other.in_words()}, and rank 0 with '
                    f"{found[0].in_words()}. All ranks have one plan, so they must give the model tensors of the same names, "
                    "dtypes and numbers of dimensions, and the same texts and flags, at the same time."
                )
        return functools.reduce(CallShapes.over, found)


class CatchingUp(PerCall):
    """A policy for a step that this rank runs once more, while the others wait in the midst of it.

    Args:
        plan: that the ranks have.
        policy: to run the step with.
        calls: how many calls of the step they have agreed on before.
    """

    def __init__(self, plan: PerCall, policy: Policy, calls: int) -> None:
        self._plan, self._policy, self._left = plan, policy, calls

    def _default_check(self) -> Literal["metadata"]:
        return "metadata"  # collectives that are left out give no values

    def of_call(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        if self._left > 0:
            self._left -= 1
        else:
            self._plan.of_call(model, args, kwargs)  # the others make the plan of this call
        return self._policy
