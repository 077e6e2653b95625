"""Refusals of `plan`: a step, a loss, an optimizer or a model that it cannot plan with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_checks import assert_all_bitwise, planned
from plan_models import Positions, gpt
from several import each
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate.errors import PlanInfeasible, UsageError


@each(
    "step, words",
    [
        (lambda model: None, "called no block of the Positions"),
        (lambda model: copy.deepcopy(model)(torch.randn(2, 8, 32)).sum().backward(), "called no block"),
        (lambda model: model(torch.randn(2, 8, 32)), "ran no backward"),
    ],
)
def test_a_step_that_is_none_of_the_model_is_refused(step: Callable[[nn.Module], object], words: str) -> None:
    model = Positions()
    with pytest.raises(UsageError, match=words):
        reactivate.plan(model, budget="50%", step=lambda: step(model))


def test_a_plan_does_not_end_a_profiler() -> None:
    case = gpt()
    with torch.profiler.profile() as profile:
        case.model(*case.args, **case.kwargs)
        with pytest.raises(UsageError, match="Make the plan before"):
            planned(case, "90%")
        case.model(*case.args, **case.kwargs)
    assert sum(event.name == "aten::embedding" for event in profile.events()) >= 2


def test_a_frozen_model_has_nothing_to_plan() -> None:
    model = Positions().requires_grad_(False)
    for options in ({}, {"loss": lambda out: out.sum()}):
        with pytest.raises(UsageError, match="all parameters of the Positions are frozen"):
            reactivate.plan(model, torch.randn(2, 8, 32), budget="50%", **options)
    assert reactivate.plan(model, torch.randn(2, 8, 32, requires_grad=True), budget="90%").decisions


def test_what_a_step_would_not_read_is_refused() -> None:
    case = gpt(layers=2)
    for given, words in (
        ({"args": case.args}, "so args= would not be read: leave out either step= or it"),
        (
            {"kwargs": {"x": 1}, "loss": Tensor.sum},
            "so kwargs= and loss= would not be read: leave out either step= or them",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            reactivate.plan(case.model, budget="60%", step=case.step, **given)


def test_an_optimizer_in_the_step_is_refused() -> None:
    case = gpt(layers=2)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1.0)
    before = {name: item.clone() for name, item in case.model.state_dict().items()}

    def step() -> None:
        case.step()
        optimizer.step()

    with pytest.raises(UsageError, match=r"it called SGD\.step"):
        reactivate.plan(case.model, budget="60%", step=step)
    assert_all_bitwise(before, dict(case.model.state_dict()))

    for parameter in case.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UsageError, match=r"a hook of the model or a parameter called SGD\.step"):
        planned(case, "60%")


def test_an_optimizer_of_another_model_is_refused() -> None:
    """As that of a model that was built anew: no state would be counted. One of a part of the parameters is none."""
    case = gpt(layers=2)
    others = torch.optim.AdamW(gpt(layers=2).model.parameters())
    with pytest.raises(UsageError, match="optimizer= has none of the parameters of the GPT"):
        planned(case, "60%", optimizer=others)
    some = list(case.model.parameters())[:2]
    part = planned(case, "100%", device="A100-40GB", optimizer=torch.optim.AdamW(some))
    assert part.fixed.optimizer == sum(2 * item.numel() * 4 + 4 for item in some)


def test_a_model_without_blocks_is_said_to_have_none() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    with pytest.raises(PlanInfeasible, match=r"The Sequential has no blocks, so a plan keeps .* nn\.Sequential\.$"):
        reactivate.plan(model, torch.randn(64, 8), budget="10%", loss=Tensor.sum)
    case = gpt(layers=2)
    with pytest.raises(PlanInfeasible) as caught:
        planned(case, "1%")
    assert "has no blocks" not in str(caught.value)


@each(
    ("loss", "message"),
    [
        (lambda out: out, "whose result is a scalar to go back from; got a Tensor of shape"),
        (lambda out: 3.0, "a scalar to go back from"),
        (lambda out: out.detach().sum(), r"the loss requires no gradient.*: the model or loss= detaches it"),
        (nn.CrossEntropyLoss(), r"'target'\)\. Write loss=lambda output: CrossEntropyLoss\(\)\(output, labels\)"),
        (nn.CrossEntropyLoss, r"'target'\)\. Write loss=lambda output: CrossEntropyLoss\(\)\(output, labels\)"),
        (F.mse_loss, r"'target'\)\. Write loss=lambda output: mse_loss\(output, labels\)"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, message: str) -> None:
    case = gpt(layers=2)
    with pytest.raises(UsageError, match=message):
        reactivate.plan(case.model, case.args, budget="60%", loss=loss)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module"):
        reactivate.plan(lambda x: x, torch.ones(1), budget="60%")  # type: ignore[arg-type]
