"""`plan`: the fastest policy with which a step fits, proved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, overload

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from reactivate._inspect.arguments import check_module, example_of, why_not_called_with
from reactivate._model.apply import paused
from reactivate._modules.paths import THE_MODEL
from reactivate._region.due import uncounted
from reactivate._text.keywords import refuse_unknown
from reactivate._text.warnings import warn
from reactivate._text.words import alike, described, name_of
from reactivate._types import Storage
from reactivate.errors import UsageError
from reactivate.planner.adaptive import AdaptivePlan, adaptive_plan
from reactivate.planner.budget import Budget, parse, parse_margin, parse_reserve
from reactivate.planner.compiled import check_compiled, compiled_parts, uncompiled
from reactivate.planner.cost.devices import DeviceSpec
from reactivate.planner.distributed import Ranks, begin_sharded, check_group
from reactivate.planner.head import HEADS, Head
from reactivate.planner.maximize import largest
from reactivate.planner.offload import check_directories, storages_in
from reactivate.planner.plan import Plan
from reactivate.planner.planner import Planner, holding_compiled
from reactivate.planner.progress import older_objects_left_out, progress
from reactivate.planner.step import UNLABELLED, Loss, TrainingStep
from reactivate.planner.target import find_target


@overload
def plan(
    model: Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: float | str | None = None,
    loss: Loss | None = None,
    step: Callable[[], object] | None = None,
    optimizer: Optimizer | None = None,
    device: torch.device | str | DeviceSpec | None = None,
    maximize: str | Mapping[str, int] | None = None,
    storage: Storage | Iterable[Storage] | None = None,
    shapes: None = None,
    head: Head | None = None,
    group: ProcessGroup | None = None,
    reserve: int | str | None = None,
    margin: int | str | None = None,
    compiled: bool | str = False,
) -> Plan: ...


@overload
def plan(
    model: Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: float | str | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    device: torch.device | str | DeviceSpec | None = None,
    shapes: Literal["adaptive"],
    reserve: int | str | None = None,
    margin: int | str | None = None,
) -> AdaptivePlan: ...


@refuse_unknown
@uncounted()
def plan(
    model: Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: float | str | None = None,
    loss: Loss | None = None,
    step: Callable[[], object] | None = None,
    optimizer: Optimizer | None = None,
    device: torch.device | str | DeviceSpec | None = None,
    maximize: str | Mapping[str, int] | None = None,
    storage: Storage | Iterable[Storage] | None = None,
    shapes: Literal["adaptive"] | None = None,
    head: Head | None = None,
    group: ProcessGroup | None = None,
    reserve: int | str | None = None,
    margin: int | str | None = None,
    compiled: bool | str = False,
) -> Plan | AdaptivePlan:
    """The fastest policy with which a training step stays within a budget, proved to do so before it is returned.

    On a device that is here the plain step runs a few times: to warm up, under a clock for every op, and to be timed. Every
    policy that is tried then runs in one step, some twenty in all: for real where the plain step fits and takes no
    longer than its simulation, and otherwise on fake tensors, which have neither memory nor compute. A model on the meta
    device, or a device that is only named, is simulated altogether, with the times of a roofline. Model, gradients and
    random number generators are restored afterwards.

    Args:
        model: a policy that is applied to it is left out while it is planned; `apply(model, plan, replace=True)` replaces
            it.
        args: the arguments of one call, as a tuple or a list; a dict holds keyword arguments, a lone tensor is one
            argument.
        kwargs: keyword arguments.
        budget: the most that may be allocated at any moment, all included: bytes, "8GiB"; or "50%" of the plain step's
            activation peak: its peak minus what is always allocated. None, on an accelerator: its free memory
            and what the model has there already, less `reserve`; and no more than its allocator can reserve.
        loss: a function from the model's output to the scalar loss. By default the output if it is a scalar, its
            `.loss`, or the sum of what is in it.
        step: a function that runs forward and backward, without the optimizer; in the place of `args`, `kwargs` and `loss`.
        optimizer: its state and what its step allocates count toward the budget.
        device: where training will run; for a device that is not here, its name ("H100-SXM"), a file ("mine.json") or a
            description (`reactivate.planner.cost.devices`).
        storage: where tensors may be kept for the backward beside the memory of the device: a storage, or several of which
            the plan uses the one with which it is fastest. The plan uses no storage if everything fits without, or if
            recomputation is faster. Their speed is measured; that of a device that is not here comes from its description.
        shapes: "adaptive": each shape of batch gets its own plan, made when the shape first appears, from the measurements
            of this call. Returns an `AdaptivePlan`, a policy too. A `budget` in percent refers to this batch.
        head: "rows": the cross-entropy of the logits may be computed by rows, bitwise as torch does, so that no log-softmax
            and no cast of them is kept. The planner finds it wherever it is called, and takes it by rows where that makes
            the plan faster or possible. "keep": never, for a model that is compiled later. None: "rows" on a CPU, where
            tests show every bit. Adaptive plans keep it, and so do those of a group and of a compiled model.
        group: the ranks that run this step together and make this call, each with its own batch: they agree about one policy,
            that of the rank with the least room, and each has its own prediction beside it. Needed where a recomputation may
            have collectives in it, so for models that are sharded by `fully_shard`. A budget is one of each rank, and they
            may differ. Costs a few exchanges of kilobytes; every rank waits for the slowest one, as does `Plan.at`. None
            as well where torch's process group `fake` stands for other ranks: the plan is that of this rank.
        reserve: what the default budget of an accelerator leaves free for fragmentation and all that a simulation of its
            allocator does not see: bytes, "2GiB", or a share of the memory that is there, "5%" unless said.
        margin: what is left free for other batches, where sizes depend on the numbers in tensors, as the loads of experts do:
            the share by which memory of such a size may be larger, "5%" unless said; 0 for none.
        compiled: whether the model will run under `torch.compile` as a whole; or under which of its backends. The plan counts
            the extra memory of a compiled step, and its compiled step is run, if it can run here, until one holds. "blocks":
            each block is compiled, and what candidates come to is measured on the compiled blocks.
        maximize: "batch": look for the largest first dimension of the arguments that fits; or {name: dimension}.

    Returns:
        A policy: give it to `apply`.

    Raises:
        PlanInfeasible: no plan fits; the error names the smallest budget that works.
        UsageError: an argument is not one of the above, the step cannot be simulated, the ranks of the group have not the
            same model, or one of them has raised.
        UnsupportedError: the model is on XLA; or its step depends on values, and no step can run that tells them: it does not
            fit, or only some of the ranks need it.

    Examples:
        >>> import torch, reactivate
        >>> layer = torch.nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> plan = reactivate.plan(model, torch.randn(8, 64, 32), budget="50%")
        >>> plan.predicted.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes
        True
        >>> handle = reactivate.apply(model, plan)
    """
    began = perf_counter()
    check_module("plan", model)
    args, kwargs = example_of("plan", model, args, kwargs)
    _check_step(loss, step)
    _check_optimizer(model, optimizer)
    if head is not None and head not in HEADS:
        raise UsageError(f'plan: head= takes "rows" or "keep"; got {described(head)}.')
    asked = None if budget is None else parse(budget)
    offered = storages_in(storage)
    _check_shapes(shapes, step=step, maximize=maximize, storage=storage, compiled=compiled or None)
    check_group(model, group, maximize=maximize, storage=storage, compiled=compiled or None)
    check_compiled("plan", compiled, step=step, maximize=maximize, storage=storage)
    if step is not None:
        _check_beside_step(args=args, kwargs=kwargs, loss=loss is not None)
    kept_free, spare = parse_reserve(reserve, budget), parse_margin(margin)
    ranks = Ranks(group)
    with paused(model), older_objects_left_out(), progress("plan") as tell, ranks.together(), uncompiled():
        begin_sharded(model)
        target = replace(find_target(model, args, kwargs, device), reserve=kept_free, margin=spare)
        check_directories(offered.values(), target)
        if asked is None and target.is_here and target.device.type == "cpu":
            raise UsageError(
                "plan needs a budget on a CPU: pass bytes, '8GiB' or '50%', as in budget='8GiB' (--budget 8GiB)."
            )
        planned = TrainingStep(model, args, kwargs, loss, step, compiled=compiled)
        may_slice = head == "rows" or (head is None and target.device.type == target.spec.name == "cpu")
        head = "rows" if may_slice and not (shapes or compiled or group) else "keep"
        if maximize is not None:
            found = largest(planned, target, optimizer, tell, asked, maximize, offered, head)
            _warn_of_mistakes(found, model, device, compiled)
            return replace(found, planning_seconds=perf_counter() - began)
        is_adaptive = shapes is not None
        planner = Planner(planned, target, optimizer, tell, offered, needs_fakes=is_adaptive, head=head, ranks=ranks)
        found = planner.prepare().plan(asked)
        if asked is None:
            capacity = target.capacity_bytes(planner.fixed.total, is_predicted=planner.profile.is_predicted)
            found = within_device(found, capacity, planner.plan, ranks)
        if compiled and not planner.profile.is_predicted:
            found = holding_compiled(found, compiled, planner.plan)
    found = replace(found, planning_seconds=perf_counter() - began)
    _warn_of_mistakes(found, model, device, compiled)
    return found if shapes is None else adaptive_plan(planner, found, ranks)


def _warn_of_mistakes(found: Plan, model: Module, device: Any, compiled: bool | str) -> None:
    """Warn of a step that is most likely not the one that trains."""
    name, made_for = type(model).__name__, found.made_for
    if not made_for.trains:
        warn(
            f"plan: the {name} is in eval() mode, so dropout keeps nothing and norms read their statistics. In training mode "
            "a step takes other memory: call model.train() first."
        )
    if made_for.loss == UNLABELLED:
        warn(
            f"plan: the {name} has returned no loss, so the sum of its output was taken for one. In training a step takes "
            "other memory: put the labels into the arguments, or pass loss=."
        )
    if device is None and any(parameter.is_meta for parameter in model.parameters()):
        warn(
            f"plan: the {name} is on the meta device, and its step was planned for a {made_for.device}. Name the device on "
            "which it trains: plan(..., device='H100-SXM'), or another one that `reactivate devices` lists."
        )
    parts = [] if compiled else compiled_parts(model)
    if parts:
        which = alike([path or THE_MODEL for path in parts])
        way = "compiled=True" if "" in parts else "compiled='blocks'"
        warn(
            f"plan: the {name} has compiled modules ({which}), and this plan is one of the step without the compiler, which "
            f"takes other memory and time. To plan the compiled step, pass {way}."
        )


def _check_shapes(shapes: Any, **others: Any) -> None:
    if shapes is None:
        return
    if shapes != "adaptive":
        raise UsageError(
            f'plan: shapes= takes "adaptive", or None for the shapes of this batch; got {described(shapes)}.'
        )
    for name, value in others.items():
        if value is not None:
            raise UsageError(f'plan: shapes="adaptive" is not supported with {name}=, {_WHY_NOT[name]}.')


_WHY_NOT = {
    "step": "whose arguments are unknown: pass the arguments of one call, and loss=",
    "maximize": "which looks for one shape: maximize first, then plan with a batch of that size",
    "compiled": "whose graphs are made for one shape: compile the model with `adaptive.of_batch(...)` of the longest batch",
    "storage": "of which a plan has to know how long one batch leaves its tensors there: plan the longest batch",
}


def _check_call(name: str, function: Any, given: int) -> None:
    """See to it that a function, or a module of a class, can be called with so many arguments, where Python knows that."""
    is_class, kind = isinstance(function, type), function if isinstance(function, type) else type(function)
    is_module = issubclass(kind, Module)
    reason, _ = why_not_called_with(function.forward if is_module else function, range(given + is_class), {})
    if reason:
        called = f"{kind.__name__}()" if is_module else name_of(function)
        takes = "the model's output alone" if given else "no argument"
        example = f"lambda output: {called}(output, labels)" if given else f"lambda: {called}(...)"
        raise UsageError(
            f"plan: {name}= is called with {takes}; {called} cannot be ({reason}). Write {name}={example}."
        )


def _check_beside_step(**others: Any) -> None:
    given = [f"{name}=" for name, value in others.items() if value]
    if given:
        raise UsageError(
            f"plan: step= makes the call and the loss itself, so {' and '.join(given)} would not be read: leave out "
            f"either step= or {'it' if len(given) == 1 else 'them'}."
        )


def _check_step(loss: Any, step: Any) -> None:
    for name, function, takes, given in (("loss", loss, "the model's output", 1), ("step", step, "nothing", 0)):
        if function is None:
            continue
        is_class = isinstance(function, type)
        if is_class and issubclass(function, Module):
            _check_call(name, function, given)
        if is_class or not callable(function):
            instance = f" Write {name}={function.__name__}()." if is_class else ""
            raise UsageError(f"plan: {name}= takes a function of {takes}; got {described(function)}.{instance}")
        _check_call(name, function, given)


def _check_optimizer(model: Module, optimizer: Any) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        is_kind = isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
        kind = optimizer.__name__ if is_kind else "AdamW"
        raise UsageError(
            f"plan: optimizer= takes an optimizer of the model's parameters; got {described(optimizer)}. Write "
            f"optimizer=torch.optim.{kind}(model.parameters())."
        )
    own = set(map(id, model.parameters()))
    if not any(id(item) in own for group in optimizer.param_groups for item in group["params"]):
        raise UsageError(
            f"plan: optimizer= has none of the parameters of the {type(model).__name__}, so its state for them is unknown. "
            "Make it from the parameters that the model has now: those of a model that was built anew, or sharded since, "
            "are others."
        )


def within_device(found: Plan, capacity_bytes: int, plan: Callable[[Budget], Plan], ranks: Ranks) -> Plan:
    """Return a plan for the default budget whose memory fits also as the allocator is predicted to reserve it.

    Args:
        found: the plan for that budget.
        capacity_bytes: what the allocator may reserve on the device, all included.
        plan: from a smaller budget to its plan.
        ranks: that plan together: what one of them lacks all leave free.

    Raises:
        PlanInfeasible: there is none.
    """
    while (over_bytes := max(ranks.gather((found.predicted.reserved_bytes or 0) - capacity_bytes))) > 0:
        found = plan(parse(found.budget_bytes - over_bytes))
    return found
