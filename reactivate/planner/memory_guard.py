"""`guard_memory`: a training step that runs out of memory all the same runs again, under a tighter plan."""

from __future__ import annotations

import functools
import gc
import math
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn import Module

from reactivate._engine.accounts import add_note, in_words, is_shortage
from reactivate._model.apply import apply
from reactivate._model.handle import FORWARD, AppliedForward, Handle, Owner
from reactivate._model.rollback import Rollback
from reactivate._text.keywords import refuse_unknown
from reactivate._text.warnings import warn
from reactivate._text.words import counted, described
from reactivate.errors import UnsupportedError, UsageError
from reactivate.planner.adaptive import AdaptivePlan
from reactivate.planner.budget import parse
from reactivate.planner.place import is_alone
from reactivate.planner.plan import Plan
from reactivate.planner.treatments import Treatment
from reactivate.planner.written import with_unseen

P = ParamSpec("P")
R = TypeVar("R")

_ASKED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": "B"}
_TRIES = 5  # under ever tighter plans: the last of them is the least
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

    Example:
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
        tries = 0
        while True:
            before = Rollback(step, args, kwargs, copies_optimizer=undo_optimizer)
            applied = _applied_in(before.modules)
            try:
                with before.watching():
                    result = step(*args, **kwargs)
                break
            except Exception as error:
                if not is_shortage(error):
                    raise
                shortage = error
            # Outside of the handler, and without the frames of the step, which hold its tensors.
            _let_go(shortage)
            _undo(before, shortage)
            tries = _tighten(applied, shortage, tries)
        if tries:
            _settle(applied)
        return result

    return guarded


def _let_go(error: BaseException | None) -> None:
    """Free what the frames that an error went through hold: the step's tensors. Its lines can still be read."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _undo(before: Rollback, shortage: Exception) -> None:
    """Put back what the step did.

    Raises:
        Exception: `shortage`, with the reason why the step cannot run again.
    """
    reason = before.cannot_undo()
    before.put_back()
    reason = reason or before.not_put_back()
    if reason:
        remedy = "; guard_memory(step, undo_optimizer=True) keeps copies of those" if "optimizer" in reason else ""
        raise _given_up(shortage, f"{reason}{remedy}.")


def _given_up(shortage: Exception, reason: str) -> Exception:
    add_note(shortage, f"guard_memory did not run the step again: {reason}")
    return shortage


def _tighten(applied: Owner, shortage: Exception, tries: int) -> int:
    """Apply a tighter plan, and return how many of them this step has had.

    Args:
        applied: the plan.
        shortage: what the step has raised.
        tries: how many there were before.

    Raises:
        Exception: `shortage`, if there is no tighter plan, or memory runs out while one is made.
    """
    policy: Any = applied.policy
    asked = _asked_bytes(shortage)
    search = _adaptive_below if isinstance(policy, AdaptivePlan) else _plan_below
    try:
        tighter, tries = search(policy, asked, tries)
    except Exception as error:
        if not is_shortage(error):
            raise
        _let_go(error)
        tighter, reason = None, "memory ran out while a tighter plan was made, too."
    else:
        reason = (
            "no plan takes less memory."
            if not tries
            else f"it did so {counted(tries, 'time')}, and the last plan is the least that there is."
        )
    if tighter is None:
        raise _given_up(shortage, reason) from None
    root = _root_of(applied)
    if isinstance(tighter, Plan):
        tighter = with_unseen(tighter, root)
    _replace(applied, root, tighter)
    missing = "" if asked is None else f" (it asked for {in_words(asked)} more)"
    warn(
        f"A step ran out of memory{missing}. Gradients, buffers, optimizers and random numbers were put back, the plan is for "
        f"{in_words(tighter.budget_bytes)} from now on, and the step runs again, with all else that it does."
    )
    return tries


def _plan_below(plan: Plan, asked: int | None, tries: int) -> tuple[Plan | None, int]:
    """Return a tighter plan, and how many tries there were; None if there is none.

    The first one is tighter by what was missing, each next one by half of what is left above the least.
    """
    assert plan.runner is not None
    least_bytes = plan.runner.least_bytes()
    treated, peak_bytes = _treatments_of(plan), plan.predicted.peak_bytes
    for number in range(tries, _TRIES):
        half_bytes = (peak_bytes - least_bytes) // 2 if number else 0
        budget_bytes = max(least_bytes, peak_bytes - max(_missing_bytes(asked, peak_bytes), half_bytes))
        if number == _TRIES - 1:
            budget_bytes = least_bytes
        try:
            found = plan.at(budget_bytes)
        except Exception as error:
            if not is_shortage(error):
                raise
            _let_go(error)  # of what a tighter plan may need less
            peak_bytes = budget_bytes
            continue
        if not treated.items() <= _treatments_of(found).items():
            return found, number + 1
        peak_bytes = budget_bytes
    return None, tries


def _treatments_of(plan: Plan) -> dict[str, Treatment]:
    return {decision.path: decision.treatment for decision in plan.decisions}


def _adaptive_below(plan: AdaptivePlan, asked: int | None, tries: int) -> tuple[AdaptivePlan | None, int]:
    """Return the same for a plan of all shapes: if none holds the budget, the least for a shape is taken."""
    peak_bytes, floor_bytes = plan.recent_bytes, plan.profiled.fixed.total
    if tries == _TRIES or peak_bytes > plan.budget_bytes:  # the shape that failed has the least plan already
        return None, tries
    half_bytes = (peak_bytes - floor_bytes) // 2 if tries else 0
    budget_bytes = peak_bytes - max(_missing_bytes(asked, peak_bytes), half_bytes)
    return plan.within(max(floor_bytes, budget_bytes)), tries + 1


def _missing_bytes(asked: int | None, peak_bytes: int) -> int:
    return math.ceil(_UNSAID * peak_bytes) if asked is None else asked


def _settle(applied: Owner) -> None:
    """Let a plan of all shapes have the budget that the last step was run with: no plan has held the one it has."""
    policy = _applied_policy(applied)
    if isinstance(policy, AdaptivePlan) and policy.recent_bytes > policy.budget_bytes:
        _replace(applied, _root_of(applied), policy.within(policy.recent_bytes))


def _applied_policy(applied: Owner) -> Any:
    handle = Handle.of(_root_of(applied))
    assert handle is not None
    return handle.policy


def _root_of(applied: Owner) -> Module:
    root = None if applied.root is None else applied.root()
    assert root is not None
    return root


def _replace(applied: Owner, root: Module, plan: Plan | AdaptivePlan) -> None:
    options = applied.options
    apply(
        root,
        plan,
        guards=options.guards,
        early_stop=options.early_stop,
        determinism=options.determinism,  # type: ignore[arg-type]
        replace=True,
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
