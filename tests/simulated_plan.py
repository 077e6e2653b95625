"""Plans for an accelerator that is simulated: budgets hold to the byte with `Host`. `test_simulated` runs this file."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import simulated
import torch
from memory import without_collector
from residual import Block, Residual
from torch import Tensor, nn

import reactivate
from reactivate.planner.cost.allocator import CachingAllocator, MemoryBlock
from reactivate.planner.cost.stretches import marked
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


def test_planning_leaves_no_memory_behind() -> None:
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        x = torch.randn(BATCH, WIDTH).to(device)
        before = torch.accelerator.memory_allocated(device)
        plan = planned(model, x, "60%")
        assert any(decision.candidate.recompute for decision in plan.decisions)
        assert torch.accelerator.memory_allocated(device) == before


@pytest.mark.parametrize(("last", "ahead"), [(1, 1), (0, 0), (2, 2)])
def test_a_plan_with_the_host_holds_to_the_byte_and_is_bitwise(last: int, ahead: int) -> None:
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        x = torch.randn(BATCH, WIDTH).to(device)
        host = Host(least_bytes=0, last=last, ahead=ahead)
        least_without = least_of(planned(model, x, "100%"))
        plan = planned(model, x, "100%", storage=host)
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
            assert found.measured_bytes <= found.predicted_bytes <= budget
            handle = reactivate.apply(model, tight)
            assert all(map(torch.equal, expected, gradients(model, x)))
            handle.remove()
            gc.collect()


def test_garbage_that_goes_while_an_op_is_measured_is_not_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated.accelerator("late") as device:
        model = a_model().to(device)
        x = torch.randn(BATCH, WIDTH).to(device)
        expected = least_of(planned(model, x, "100%"))
        reset = torch.accelerator.reset_peak_memory_stats
        found = []

        def reset_amid_garbage() -> None:
            garbage: list[Any] = [torch.empty(4096, device=device)]
            garbage.append(garbage)
            found.append(ref(garbage[0]))
            del garbage
            reset()
            [[] for _ in range(2 * gc.get_threshold()[0])]  # so many objects that the collector runs, if it is on

        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset_amid_garbage)
        assert least_of(planned(model, x, "100%")) == expected
        assert len(found) > 100 and found[0]() is None


def test_garbage_that_goes_at_a_mark_has_been_there_in_the_stretch_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated.accelerator("late") as device:
        allocated = torch.accelerator.memory_allocated

        def allocated_before_garbage_goes() -> int:
            nbytes = allocated()
            [[] for _ in range(2 * gc.get_threshold()[0])]
            return int(nbytes)

        monkeypatch.setattr(torch.accelerator, "memory_allocated", allocated_before_garbage_goes)
        with marked(device, takes_memory=True) as (mark, stretches):
            garbage: list[Any] = [torch.empty(4096, device=device)]
            garbage.append(garbage)
            del garbage
            mark()
    assert stretches[0].top_bytes == stretches[1].start_bytes == stretches[1].top_bytes == 4 * 4096


class Littering(nn.Module):
    """Leaves a tensor in a cycle of objects, which lives until the garbage collector comes."""

    def forward(self, x: Tensor) -> Tensor:
        cycle: list[Any] = [x.detach() * 2]
        cycle.append(cycle)
        return x


def test_garbage_that_steps_leave_is_not_there_all_the_time() -> None:
    with simulated.accelerator("late") as device, without_collector():
        model = nn.Sequential(a_model(), Littering()).to(device)
        plan = planned(model, torch.randn(BATCH, WIDTH).to(device), "100%")
        assert plan.fixed.others == 0


class Reserving:
    """A caching allocator beside the simulated device, with a block for each that the device hands out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allocator = CachingAllocator()
        self._blocks: dict[int, MemoryBlock] = {}
        new_block, settle = simulated.Simulator.new_block, simulated.Simulator.settle

        def settled(device: simulated.Simulator) -> None:
            settle(device)
            for address in self._blocks.keys() - device.blocks.keys():
                self.allocator.free(self._blocks.pop(address))

        def made(device: simulated.Simulator, lane: Any, nbytes: int) -> Any:
            block = new_block(device, lane, nbytes)
            if nbytes:
                self._blocks[block.memory.data_ptr()] = self.allocator.allocate(nbytes)
            return block

        patch.setattr(simulated.Simulator, "new_block", made)
        patch.setattr(simulated.Simulator, "settle", settled)

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Begin with nothing but these."""
        self.allocator = CachingAllocator()
        self._blocks = {item.data_ptr(): self.allocator.allocate(item.nbytes) for item in tensors}


@pytest.mark.parametrize("share", ["100%", "60%", "45%"])
def test_what_is_reserved_is_what_the_plan_says(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reserving = Reserving(monkeypatch)
    with simulated.accelerator("late") as device:
        torch.manual_seed(0)
        model = Residual(64, 6, partial(Block, factor=4)).to(device)
        x = torch.randn(8192, 64).to(device)
        plan = planned(model, x, share)
        with reactivate.apply(model, plan):
            gradients(model, x)
            held = [*model.parameters(), *(item.grad for item in model.parameters() if item.grad is not None), x]
            simulated.synchronize()
            gc.collect()
            reserving.begin(held)
            out = model(x)  # alive during the backward, as in the step that was planned
            out.square().mean().backward()
        promised = plan.predicted.reserved_bytes
        assert promised is not None and promised >= plan.predicted.peak_bytes
        assert abs(reserving.allocator.reserved_bytes - promised) <= 2 * 2**20  # a segment of small blocks


def test_the_default_budget_is_what_is_free_less_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 64 * 2**20
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: simulated.memory_allocated() + 3 * 2**20)
    monkeypatch.setattr(simulated, "mem_get_info", lambda device: (free_bytes, 2 * free_bytes), raising=False)
    with simulated.accelerator("late") as device:
        model, x = a_model().to(device), torch.randn(BATCH, WIDTH).to(device)
        for reserve, left in ((None, 0.95), ("20%", 0.8), (0, 1.0)):
            plan = reactivate.plan(model, x, loss=lambda out: out.square().mean(), reserve=reserve)
            free = plan.budget_bytes - plan.fixed.total
            assert free == pytest.approx(left * (free_bytes + 3 * 2**20), abs=1)  # cached memory is free
            gc.collect()
