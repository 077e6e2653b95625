"""`retry_on_oom`: a training step that runs out of memory all the same runs again, under a tighter plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from torch.distributed import ProcessGroup
from torch.nn import Module

from reactivate._model.applied import Applied
from reactivate._model.handle import applied_to
from reactivate._model.rollback import Rollback
from reactivate._region.accounts import add_note, in_words, is_shortage
from reactivate._text.keywords import refuse_unknown
from reactivate._text.warnings import warn
from reactivate._text.words import described, in_one_line
from reactivate._types import Policy
from reactivate.errors import ReactivateError, UsageError
from reactivate.planner.adaptive import AdaptivePlan
from reactivate.planner.candidates import FULL, Assignment
from reactivate.planner.guarded_ranks import CannotCatchUp, GuardedRanks, RankStep, RankWasShort
from reactivate.planner.plan import Plan
from reactivate.planner.shared_calls import CatchingUp
from reactivate.planner.tighter import Ladder, NoTighterPlan, asked_bytes, let_go, replace_plan, root_of
from reactivate.planner.units import find_units

P = ParamSpec("P")
R = TypeVar("R")


@refuse_unknown
def retry_on_oom(
    step: Callable[P, R], *, undo_optimizer: bool = False, group: ProcessGroup | None = None
) -> Callable[P, R]:
    """Wrap a training step so that it runs again, under a tighter plan, if it runs out of memory.

    Gradients, buffers, attributes of modules and of objects that the step can reach, optimizers, schedulers, gradient scalers
    and random number generators are put back to what they were before the step. The plan that is applied to the step's model
    is tightened by what was missing; if the step fails again, by half of what is left above the least plan; and stays so. A
    warning tells each time. The result is bitwise that of a step with enough memory.

    All else that the step does is done twice: taking a batch from an iterator, writing to a file. Pass the batch as an
    argument, and leave the rest out of the step. Each call copies the gradients that there are to the host:
    set them to None before, or accumulate inside of the step.

    Several ranks make each call together. They agree on one number, right before an optimizer in the step begins, or at the
    end of the step: if any of them was short, all put back what the step did, and run it again.

    Args:
        step: forward, backward, and the optimizer's step if you like. The model in it has a plan applied, one that was made
            in this process.
        undo_optimizer: whether to copy parameters and the optimizer's state to the host before each optimizer step. Without
            that, a step in which an optimizer has begun to write is not run again.
        group: the ranks that run the step together; None: all that there are.

    Returns:
        A function like `step`. It raises the error of `step` if there is no tighter plan, or if something cannot be put back;
        a note in the error says which, and all else has been put back.

    Raises:
        ReactivateError: another rank has run out of memory, and the step cannot be run again; says why.
        UsageError: `step` is no function, or it reaches no model with a plan, or more than one; or `group` is no group that
            this process is in.

    Examples:
        >>> import torch, reactivate
        >>> layer = torch.nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> handle = reactivate.apply(model, reactivate.plan(model, torch.randn(8, 64, 32), budget="80%"))
        >>> @reactivate.retry_on_oom
        ... def step(model, batch):
        ...     model(batch).sum().backward()
        >>> step(model, torch.randn(8, 64, 32))
    """
    if not callable(step) or isinstance(step, (type, Module)):
        raise UsageError(f"retry_on_oom takes a function that runs a training step; got {described(step)}.")
    ranks = GuardedRanks(group)

    @functools.wraps(step)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        ladder = Ladder()
        while True:
            run = _Run(ranks, step, args, kwargs, undo_optimizer=undo_optimizer)
            shortage: Exception | None = None
            try:
                result: R = run()
                break
            except RankWasShort:
                pass
            except Exception as error:
                if not is_shortage(error):
                    raise
                shortage = error
            run.undo(shortage)  # outside of the handlers, whose errors keep the tensors of the step
            run.tighten(ladder, shortage)
        ladder.settle(run.applied)
        return result

    return guarded


class _Run:
    """One run of a guarded step.

    Args:
        ranks: all that run it together.
        step, args, kwargs: the step.
        undo_optimizer: whether an optimizer's step can be undone.

    Attributes:
        applied: the plan, with its model.
    """

    def __init__(
        self,
        ranks: GuardedRanks,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        undo_optimizer: bool,
    ) -> None:
        self._ranks = ranks
        self._step = functools.partial(step, *args, **kwargs)
        self._before = Rollback(step, args, kwargs, copies_optimizer=undo_optimizer)
        self.applied = _applied_in(self._before.modules)
        self._on_ranks = RankStep(ranks, self._before.modules)
        plan = self.applied.policy
        self._calls = plan.calls.count if isinstance(plan, AdaptivePlan) else 0
        self._agrees_at_end = undo_optimizer
        self._cannot = ""  # run again, and why

    def __call__(self) -> Any:
        """Run it.

        Raises:
            RankWasShort: another rank ran out of memory.
            Exception: whatever the step raises.
        """
        with self._before.watching(None if self._agrees_at_end else self._on_ranks.agree):
            result = self._step()
        self._on_ranks.agree()
        return result

    def undo(self, shortage: Exception | None) -> None:
        """Put back what the step did, on all ranks.

        Args:
            shortage: what it has raised; None if another rank was short.

        Raises:
            Exception: `shortage`, with the reason why the other ranks cannot be told.
        """
        if shortage is not None:
            let_go(shortage)
            self._put_back()
            if self._ranks.are_many:
                self._catch_up(shortage)
        if shortage is None or self._ranks.are_many:
            self._put_back()

    def _put_back(self) -> None:
        self._on_ranks.reset()
        reason = self._before.cannot_undo() or self._on_ranks.cannot_undo()
        self._before.put_back()
        self._cannot = self._cannot or reason or self._before.not_put_back()

    def _catch_up(self, shortage: Exception) -> None:
        """Take the part of this rank in the collectives of the others, so that they come to the end of the step."""
        try:
            if self._cannot:
                raise CannotCatchUp(self._cannot)
            self._on_ranks.catch_up(self, root_of(self.applied), self._least())
        except Exception as error:  # whatever it is, the ranks cannot meet any more: the shortage is raised
            let_go(error)
            raise _noted(shortage, f"{_in_short(error)}. The other ranks wait for this one") from None

    def _least(self) -> Policy:
        """Return the policy with which this rank catches up: everything is recomputed."""
        plan, everything = self.applied.policy, Assignment(dict.fromkeys(find_units(root_of(self.applied)), FULL))
        if not isinstance(plan, AdaptivePlan) or not plan.is_shared:
            return everything
        return CatchingUp(plan, everything, plan.calls.count - self._calls)

    def tighten(self, ladder: Ladder, shortage: Exception | None) -> None:
        """Apply a tighter plan where memory was short.

        Args:
            ladder: the plans that this call has had.
            shortage: as for `undo`.

        Raises:
            Exception: `shortage`, with the reason why the step cannot run again.
            ReactivateError: it is another rank that was short, with that reason.
        """
        try:
            if self._cannot:
                raise NoTighterPlan(self._cannot)
            tighter, reason = ladder.below(self.applied, shortage), ""
        except NoTighterPlan as error:
            tighter, reason = None, str(error)
        except ReactivateError as error:  # the other ranks are to hear of it
            tighter, reason = None, f"no tighter plan can be made: {error}"
        self._on_ranks.reset()  # steps that were tried for a plan have gone through it
        told = self._ranks.gather((shortage is not None, reason))
        short = next(rank for rank, (is_short, _) in enumerate(told) if is_short)
        reason = next(
            (f"rank {rank}: {why}" if len(told) > 1 else why for rank, (_, why) in enumerate(told) if why), ""
        )
        if reason and shortage is not None:
            raise _noted(shortage, reason)
        if reason:
            raise ReactivateError(
                f"retry_on_oom: rank {short} of {len(told)} has run out of memory, and the step does not run again: {reason}."
            )
        if tighter is not None:
            replace_plan(self.applied, tighter)
        who = "A step" if shortage is not None else f"Rank {short}"
        asked = None if shortage is None else asked_bytes(shortage)
        missing = "" if asked is None else f" (it asked for {in_words(asked)} more)"
        planned = "" if tighter is None else f" the plan is for {in_words(tighter.budget_bytes)} from now on,"
        warn(
            f"{who} ran out of memory{missing}. Gradients, buffers, optimizers and random numbers were put back,{planned} "
            "and the step runs again, with all else that it does."
        )


def _noted(shortage: Exception, reason: str) -> Exception:
    remedy = "; retry_on_oom(step, undo_optimizer=True) keeps copies of those" if "an optimizer had" in reason else ""
    add_note(shortage, f"retry_on_oom does not run the step again: {reason}{remedy}.")
    return shortage


def _in_short(error: Exception) -> str:
    return str(error) if isinstance(error, CannotCatchUp) else in_one_line(error)


def _applied_in(modules: Iterable[Module]) -> Applied:
    """Return the plan, with its model, among these modules.

    Raises:
        UsageError: there is not exactly one, or it cannot plan again.
    """
    every = {id(item.applied): item.applied for item in map(applied_to, modules) if item is not None}
    own = [item for item in every.values() if item.root is not None and item.root() is not None]
    found = own or list(every.values())  # copies of the model, for averages say, have copies of the plan
    if len(found) != 1 or not isinstance(found[0].policy, (Plan, AdaptivePlan)):
        policies = ", ".join(repr(applied.policy) for applied in found) or "none"
        raise UsageError(
            f"retry_on_oom takes a step that uses one model to which a plan is applied; the policies found are: {policies}. "
            "Write reactivate.apply(model, reactivate.plan(...)) before the step runs."
        )
    if found[0].root is None or found[0].root() is None or not found[0].policy.can_plan:
        raise UsageError(
            "retry_on_oom: this plan has no step to plan for, since it was loaded from a file or copied with its model. Plan "
            "again, and apply the plan to the model."
        )
    return found[0]
