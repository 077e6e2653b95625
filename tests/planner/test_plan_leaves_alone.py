"""Planning leaves alone what is around the model: a loss with parameters, arguments with graphs, gradients of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_bitwise
from plan_models import GPT, Block
from torch import Tensor, nn

import reactivate
from reactivate.planner import simulator

PlanContents = Callable[..., Any]


class Head(nn.Module):
    """A loss that trains, counts, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Linear(64, 8), 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, logits: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return self.weight(logits).square().mean()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tokens(*shape: int) -> Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=["for real", pytest.param("simulated", marks=pytest.mark.slow)], autouse=True)
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "simulated":
        monkeypatch.setattr(simulator, "is_alone", lambda: False)


@pytest.mark.parametrize("as_step", [False, True])
def test_a_loss_with_parameters_is_as_it_was(as_step: bool) -> None:
    model, head, batch = GPT(layers=4), Head(), tokens(4, 64)
    head.weight.bias.grad = before = torch.ones(8)
    if as_step:
        plan = reactivate.plan(model, budget="60%", step=lambda: head(model(batch)).backward())
    else:
        plan = reactivate.plan(model, batch, budget="60%", loss=head)
    assert plan.measure().holds
    assert head.weight.weight.grad is None and head.weight.bias.grad is before
    assert torch.equal(before, torch.ones(8)) and head.calls == 0 == head.seen


@pytest.mark.parametrize("is_leaf", [False, True])
def test_arguments_that_require_gradients(is_leaf: bool) -> None:
    """The step runs several times; the graph that an argument comes from runs once, later."""
    model, before = Tower(), nn.Linear(32, 32)
    x = torch.randn(4, 64, 32, requires_grad=True)
    given = x if is_leaf else before(x)
    plan = reactivate.plan(model, given, budget="60%")
    assert plan.measure().holds and abs(plan.measure().error) <= 0.01
    assert x.grad is None is before.weight.grad
    plain = copy.deepcopy(model)
    found = []
    for subject in (model, plain):
        if subject is model:
            reactivate.apply(model, plan)
        torch.manual_seed(0)
        subject(given).sum().backward(retain_graph=True)
        found.append(x.grad)
        x.grad = None
    assert_bitwise(*found, "gradient of the argument")


def test_classes_are_planned_amid_training_of_a_loss_with_parameters() -> None:
    model, head = GPT(layers=4), Head()
    plan = reactivate.plan(model, tokens(4, 64), budget="60%", loss=head, shapes="adaptive")
    plain, plain_head = copy.deepcopy(model), copy.deepcopy(head)
    reactivate.apply(model, plan)
    for subject, loss in ((model, head), (plain, plain_head)):
        torch.manual_seed(0)
        for shape in ((4, 64), (4, 50), (2, 64), (4, 64)):
            loss(subject(tokens(*shape))).backward()
    assert len(plan.classes) >= 2 and plan.classes[0].recomputed
    for one, other in ((model, plain), (head, plain_head)):
        for name, parameter in other.named_parameters():
            assert_bitwise(one.get_parameter(name).grad, parameter.grad, name)
    assert head.calls == plain_head.calls == 4 == head.seen


def test_classes_of_arguments_with_graphs() -> None:
    model, before = Tower(), nn.Linear(32, 32)
    batches = [torch.randn(4, length, 32) for length in (64, 20, 60, 64)]
    plan = reactivate.plan(model, before(batches[0]), budget="60%", shapes="adaptive")
    plain, plain_before = copy.deepcopy(model), copy.deepcopy(before)
    reactivate.apply(model, plan)
    for subject, first in ((model, before), (plain, plain_before)):
        torch.manual_seed(0)
        for batch in batches:
            subject(first(batch)).sum().backward()
    assert plan.classes[0].recomputed and not plan.classes[1].recomputed
    for name, parameter in [*plain.named_parameters(), *plain_before.named_parameters(prefix="before")]:
        module = before if name.startswith("before") else model
        assert_bitwise(module.get_parameter(name.removeprefix("before.")).grad, parameter.grad, name)
