"""The errors that say that nothing fits, what would, and what else there is to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reactivate._modules.paths import THE_MODEL
from reactivate._region.accounts import in_words
from reactivate.errors import PlanInfeasible
from reactivate.planner.contents import Fixed
from reactivate.planner.prediction import KEPT, alive_at_peak
from reactivate.planner.trace.records import Trace


def infeasible(
    asked: str | None,
    allowed: int,
    least_bytes: int,
    fixed: Fixed,
    plain_bytes: int,
    device: tuple[str, int],
    advice: str,
) -> PlanInfeasible:
    """Return the error that says that nothing fits, and what would.

    Args:
        asked: the budget as it was written; None for the default one.
        least_bytes: the least that there is a plan for.
        fixed: what is there all the time.
        plain_bytes: the peak of the plain step, above that.
        device: its name, and the bytes that it has; 0 if unknown.
        advice: what else there is to do.
    """
    name, memory_bytes = device
    share = -(-100 * (least_bytes - fixed.total) // max(plain_bytes, 1))
    limit = f"{in_words(allowed)} ({allowed} bytes)"
    if asked is None:
        limit += f", which {name} has free without the reserve"
    elif allowed == memory_bytes:
        limit += f", which is all that {name} has"
    is_within = not memory_bytes or least_bytes <= memory_bytes
    more = (
        f"budget={least_bytes}, or '{share}%' of the plain step's activation peak" if is_within else "more than it has"
    )
    raised = "Raise the budget" if is_within else "Plan for a device with more memory"
    reduced = _FEWER if allowed <= fixed.total else "make the batch smaller"
    return PlanInfeasible(
        f"plan({'' if asked is None else f'budget={asked!r}'}): no plan keeps this step within {limit}; the least "
        f"that does takes {in_words(least_bytes)}: {more}. Of that, {in_words(fixed.total)} "
        f"are there all the time ({_parts_of(fixed)}). {raised}, or {reduced}.{advice}{_about_unit(asked, allowed)}",
        budget_bytes=allowed,
        least_bytes=least_bytes,
    )


def _about_unit(asked: str | None, allowed: int) -> str:
    """Say how a share and a unit are written, where a number of bytes may have been meant as one of these."""
    amount = (asked or "").removesuffix("B")
    if not amount.isdigit() or allowed >= 2**20:
        return ""
    share = f'"{amount}%" is a share, ' if allowed <= 100 else ""
    return f' A number alone is one of bytes: {share}"{amount}GiB" has a unit.'


def about_repeated(plain: Trace) -> str:
    """Say how code that runs several times becomes a unit; "" if it makes less than half of the peak."""
    alive = alive_at_peak(plain)
    repeated = [item for item in alive if item.kind == KEPT and item.count > 1 and not item.module.startswith("*")]
    kept_bytes = sum(item.nbytes for item in repeated)
    if 2 * kept_bytes <= plain.peak_bytes:
        return ""
    most = repeated[0]
    return (
        f" In the plain step, {in_words(kept_bytes)} are made several times by code that is no block ({most.count} x "
        f"{most.op} {most.shape} in {most.module or THE_MODEL}), and a plan treats blocks. Is that a method such as "
        "self.layer(x, z)? Make it the forward of a module that has the modules which it uses, or call "
        "reactivate.checkpoint(self.layer)(x, z)."
    )


def about_other_checkpoints(plain: Trace, units: Collection[str]) -> str:
    """Say that blocks run under a checkpoint of the model's own, which leaves a plan nothing to choose there."""
    found = plain.checkpointed.union(call.path for calls in plain.calls for call in calls if call.regions)
    paths = [path for path in units if path in found]
    if not paths:
        return ""
    return (
        f" {_which(paths, 'runs', 'run')} under torch's checkpoint, or another one, in the plain step already. Turn that "
        "off, as with model.gradient_checkpointing_disable(), so that the plan can choose what is recomputed."
    )


def about_written(paths: Sequence[str]) -> str:
    """Say that blocks cannot be recomputed, since what they are given is written to."""
    if not paths:
        return ""
    return (
        f" {_which(paths, 'is', 'are')} kept: what a block there is given is written to in place, by itself or by code "
        "behind it, so that nothing is left to recompute it from. Use the out-of-place op (a module's `inplace=False`), so "
        "that the plan can choose that."
    )


def refused_later(paths: Sequence[str], budget: str) -> str:
    """Say that a plan recomputes blocks which a later step writes to, and how to get a plan that does not."""
    names = ", ".join(f"`{path or THE_MODEL}`" for path in paths)
    return (
        f"measure: this plan recomputes {names}, and in steps after the planned one, what is given to that is written to in "
        "place, by itself or by code behind it, so that nothing is left to recompute it from. Training with this plan would "
        f"raise an error, too. Take plan.at({budget!r}): it keeps that from now on. Or use the out-of-place op (a module's "
        "`inplace=False`)."
    )


def _which(paths: Sequence[str], one: str, several: str) -> str:
    """Return which blocks these are, with the verb for so many."""
    if len(paths) == 1:
        return f"{paths[0] or THE_MODEL} {one}"
    return f"{len(paths)} blocks, from {paths[0]} to {paths[-1]}, {several}"


def about_blocks(units: Collection[str], model: str) -> str:
    """Say that a model is one block, where it is, and what to do about it."""
    if [*units] != [""]:
        return ""
    return (
        f" The {model} has no blocks, so a plan keeps all of it or recomputes all of it. Blocks are the layers in a "
        "ModuleList, and modules that are made of modules: wrap some layers at a time into one, such as nn.Sequential."
    )


def no_room(fixed: Fixed, device: str, memory_bytes: int) -> PlanInfeasible:
    """Return the error for a step of which what is there all the time is larger than the device."""
    return PlanInfeasible(
        f"plan: {device} has {in_words(memory_bytes)}, and what this step has there all the time takes "
        f"{in_words(fixed.total)} ({_parts_of(fixed)}), whatever is recomputed. Nothing was run. Plan for a device with more "
        f"memory, or {_FEWER}.",
        budget_bytes=memory_bytes,
        least_bytes=fixed.total,
    )


_FEWER = (
    "put fewer bytes of parameters on the device: shard the model (fully_shard), freeze what is not trained, take a smaller "
    "dtype, or an optimizer with less state"
)


def _parts_of(fixed: Fixed) -> str:
    others = f", others {in_words(fixed.others)}" if fixed.others else ""
    return (
        f"parameters {in_words(fixed.parameters)}, gradients {in_words(fixed.gradients)}, "
        f"optimizer {in_words(fixed.optimizer)}, inputs {in_words(fixed.inputs)}{others}"
    )
