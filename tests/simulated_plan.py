"""Plans for an accelerator that is simulated: budgets hold to the byte with `Host`. `test_simulated` runs this file."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import simulated
import torch
from residual import Block, Residual
from torch import Tensor, nn

import reactivate
from reactivate.planner.plan import Plan
from reactivate.storage import Host

WIDTH, BATCH = 16, 256


@pytest.fixture(autouse=True)
def _torch_asks_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks its own allocator and streams for these, which the simulated device does not have."""
    for name in ("synchronize", "memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, getattr(simulated, name))
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", simulated.max_memory_allocated)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return Residual(WIDTH, 5, partial(Block, factor=2))


def planned(model: nn.Module, x: Tensor, budget: int | str, **options: Any) -> Plan:
    return reactivate.plan(model, x, budget=budget, loss=lambda out: out.square().mean(), **options)


def least_of(plan: Plan) -> int:
    with pytest.raises(reactivate.errors.PlanInfeasible) as caught:
        plan.at(1)
    return caught.value.least_bytes


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("last", "ahead"), [(1, 1), (0, 0), (2, 2)])
def test_a_plan_with_the_host_holds_to_the_byte_and_is_bitwise(last: int, ahead: int) -> None:
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        x = torch.randn(BATCH, WIDTH).to(device)
        host = Host(least_bytes=0, last=last, ahead=ahead)
        least_without = least_of(planned(model, x, "100%"))
        plan = planned(model, x, "100%", storages=host)
        assert not plan.storages and plan.predicted.seconds == plan.plain.seconds  # where all fits nothing is moved
        least = least_of(plan)
        assert least < least_without
        expected = gradients(model, x)
        for budget in (least, (least + least_without) // 2):
            tight = plan.at(budget)
            assert [use.name for use in tight.storages] == ["host"]
            moved = host.traffic.moved_bytes
            found = tight.measure()
            assert host.traffic.moved_bytes > moved
            assert found.measured_bytes <= found.promised_bytes <= budget
            handle = reactivate.apply(model, tight)
            assert all(map(torch.equal, expected, gradients(model, x)))
            handle.remove()
            gc.collect()
