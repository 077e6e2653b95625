"""Warnings of a plan: of a step that does not train, and of a model that is called otherwise than was planned."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from plan_checks import planned
from plan_models import GPT, gpt
from torch import Tensor
from torch.nn import functional as F

import reactivate
from reactivate.planner.plan import Plan


def test_other_shapes_are_told_of() -> None:
    case = gpt(layers=3)
    plan = reactivate.plan(case.model, case.args, budget="60%")
    handle = reactivate.apply(case.model, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.model(*case.args)
    longer = torch.randint(64, (8, 64))
    with pytest.warns(
        UserWarning, match=r"shape \(4, 64\), and the model is called with \(8, 64\).*does not hold"
    ) as told:
        case.model(longer)
    assert "The peak will be" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.model(longer)  # once
    with pytest.warns(UserWarning, match="still holds"):
        case.model(case.args[0][:1])
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.model(torch.randint(64, (3, 64)))


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class WithLoss(GPT):
    """Returns its loss if it is given labels, as models of transformers do."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        logits = super().forward(tokens)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


@contextmanager
def nothing_told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_step_that_is_not_one_of_training_is_warned_of() -> None:
    tokens = torch.randint(64, (4, 64))
    model = WithLoss(layers=2)
    with nothing_told():
        plan = reactivate.plan(model, (tokens, tokens), budget="100%")
    assert plan.made_for.trains and "on cpu, in training mode, with backward called on the output's .loss" in str(plan)
    with pytest.warns(UserWarning, match="WithLoss has returned no loss, so the sum.*put the labels") as told:
        plan = reactivate.plan(model, tokens, budget="100%")
    assert len(told) == 1 and "backward called on the sum of the model's output, whose .loss is None" in str(plan)
    with nothing_told():
        plan.at("90%")
        reactivate.plan(model, tokens, budget="100%", loss=lambda output: output.logits.sum())
    model.eval()
    with pytest.warns(UserWarning, match=r"is in eval\(\) mode.*call model.train\(\) first") as told:
        plan = reactivate.plan(model, (tokens, tokens), budget="100%")
    assert len(told) == 1 and "on cpu, in eval() mode" in str(plan)
    with torch.device("meta"):
        elsewhere = GPT(layers=2)
    with pytest.warns(UserWarning, match="is on the meta device, and its step was planned for a cpu. Name the device"):
        reactivate.plan(elsewhere, tokens, budget="1GiB")
    with nothing_told():
        reactivate.plan(elsewhere, tokens, budget="1GiB", device="A100-80GB")


def test_a_step_in_another_mode_than_the_planned_one_is_told_of_once() -> None:
    case = gpt(layers=2)
    case.model.eval()
    plan = planned(case, "60%")
    case.model.train()
    assert plan.at("70%").made_for.trains is False  # it is for the step that was planned
    reactivate.apply(case.model, plan)
    with pytest.warns(UserWarning, match=r"made for a model in eval\(\) mode, and this one is in training mode"):
        case.step()
    with nothing_told():
        case.step()


class OtherGPT(GPT):
    pass


def test_a_plan_from_a_file_tells_of_another_step_once(tmp_path: Path) -> None:
    case = gpt(layers=2)
    planned(case, "100%").save(tmp_path / "plan.json")
    planned(case, "100%", device="H100-SXM").save(tmp_path / "h100.json")
    handle = reactivate.apply(case.model, Plan.load(tmp_path / "plan.json"))
    with nothing_told():
        case.step()
    shorter = case.args[0][:2]
    with pytest.warns(UserWarning, match=r"shape \(4, 64\), and the model is called with \(2, 64\).*was not predicted"):
        case.model(shorter)
    with nothing_told():
        case.model(shorter)
    handle.remove()
    other = OtherGPT(layers=2)
    reactivate.apply(other, Plan.load(tmp_path / "h100.json"))
    with pytest.warns(
        UserWarning,
        match="made for a GPT, and this is a OtherGPT; H100-SXM, and the model is on cpu. It predicts nothing",
    ) as told:
        other(*case.args)
    assert len(told) == 1
    with nothing_told():
        other(*case.args)
