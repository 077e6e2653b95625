"""`guard_memory`: a training step that runs out of memory all the same runs again, under a tighter plan."""

from __future__ import annotations

import functools
import gc
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.nn import Module

from reactivate._engine.accounts import add_note, in_words, is_shortage
from reactivate._model.apply import apply
from reactivate._model.handle import FORWARD, AppliedForward, Owner
from reactivate._model.rollback import Rollback
from reactivate._text.keywords import refuse_unknown
from reactivate._text.warnings import warn
from reactivate._text.words import described
from reactivate.errors import PlanInfeasible, UnsupportedError, UsageError
from reactivate.planner.adaptive import AdaptivePlan
from reactivate.planner.budget import parse
from reactivate.planner.place import is_alone
from reactivate.planner.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")

_ASKED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": "B"}
_FACTORS = (1, 2, 4, 8)  # each time that the step fails again, more is taken to be missing
_UNSAID = 0.05  # of the plan's peak: by how much it is tightened where the error does not say what was missing


@refuse_unknown
def guard_memory(step: Callable[P, R], *, undo_optimizer: bool = False) -> Callable[P, R]:
    """Wrap a training step so that it runs again, under a tighter plan, if it runs out of memory.

    Gradients, buffers, attributes of modules and of objects that the step can reach, optimizers, schedulers, gradient scalers
    and random number generators are put back to what they were before the step. The plan that is applied to the step's model
    is tightened by what was missing, by twice that if the step fails again, and stays so. One warning tells. The result is
    bitwise that of a step with enough memory.

    All else that the step does is done twice: taking a batch from an iterator, writing to a file. Pass the batch as an
    argument, and leave the rest out of the step. Each call copies the gradients that there are to the host:
    set them to None before, or accumulate inside of the step.

    Args:
        step: forward, backward, and the optimizer's step if you like. The model in it has a plan applied, one that was made
            in this process.
        undo_optimizer: whether to copy parameters and the optimizer's state to the host before each optimizer step. Without
            that, a step in which an optimizer has begun to write is not run again.

    Returns:
        A function like `step`. It raises the error of `step` if there is no tighter plan, or if something cannot be put back;
        a note in the error says which, and all else has been put back.

    Raises:
        UnsupportedError: the process is one of several in `torch.distributed`: a rank that runs its step again would wait
            alone in its collectives.
        UsageError: `step` is no function, or it reaches no model with a plan, or more than one.

    Examples:
        >>> import torch, reactivate
        >>> layer = torch.nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> handle = reactivate.apply(model, reactivate.plan(model, torch.randn(8, 64, 32), budget="80%"))
        >>> @reactivate.guard_memory
        ... def step(model, batch):
        ...     model(batch).sum().backward()
        >>> step(model, torch.randn(8, 64, 32))
    """
    if not callable(step) or isinstance(step, (type, Module)):
        raise UsageError(f"guard_memory takes a function that runs a training step; got {described(step)}.")

    @functools.wraps(step)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        _refuse_ranks()
        for factor in _FACTORS:
            before = Rollback(step, args, kwargs, copies_optimizer=undo_optimizer)
            applied = _applied_in(before.modules)
            try:
                with before.watching():
                    return step(*args, **kwargs)
            except Exception as error:
                if not is_shortage(error):
                    raise
                tighter = _after(error, before, applied, factor)
            _run_under(tighter, applied)  # outside of the handler, whose error keeps the tensors of the step
        return step(*args, **kwargs)

    return guarded


def _after(error: Exception, before: Rollback, applied: Owner, factor: int) -> _Tighter:
    """Put back what the step did, and return a tighter plan.

    Raises:
        Exception: `error`, with the reason why the step cannot run again.
    """
    reason = before.cannot_undo()
    before.put_back()
    reason = reason or before.not_put_back()
    if reason:
        remedy = "; guard_memory(step, undo_optimizer=True) keeps copies of those" if "optimizer" in reason else ""
        add_note(error, f"guard_memory did not run the step again: {reason}{remedy}.")
        raise error
    asked = _asked_bytes(error)
    plan = _tighter_than(applied.policy, asked, factor)
    if plan is None:
        add_note(error, "guard_memory did not run the step again: no plan takes less memory.")
        raise error
    return _Tighter(plan, asked)


class _Tighter(NamedTuple):
    plan: Plan | AdaptivePlan
    asked_bytes: int | None


def _tighter_than(policy: Any, asked: int | None, factor: int) -> Plan | AdaptivePlan | None:
    peak_bytes = policy.recent_bytes if isinstance(policy, AdaptivePlan) else policy.predicted.peak_bytes
    budget_bytes = peak_bytes - factor * (math.ceil(_UNSAID * peak_bytes) if asked is None else asked)
    if budget_bytes <= 0:
        return None
    if isinstance(policy, AdaptivePlan):  # the shape that failed may have the least plan already
        return policy.within(budget_bytes) if peak_bytes <= policy.budget_bytes else None
    try:
        return policy.at(budget_bytes)  # type: ignore[no-any-return]
    except PlanInfeasible:
        return None


def _run_under(tighter: _Tighter, applied: Owner) -> None:
    root = None if applied.root is None else applied.root()
    assert root is not None
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    options = applied.options
    apply(
        root,
        tighter.plan,
        guards=options.guards,
        early_stop=options.early_stop,
        determinism=options.determinism,  # type: ignore[arg-type]
        replace=True,
    )
    asked = "" if tighter.asked_bytes is None else f" (it asked for {in_words(tighter.asked_bytes)} more)"
    warn(
        f"A step ran out of memory{asked}. Gradients, buffers, optimizers and random numbers were put back, the plan is for "
        f"{in_words(tighter.plan.budget_bytes)} from now on, and the step runs again, with all else that it does."
    )


def _asked_bytes(error: Exception) -> int | None:
    """Return how much the step asked for when there was no more, if the error says that."""
    found = _ASKED.search(str(error))
    return None if found is None else parse(f"{found[1]} {_UNITS.get(found[2], found[2])}").total_bytes


def _applied_in(modules: Iterable[Module]) -> Owner:
    """Return the plan, with its model, among these modules.

    Raises:
        UsageError: there is not exactly one, or it cannot plan again.
    """
    stand_ins = [vars(module).get(FORWARD) for module in modules]
    every = {id(item.applied): item.applied for item in stand_ins if isinstance(item, AppliedForward)}
    own = [item for item in every.values() if item.root is not None and item.root() is not None]
    found = own or list(every.values())  # copies of the model, for averages say, have copies of the plan
    if len(found) != 1 or not isinstance(found[0].policy, (Plan, AdaptivePlan)):
        policies = ", ".join(repr(applied.policy) for applied in found) or "none"
        raise UsageError(
            f"guard_memory takes a step that uses one model to which a plan is applied; the policies found are: {policies}. "
            "Write reactivate.apply(model, reactivate.plan(...)) before the step runs."
        )
    if found[0].root is None or found[0].root() is None or not found[0].policy.can_plan:
        raise UsageError(
            "guard_memory: this plan has no step to plan for, since it was loaded from a file or copied with its model. Plan "
            "again, and apply the plan to the model."
        )
    return found[0]


def _refuse_ranks() -> None:
    if not is_alone():
        raise UnsupportedError(
            "guard_memory is not supported in a process group of several ranks: one that runs its step again would wait "
            'alone in its collectives. Use plan(..., shapes="adaptive") with a budget that leaves room.'
        )
