"""Steps that plans are made from: real or simulated ones, their loss, and that they leave the model as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from journal import Journal
from oracle import assert_bitwise, random_states
from plan_checks import assert_all_bitwise, assert_holds, planned
from plan_models import Block, Case, InForward, gpt, resnet
from torch import Tensor, nn

import reactivate
from reactivate._torch.modes import FakeTensor
from reactivate.planner import planner, progress, simulator
from reactivate.planner.cost import measured
from reactivate.planner.plan import Plan
from reactivate.planner.target import available_bytes


@pytest.mark.parametrize("make", [resnet, gpt], ids=["statistics", "dropout"])
def test_model_gradients_and_generators_are_as_they_were(make: Callable[[], Case]) -> None:
    case = make()
    for number, parameter in enumerate(case.model.parameters()):
        parameter.grad = torch.randn_like(parameter) if number % 2 else None
    before = {name: item.clone() for name, item in case.model.state_dict().items()}
    gradients = [item.grad for item in case.model.parameters()]
    values = [None if gradient is None else gradient.clone() for gradient in gradients]
    states = random_states()
    planned(case, "70%")
    assert_all_bitwise(states, random_states())
    assert_all_bitwise(before, dict(case.model.state_dict()))
    for parameter, gradient, value in zip(case.model.parameters(), gradients, values):
        assert parameter.grad is gradient
        assert_bitwise(value, parameter.grad, "gradient")
    assert not any(isinstance(item, FakeTensor) for item in case.model.state_dict().values())


def runs_while_planning(case: Case) -> tuple[Plan, Counter[bool]]:
    """The plan, and how many forwards ran on fake tensors (True) and for real."""
    runs = Journal()

    def count(model: nn.Module, args: Any, output: Any) -> None:
        runs.append(isinstance(output.detach(), FakeTensor))

    case.model.register_forward_hook(count)
    return planned(case, budget="50%"), Counter(runs)


def test_a_step_that_is_quick_is_planned_from_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "QUICK", 1e9)
    case = gpt(layers=2)
    plan, counts = runs_while_planning(case)
    assert counts[True] == 0 and counts[False] > 8
    assert plan.proof.method == "real" and plan.proof.margin_bytes == 0
    assert_holds(case, plan)


@pytest.mark.parametrize("why", ["slow", "large"])
def test_a_step_that_is_slow_or_large_is_simulated(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    case = gpt(layers=2)
    own = sum(item.nbytes for item in case.model.parameters())
    if why == "slow":
        monkeypatch.setattr(simulator, "time_call", lambda run, device: (run(), 1e9)[1])
    else:
        monkeypatch.setattr(simulator, "available_bytes", lambda device: own + 10_000)
    plan, counts = runs_while_planning(case)
    least = {"slow": 2, "large": 0}[why] + 1 + measured.LEAST_LOOKS + measured.TIMED
    assert least <= counts[False] <= least + measured.MOST_LOOKS - measured.LEAST_LOOKS and counts[True] > 4
    assert plan.proof.method == "simulated"
    assert_holds(case, plan)


def test_a_simulation_that_takes_longer_than_the_step_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "QUICK", 0.0)
    monkeypatch.setattr(simulator, "time_call", lambda run, device: (run(), 1e-9)[1])
    plan, counts = runs_while_planning(gpt(layers=2))
    assert counts[True] == 0 and plan.proof.method == "real"


def test_a_plain_step_that_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpt(layers=3)
    roomy = planned(case, "60%")
    own = roomy.plain.peak_bytes - roomy.fixed.total
    monkeypatch.setattr(planner, "available_bytes", lambda device: own - 1)
    tight = planned(case, "60%")
    assert tight.plain.peak_bytes == roomy.plain.peak_bytes
    assert_holds(case, tight)

    monkeypatch.setattr(planner, "available_bytes", lambda device: 1000)
    with pytest.warns(UserWarning, match="not even with everything recomputed"):
        predicted = planned(case, "60%")
    assert predicted.made_for.is_predicted


def test_what_is_available_is_not_what_is_idle() -> None:
    free = available_bytes(torch.device("cpu"))
    assert free > 2**28  # with what the system's caches would give back


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda out: out.sum(), "the model's output"),
        (lambda out: {"loss": out.sum(), "logits": out}, "the output's .loss"),
        (lambda out: (out, out.exp()), "the sum of the model's output"),
    ],
)
def test_what_is_taken_for_the_loss_is_said(made: Any, said: str) -> None:
    class Model(InForward):
        def forward(self, x: Tensor) -> Any:
            return made(super().forward(x))

    plan = reactivate.plan(Model(), torch.randn(4, 32, 16), budget="100%")
    assert plan.made_for.loss == said


class Masked(nn.Module):
    """Looks at its mask, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.all():
            x = x.masked_fill(~mask[..., None], 0.0)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_step_that_depends_on_its_arguments_is_planned() -> None:
    mask = torch.ones(16, 64, dtype=torch.bool)
    mask[0, 3:] = False
    case = Case(Masked(), (torch.randn(16, 64, 16), mask), loss=lambda out: out.sum())
    assert_holds(case, planned(case))


def test_a_long_search_says_where_it_is_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = gpt(layers=2)
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 1e9)
    reactivate.plan(case.model, case.args, budget="90%")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.0)
    reactivate.plan(case.model, case.args, budget="90%")
    out, err = capsys.readouterr()
    assert not out and "plan: the plain step\n" in err and "plan: the plan, solved and proved\n" in err
