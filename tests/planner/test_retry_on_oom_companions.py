"""Guarded steps put back what stands beside a model too: schedulers, gradient scalers, averages of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from journal import Journal
from oracle import assert_bitwise
from plan_models import GPT, loss_of, tokens
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import reactivate
from reactivate import Plan

Step = Callable[[], Any]
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [1]
    ),
    "function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0),
}


@pytest.fixture(scope="module")
def planned() -> tuple[GPT, Plan]:
    model = GPT(layers=4)
    return model, reactivate.plan(model, tokens(4, 64), budget="80%", loss=loss_of)


class Target:
    """A place where memory runs out, once, in the second step."""

    def __init__(self, place: str) -> None:
        self.place, self.seen = place, Journal()

    def __call__(self, place: str) -> None:
        if place == self.place:
            self.seen.append(place)
            if len(self.seen) == 2:
                raise torch.OutOfMemoryError("Out of memory. Tried to allocate 16.00 KiB. There is no more.")


def trained(
    planned: tuple[GPT, Plan], make: Callable[[Any, Any], tuple[Step, Callable[[], Any]]], place: str
) -> list[Any]:
    """Return what three steps leave, of the plain model and of the guarded one."""
    found = []
    for is_guarded in (False, True):
        model = copy.deepcopy(planned[0])
        torch.manual_seed(0)
        if is_guarded:
            reactivate.apply(model, planned[1])
        step, state = make(model, Target(place) if is_guarded else lambda place: None)
        if is_guarded:
            step = reactivate.retry_on_oom(step, undo_optimizer=True)
        losses = [step() for _ in range(3)]
        found.append([losses, dict(model.named_parameters()), state()])
    return found


def assert_same(planned: tuple[GPT, Plan], make: Any, place: str) -> None:
    with pytest.warns(UserWarning, match="ran out of memory"):
        plain, guarded = trained(planned, make, place)
    assert torch.equal(torch.stack(plain[0]), torch.stack(guarded[0])) and plain[2] == guarded[2]
    for name, parameter in plain[1].items():
        assert_bitwise(guarded[1][name], parameter, name)


@pytest.mark.parametrize("place", ["before the optimizer", "after the optimizer"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_in_the_step(planned: tuple[GPT, Plan], kind: str, place: str) -> None:
    def make(model: nn.Module, fails: Callable[[str], None]) -> tuple[Step, Callable[[], Any]]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = SCHEDULERS[kind](optimizer)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(tokens(4, 64)))
            scheduler.step(*((loss.detach(),) if kind == "plateau" else ()))
            loss.backward()
            fails("before the optimizer")
            optimizer.step()
            fails("after the optimizer")
            return loss.detach()

        return step, lambda: (scheduler.last_epoch, scheduler.get_last_lr(), optimizer.param_groups[0]["lr"])

    assert_same(planned, make, place)


@pytest.mark.parametrize("place", ["unscaled", "stepped", "updated"])
def test_a_gradient_scaler_in_the_step(planned: tuple[GPT, Plan], place: str) -> None:
    def make(model: nn.Module, fails: Callable[[str], None]) -> tuple[Step, Callable[[], Any]]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(tokens(4, 64)))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            fails("unscaled")
            scaler.step(optimizer)
            fails("stepped")
            scaler.update()
            fails("updated")
            return loss.detach()

        return step, scaler.state_dict

    assert_same(planned, make, place)


def test_an_average_of_the_model_has_a_copy_of_its_plan(planned: tuple[GPT, Plan]) -> None:
    def make(model: nn.Module, fails: Callable[[str], None]) -> tuple[Step, Callable[[], Any]]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        average = AveragedModel(model)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(tokens(4, 64)))
            loss.backward()
            fails("before the optimizer")
            optimizer.step()
            average.update_parameters(model)
            return loss.detach()

        return step, lambda: [item.tolist() for item in average.parameters()]

    assert_same(planned, make, "before the optimizer")
