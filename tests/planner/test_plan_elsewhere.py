"""Plans for a device that is not here: what it has, how fast it is, and what is said where no plan fits it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from plan_checks import planned
from plan_models import GPT, gpt

import reactivate
from reactivate._region.accounts import in_words
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner import planner
from reactivate.planner.cost.devices import find
from reactivate.planner.cost.overhead import Overhead
from reactivate.planner.plan import Plan
from reactivate.planner.target import memory_bytes


@pytest.mark.slow
def test_a_model_without_memory_is_planned() -> None:
    with torch.device("meta"):
        model = GPT(dim=4096, layers=24, tokens=50_000).to(torch.bfloat16)
    tokens = torch.zeros(16, 2048, dtype=torch.long)
    plan = reactivate.plan(model, tokens, budget="25%", device="H100-SXM")
    assert plan.made_for.is_predicted and plan.made_for.device == "H100-SXM"
    assert plan.predicted.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes
    assert plan.plain.peak_bytes > 100 * 2**30
    assert all(item.is_meta for item in model.parameters())


@pytest.mark.parametrize(
    ("device", "name", "has_bytes"),
    [("H100-SXM", "H100-SXM", find("H100-SXM").memory_bytes), (None, "cpu", memory_bytes(torch.device("cpu")))],
)
def test_a_budget_beyond_the_device_is_what_the_device_has(device: str | None, name: str, has_bytes: int) -> None:
    """Not one that the device has, nor where no device is said."""
    case = gpt(layers=1)
    fitting = planned(case, has_bytes, device=device)
    beyond = planned(case, has_bytes + 2**30, device=device)
    said = f"That is all that {name} has: the budget of {in_words(has_bytes + 2**30)} is more."
    assert "is more" not in str(fitting) and str(beyond).count(said) == 1
    assert beyond.budget_bytes == has_bytes
    assert str(Plan.from_json(beyond.to_json())) == str(beyond)
    assert str(beyond.at(has_bytes)).count("is more") == 0
    with torch.device("meta"):
        elsewhere = GPT(layers=1)
    assert "is more" not in str(reactivate.plan(elsewhere, torch.zeros(2, 8, dtype=torch.long), budget="100TiB"))


def test_no_plan_is_larger_than_the_device() -> None:
    case = gpt(layers=4)
    whole = planned(case, "100%", device="H100-SXM")
    least = least_of(whole)
    device = dataclasses.replace(find("H100-SXM"), name="small", memory_bytes=least)
    for budget in ("100%", "1GiB"):
        plan = planned(case, budget, device=device)
        assert plan.predicted.peak_bytes <= plan.budget_bytes == least
    device = dataclasses.replace(device, memory_bytes=least - 1)
    with pytest.raises(
        PlanInfeasible, match=r"bytes\), which is all that small has; .* more than it has.* more memory"
    ) as caught:
        planned(case, "1GiB", device=device)
    assert caught.value.least_bytes == least


def least_of(plan: Plan) -> int:
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(1)
    return caught.value.least_bytes


def test_parameters_larger_than_the_device_are_known_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpt(layers=1)
    monkeypatch.setattr(case.model, "forward", lambda *args, **kwargs: pytest.fail("the step ran"))
    tiny = dataclasses.replace(find("H100-SXM"), name="tiny", memory_bytes=2**16)
    said = r"tiny has 64.0 KiB, .*parameters .*gradients .*Nothing was run. .*shard the model"
    with pytest.raises(PlanInfeasible, match=said) as caught:
        planned(case, "100%", device=tiny)
    own = sum(item.nbytes for item in case.model.parameters())
    assert caught.value.least_bytes >= 2 * own > caught.value.budget_bytes == 2**16
    middle = dataclasses.replace(tiny, memory_bytes=caught.value.least_bytes)
    optimizer = torch.optim.Adam(case.model.parameters())
    with pytest.raises(PlanInfeasible, match="Nothing was run"):
        planned(case, "100%", device=middle, optimizer=optimizer)


def test_advice_is_what_helps_and_names_no_budget_that_nobody_gave() -> None:
    case = gpt(layers=2)
    with pytest.raises(PlanInfeasible) as caught:
        planned(case, "1KiB", device="H100-SXM")
    assert "budget='1KiB'" in str(caught.value) and "Raise the budget, or put fewer bytes of parameters" in str(
        caught.value
    )
    with pytest.raises(PlanInfeasible, match=r"Raise the budget, or make the batch smaller\."):
        planned(case, "1%", device="H100-SXM")
    small = dataclasses.replace(find("H100-SXM"), name="small", memory_bytes=caught.value.least_bytes)
    with pytest.raises(PlanInfeasible, match=r"^plan\(\): .* which small has free without the reserve; ") as caught:
        planned(case, None, device=small)
    assert "budget='" not in str(caught.value)


def test_a_plan_for_another_device_is_the_same_wherever_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own time is that of the device, not of this machine."""
    device = dataclasses.replace(find("H100-SXM"), name="eager", overhead=Overhead(region_seconds=1e-3))
    found = []
    for seconds in (1e-3, 1e-1):
        monkeypatch.setattr(planner, "measure_overhead", lambda seconds=seconds: Overhead(*[seconds] * 4))
        plan = planned(gpt(layers=3), "40%", device=device).to_json()
        found.append({name: value for name, value in plan.items() if name != "planning_seconds"})
    assert found[0] == found[1]
    extra = [item["seconds"] for item in found[0]["decisions"] if item["treatment"]["recompute"]]
    assert extra and all(seconds > 1e-3 for seconds in extra)


def test_a_faster_device_is_faster() -> None:
    case = gpt(layers=2)
    seconds = [planned(case, "100%", device=name).plain.seconds for name in ("T4", "A100-80GB")]
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize(("device", "message"), [("H1000", "H100"), ("cuda", "Move it there first")])
def test_an_unknown_device_is_refused(device: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(gpt(layers=2), "60%", device=device)


@pytest.mark.parametrize(("device", "message"), [(0, "no such device here"), ("gpu", "write 'cuda'")])
def test_a_device_that_torch_does_not_know_is_refused(device: Any, message: str) -> None:
    if torch.accelerator.current_accelerator() is not None:
        pytest.skip("for this build of torch, 0 is a device")
    with pytest.raises(UsageError, match=message):
        planned(gpt(layers=2), "100%", device=device)
