"""One step under a policy: simulated without memory and compute, or for real where that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._model.apply import apply
from reactivate._types import Policy
from reactivate.planner.profile.answers import RealAnswers
from reactivate.planner.profile.trace import Costs, Trace
from reactivate.planner.profile.tracer import traced
from reactivate.planner.step import TrainingStep
from reactivate.storage.rehearsal import Rehearsal


@contextmanager
def on_tensors(
    step: TrainingStep, device: torch.device, answers: RealAnswers | None, *, with_values: bool
) -> Iterator[tuple[Callable[[], None], list[Tensor]]]:
    """The step for real or on fake tensors, with answers: yields what runs it, and the tensors that are there before it.

    Args:
        step, device, with_values, answers: as for `simulate`.
    """
    with ExitStack() as stack:
        run, known = stack.enter_context(step.on_values() if with_values else step.on_fakes(device))
        if answers is not None:
            stack.enter_context(answers.recorded(known) if with_values else answers.given(known))
        yield run, known


def simulate(
    step: TrainingStep,
    policy: Policy,
    units: Mapping[str, Module],
    costs: Costs,
    device: torch.device,
    *,
    with_values: bool = False,
    answers: RealAnswers | None = None,
    count_functions: bool = False,
    rehearsal: Rehearsal | None = None,
    watch: Callable[[int], None] | None = None,
) -> Trace:
    """Run `step` with `policy` applied to its model, on fake tensors or for real, and take down its memory.

    Args:
        step: the step.
        policy: a policy.
        units: the model's units by their paths.
        costs: what ops cost.
        device: where tensors on the meta device are to seem to be.
        with_values: whether the step runs for real: with its own tensors, in their memory.
        answers: what only values decide: taken down from a real step, given to a simulated one.
        count_functions: whether to count the calls of torch's functions.
        rehearsal: of the storage that the policy uses.
        watch: called after each op with the bytes that are alive; it may raise.
    """
    with ExitStack() as stack:
        stack.callback(apply(step.model, policy).remove)
        run, known = stack.enter_context(on_tensors(step, device, answers, with_values=with_values))
        trace = stack.enter_context(
            traced(
                units,
                known,
                costs,
                count_functions=count_functions,
                rehearsal=rehearsal,
                watch=watch,
                model=step.model,
                answers=None if with_values else answers,
            )
        )
        trace.is_real = with_values
        run()
    return trace
