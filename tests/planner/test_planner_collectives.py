"""The time of collectives: over which links they go, and what of it compute hides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from several import each
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reactivate
from reactivate._torch.ops import alone_among
from reactivate._torch.streams import current_stream
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner.cost.collectives import link_between, seconds_of
from reactivate.planner.cost.devices import DEVICES, DeviceSpec, find
from reactivate.planner.cost.links import Link
from reactivate.planner.plan import Plan
from reactivate.planner.trace.stream_clock import StreamClock

MINE = DeviceSpec(
    "mine",
    memory_bytes=2**40,
    bandwidth_bytes_per_second=1e12,
    flops_per_second={"float32": 1e12},
    source="a test",
    links={"peer": Link(100.0, 100.0, 0.0), "network": Link(10.0, 10.0, 0.0), "host": Link(50.0, 50.0, 0.0)},
)
C10D = torch.ops.c10d


# -- links ------------------------------------------------------------------------------------------------------------


@each(
    ("ranks", "rate"),
    [
        (range(8), 100),  # of one node
        (range(0, 64, 8), 10),  # one of each
        (range(16), 80),  # eight of each, whose cards carry eight times as much
        ((0, 1, 8, 9), 20),
        (range(1024), 80),
    ],
)
def test_a_ring_goes_over_the_slowest_link(ranks: Any, rate: float) -> None:
    assert link_between(list(ranks), MINE).out_bytes_per_second == rate


def test_what_is_not_known_of_a_device() -> None:
    assert MINE.link_to_peer.out_bytes_per_second == 100
    no_peer = replace(MINE, links={"host": Link(50.0, 50.0)})
    assert no_peer.link_to_peer.out_bytes_per_second == 50
    assert link_between(range(64), no_peer).out_bytes_per_second == 50
    assert find("cpu").link_to_peer.out_bytes_per_second == 0.8 * find("cpu").bandwidth_bytes_per_second
    with pytest.raises(UsageError, match="node_devices"):
        replace(MINE, node_devices=0)


def test_links_of_the_table_are_half_of_what_sheets_print_of_both_directions() -> None:
    links = DEVICES["H100-SXM"].links
    assert links["peer"].out_bytes_per_second == pytest.approx(0.8 * 450e9)
    assert links["network"].out_bytes_per_second == pytest.approx(0.8 * 50e9)
    for device in DEVICES.values():
        if "network" in device.links:
            assert device.links["network"].out_bytes_per_second < device.link_to_peer.out_bytes_per_second


def test_a_rank_sends_all_but_its_own_part() -> None:
    part, whole = torch.empty(4, device="meta"), torch.empty(32, device="meta")
    ranks = list(range(8))
    gather = seconds_of(C10D._allgather_base_.default, (whole, part), whole, ranks, MINE)
    scatter = seconds_of(C10D._reduce_scatter_base_.default, (part, whole), part, ranks, MINE)
    reduced = seconds_of(C10D.allreduce_.default, ([whole],), [whole], ranks, MINE)
    sent = seconds_of(C10D.broadcast_.default, ([whole],), [whole], ranks, MINE)
    assert gather == scatter == 7 / 8 * whole.nbytes / 100
    assert reduced == 2 * gather
    assert sent == whole.nbytes / 100
    functional = torch.ops._c10d_functional
    assert seconds_of(functional.all_gather_into_tensor.default, (part, 8, "0"), whole, ranks, MINE) == gather
    assert seconds_of(functional.all_reduce.default, (whole, "sum", "0"), whole, ranks, MINE) == reduced
    assert seconds_of(C10D._allgather_base_.default, (whole, part), whole, [0], MINE) == 0
    assert seconds_of(C10D.barrier.default, (torch.empty(0),), None, ranks, MINE) == 0


# -- streams ----------------------------------------------------------------------------------------------------------


def test_what_runs_in_another_stream_costs_what_compute_waits_for() -> None:
    clock, other = StreamClock(), torch.cpu.Stream()
    with clock.orders:
        with torch.cpu.stream(other):
            assert current_stream() is other
            assert clock.ran(3.0, "a group") == 0.0
            done = other.record_event()
        assert clock.ran(2.0) == 2.0
        torch.cpu.current_stream().wait_event(done)
        assert clock.ran(1.0) == 2.0  # one of which it has waited
        assert (clock.collective_seconds, clock.waited_seconds) == (3.0, 1.0)
        with torch.cpu.stream(other):
            other.wait_stream(torch.cpu.default_stream() if hasattr(torch.cpu, "default_stream") else clock._compute)
            clock.ran(5.0, "a group")
        assert clock.ran(4.0, "a group") == 9.0  # a group runs one collective at a time
        assert clock.rest() == 0.0
        event = torch.cpu.Event()
        with torch.cpu.stream(other):
            clock.ran(20.0)
            event.record()
        torch.cpu.current_stream().wait_event(event)
        assert clock.rest() == 16.0
    assert torch.cpu.Stream().record_event() is None, "torch's own are there again"


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[int]:
    with alone_among(16):
        yield 16


def sharded(parts: bool = False, around: Any = None, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    mesh, width = init_device_mesh("cpu", (16,)), 256
    with around or torch.device("meta"):
        made = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6))
        model, x = nn.Sequential(*made), torch.empty(2048, width)
        for block in model:
            for part in (block[0], block[2]) if parts else ():
                fully_shard(part, mesh=mesh, **options)
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options), x


def smallest(plan: Plan) -> Plan:
    with pytest.raises(PlanInfeasible) as found:
        plan.at(plan.fixed.total + 1)
    return plan.at(found.value.least_bytes)


def test_collectives_are_hidden_behind_compute_where_there_is_enough(ranks: int) -> None:
    network = {"peer": Link(400e9, 400e9, 0.0), "network": Link(50e9, 50e9, 0.0)}
    slow = replace(find("H100-SXM"), links={"peer": Link(1e9, 1e9, 0.0), "network": Link(1e9, 1e9, 0.0)})
    fast = replace(slow, links=network)
    none = replace(slow, links={"peer": Link(1e18, 1e18, 0.0)})
    steps = [reactivate.plan(*sharded(), budget="100%", device=device).plain for device in (none, fast, slow)]
    assert steps[0].seconds < steps[1].seconds < steps[2].seconds
    for step in steps[1:]:
        exposed = step.collective_seconds - step.hidden_seconds
        assert 0 < step.hidden_seconds < step.collective_seconds
        assert step.seconds == pytest.approx(steps[0].seconds + exposed, rel=0.02)
    assert steps[1].peak_bytes == steps[2].peak_bytes


@pytest.mark.parametrize("parts", [False, True])
def test_a_recomputation_uses_the_parameters_that_the_backward_gathers(ranks: int, parts: bool) -> None:
    plan = reactivate.plan(*sharded(parts), budget="100%", device="H100-SXM")
    least = smallest(plan)
    assert least.predicted.seconds > plan.plain.seconds
    assert least.predicted.collective_seconds == pytest.approx(plan.plain.collective_seconds)


def test_a_recomputation_that_runs_collectives_again_pays_for_them(ranks: int) -> None:
    with torch.device("meta"):
        block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256))
        model, x = nn.Sequential(*(copy.deepcopy(block) for _ in range(6))), torch.empty(2048, 256)
    for block in model:
        parallelize_module(block, init_device_mesh("cpu", (16,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    plan = reactivate.plan(model, x, budget="100%", device="H100-SXM")
    again = next(policy for policy in plan.policies if policy.label == "full()")
    assert again.seconds > plan.plain.seconds + plan.plain.collective_seconds / 3
    assert plan.plain.hidden_seconds == pytest.approx(0, abs=1e-12), "compute needs them at once"
    assert smallest(plan).predicted.collective_seconds > 1.3 * plan.plain.collective_seconds


def test_parameters_that_stay_gathered_are_gathered_once(ranks: int) -> None:
    kept = reactivate.plan(*sharded(reshard_after_forward=False), budget="100%", device="H100-SXM").plain
    again = reactivate.plan(*sharded(), budget="100%", device="H100-SXM").plain
    assert kept.collective_seconds < again.collective_seconds and kept.peak_bytes > again.peak_bytes


def test_fake_parameters_are_planned_as_those_on_meta(ranks: int) -> None:
    plan = reactivate.plan(*sharded(), budget="60%", device="H100-SXM")
    fake = reactivate.plan(*sharded(around=FakeTensorMode()), budget="60%", device="H100-SXM")
    assert fake.predicted.peak_bytes == plan.predicted.peak_bytes and fake.fixed == plan.fixed


def test_a_group_that_is_not_there_is_refused(ranks: int) -> None:
    with pytest.raises(UsageError, match=r"are not there .*Leave group= out"):
        reactivate.plan(*sharded(), budget="60%", device="H100-SXM", group=torch.distributed.group.WORLD)


@pytest.mark.parametrize("reshard", [False, True])
def test_a_stage_of_a_pipeline_holds_the_microbatches_that_are_under_way(ranks: int, reshard: bool) -> None:
    """With parameters that the backward gathers for nothing, too: `fully_shard` waits for these in the end."""
    stage, _ = sharded(reshard_after_forward=reshard)

    def step(in_flight: int) -> Callable[[], None]:
        def run() -> None:
            waiting = []
            for _ in range(4):
                waiting.append(stage(torch.empty(2048, 256, requires_grad=True)))
                if len(waiting) == in_flight:
                    go_back(waiting.pop(0))
            while waiting:
                go_back(waiting.pop(0))

        return run

    def go_back(output: torch.Tensor) -> None:
        output.backward(torch.empty_like(output))

    plans = [reactivate.plan(stage, step=step(count), budget="100%", device="H100-SXM") for count in (1, 2, 4)]
    first, second, fourth = (plan.plain.peak_bytes for plan in plans)
    assert fourth - second == pytest.approx(2 * (second - first), rel=0.01)
    assert smallest(plans[-1]).predicted.peak_bytes < fourth
