"""The parts of a plan that say what was decided, for which circumstances, and that nothing fits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import Module

from reactivate._inspect.step import leaves_of
from reactivate._modules.paths import THE_MODEL, is_below
from reactivate._modules.spans import SpanPlace, module_at
from reactivate._region.accounts import in_words
from reactivate.errors import PlanInfeasible
from reactivate.planner.chosen import ChosenStep
from reactivate.planner.cost.alive import KEPT, alive_at_peak
from reactivate.planner.cost.prediction import Fixed
from reactivate.planner.digest import class_name_of, digest_of
from reactivate.planner.offers import Offer
from reactivate.planner.plan import Plan
from reactivate.planner.planned import Circumstances, Decision, StorageUse
from reactivate.planner.profile.trace import Trace
from reactivate.planner.spelled import spelled_of
from reactivate.planner.step import StepFacts, TrainingStep
from reactivate.planner.treatments import FULL
from reactivate.planner.units import units_of


def infeasible(
    asked: str | None,
    allowed: int,
    least_bytes: int,
    fixed: Fixed,
    plain_bytes: int,
    device: tuple[str, int] = ("", 0),
    advice: str = "",
) -> PlanInfeasible:
    """Return the error that says that nothing fits, and what would.

    Args:
        asked: the budget as it was written; None for the default one.
        allowed: in bytes.
        least_bytes: the least that there is a plan for.
        fixed: what is there all the time.
        plain_bytes: the peak of the plain step, above that.
        device: its name, and the bytes that it has; 0 where nobody says.
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
    raised = ["Raise the budget"] if is_within else ["Plan for a device with more memory"]
    remedies = [*raised, _FEWER if allowed <= fixed.total else "make the batch smaller"]
    return PlanInfeasible(
        f"plan({'' if asked is None else f'budget={asked!r}'}): no plan keeps this step within {limit}; the least "
        f"that does takes {in_words(least_bytes)}: {more}. Of that, {in_words(fixed.total)} "
        f"are there all the time ({_parts_of(fixed)}). {', or '.join(remedies)}.{advice}{_about_unit(asked, allowed)}",
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
    """Say how code that runs several times becomes a unit; "" where what is made outside of units is mostly something else.

    Args:
        plain: the plain step.
    """
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


def no_room(fixed: Fixed, device: str, memory_bytes: int) -> PlanInfeasible:
    """Return the error for a step of which what is there all the time is larger than the device.

    Args:
        fixed: that.
        device: its name.
        memory_bytes: what it has.
    """
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


def decisions_of(choice: ChosenStep, paths: Sequence[str], model: Module) -> tuple[Decision, ...]:
    """Return what is done with each unit, and with the heads.

    Args:
        choice: the plan.
        paths: the units in the order in which they are called.
        model: the model.
    """
    held: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    # A unit may be called often.
    proven = choice.proven
    for path, entry in zip(paths, proven.solution.entries, strict=True):
        unit = entry.span or path
        held[unit] += entry.held_bytes
        seconds[unit] += entry.seconds
    for path, figures in zip(proven.reading.paths, proven.reading.calls, strict=True):  # no spans where any are moved
        moved[path] += sum(figures.moved)
    seconds |= dict.fromkeys(choice.heads, choice.head_seconds / max(len(choice.heads), 1))
    return tuple(
        Decision(path, class_name_of(module), digest_of(module), treatment, held[path], seconds[path], moved[path])
        for path, treatment in (*proven.treatments.items(), *choice.heads.items())
        for module in (module_at(model, path),)
    )


def with_unseen(plan: Plan, model: Module) -> Plan:
    """Return a plan that also recomputes the units that did not run in the step that it was made for.

    Args:
        plan: the plan.
        model: its model.
    """
    paths = [decision.path for decision in plan.decisions if not decision.treatment.by_rows]
    treated = [path if (place := SpanPlace.of(path)) is None else place.path for path in paths]
    unseen = [
        Decision(path, class_name_of(module), digest_of(module), FULL, 0, 0.0)
        for path, module in units_of(model).items()
        if not any(is_below(path, other) for other in treated)
    ]
    return replace(plan, decisions=(*plan.decisions, *unseen)) if unseen else plan


def storages_of(choice: ChosenStep, offers: Sequence[Offer]) -> tuple[StorageUse, ...]:
    """Return the storages that a plan uses."""
    used = {treatment.storage for treatment in choice.proven.treatments.values()}
    return tuple(
        StorageUse(
            offer.name,
            repr(offer.storage),
            choice.flow.stored_bytes,
            None if offer.link is None else offer.link.out_bytes_per_second,
            None if offer.link is None else offer.link.back_bytes_per_second,
            spelled_of(offer.storage),
        )
        for offer in offers
        if offer.name in used
    )


def circumstances_of(
    step: TrainingStep, device: str, facts: StepFacts, units: int, idle_units: int, *, is_predicted: bool
) -> Circumstances:
    """Return the circumstances that a plan is made for."""
    leaves = leaves_of("args", step.args) | leaves_of("kwargs", dict(step.kwargs or {}))
    inputs = tuple((name, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for name, leaf in leaves.items())
    model = class_name_of(step.model)
    return Circumstances(
        model, inputs, device, torch.__version__, facts.loss, is_predicted, units, facts.trains, idle_units
    )
