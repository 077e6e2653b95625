"""Memory that an accelerator's allocator reserves: simulated by its rules, promised by plans, fitted by default budgets."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_models import GPT
from several import each
from torch import Tensor

import reactivate
from reactivate import Plan
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner import text as plan_text
from reactivate.planner.budget import parse_reserve
from reactivate.planner.cost.allocator import CachingAllocator, MemoryBlock, reserved_for
from reactivate.planner.cost.devices import DeviceSpec
from reactivate.planner.runner import Measurement
from reactivate.planner.trace.records import Allocation, Op, Trace

KIB, MIB = 2**10, 2**20


def reserved(*sizes: int) -> int:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    return allocator.reserved_bytes


# -- the allocator ----------------------------------------------------------------------------------------------------


@each(
    ("sizes", "expected"),
    [
        ((1,), 2 * MIB),
        ((MIB,) * 2, 2 * MIB),
        ((MIB,) * 3, 4 * MIB),
        ((512,) * 4096, 2 * MIB),
        ((513,) * 2048, 2 * MIB),  # each is two blocks of 512
        ((513,) * 2049, 4 * MIB),
        ((MIB + 1,), 20 * MIB),
        ((MIB + 1, 1), 22 * MIB),  # small and large ones have segments of their own
        ((9 * MIB, 9 * MIB), 20 * MIB),
        ((9 * MIB, 9 * MIB, 3 * MIB), 40 * MIB),
        ((10 * MIB,), 10 * MIB),
        ((10 * MIB + 1,), 12 * MIB),
        ((33 * MIB, 33 * MIB), 68 * MIB),
    ],
)
def test_segments_have_the_sizes_that_torch_gives_them(sizes: tuple[int, ...], expected: int) -> None:
    assert reserved(*sizes) == expected


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(12 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(11 * MIB) is small  # and not cut: what is left is no more than 1 MiB
    assert small.size_bytes == 12 * MIB
    allocator.allocate(30 * MIB)
    allocator.allocate(10 * MIB)  # what was left over
    assert allocator.reserved_bytes == 52 * MIB


def test_free_neighbours_become_one() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(512 * KIB) for _ in range(4)]
    assert allocator.reserved_bytes == 2 * MIB
    for part in (parts[0], parts[2]):
        allocator.free(part)
    allocator.allocate(MIB)  # a hole of half a MiB twice is none of one MiB
    assert allocator.reserved_bytes == 4 * MIB
    allocator.free(parts[1])
    allocator.allocate(1536 * KIB // 2 * 2 - 512 * KIB)  # the three are one now
    assert allocator.reserved_bytes == 4 * MIB


def test_random_programs_keep_every_byte_in_one_block() -> None:
    """Blocks of a segment follow one another without gaps, no two of them free, and add up to what is reserved."""
    chance = random.Random(0)
    allocator, alive, firsts = CachingAllocator(), [], {}  # type: ignore[var-annotated]
    for _ in range(3000):
        if alive and chance.random() < 0.5:
            allocator.free(alive.pop(chance.randrange(len(alive))))
        else:
            before = allocator.reserved_bytes
            asked = int(2 ** chance.uniform(0, 26))
            block = allocator.allocate(asked)
            alive.append(block)
            assert asked <= block.size_bytes and not block.is_free
            if allocator.reserved_bytes > before:
                firsts[id(block)] = block
    found: dict[int, MemoryBlock] = {}
    for block in [*alive, *(item[2] for free in allocator._free.values() for item in free)]:
        found[id(block)] = block
        for beside in (block.before, block.after):
            assert beside is None or not (beside.is_free and block.is_free)
        assert block.after is None or block.after.before is block
    assert sum(block.size_bytes for block in found.values()) == allocator.reserved_bytes
    for block in alive:
        allocator.free(block)
    whole = [item[2] for free in allocator._free.values() for item in free]
    assert all(block.before is None is block.after for block in whole)


# -- a step -----------------------------------------------------------------------------------------------------------


def step(rounding: int, *allocations: tuple[int, int, int | None], inside: int = 0) -> Trace:
    ops = [Op(0, 0, False, False, 0, inside, 0, 1.0) for _ in range(4)]
    return Trace(ops, allocations=[Allocation(*item) for item in allocations], standing=[3 * MIB], rounding=rounding)


def test_a_step_reserves_what_was_there_and_what_it_makes() -> None:
    assert reserved_for(step(1, (MIB, 0, 1)), 3 * MIB) is None  # a CPU has no such allocator
    assert reserved_for(step(512), 3 * MIB) == 20 * MIB
    assert reserved_for(step(512), 15 * MIB) == 20 * MIB  # the optimizer's 12 MiB
    assert reserved_for(step(512), 30 * MIB) == 48 * MIB  # and 27, which have a segment of their own
    assert reserved_for(step(512, (30 * MIB, 0, 1), (30 * MIB, 2, None)), 3 * MIB) == 50 * MIB
    assert reserved_for(step(512, (30 * MIB, 0, 3), (30 * MIB, 2, None)), 3 * MIB) == 80 * MIB
    assert reserved_for(step(512, (30 * MIB, 0, 2), (30 * MIB, 2, None)), 3 * MIB) == 50 * MIB  # freed before it
    assert reserved_for(step(512, (30 * MIB, 1, 1), inside=50 * MIB), 3 * MIB) == 70 * MIB


def planned(**options: Any) -> Plan:
    with torch.device("meta"):
        model = GPT(dim=256, layers=4)
    return reactivate.plan(model, torch.zeros(16, 128, dtype=torch.long), loss=loss_of, **options)


def loss_of(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


SPEC = DeviceSpec("mine", 200 * 10**6, 1e12, {"float32": 1e13}, "made up")


def test_a_plan_for_an_accelerator_says_what_is_reserved() -> None:
    plan = planned(budget="50%", device="H100")
    reserved_bytes = plan.predicted.reserved_bytes
    assert reserved_bytes is not None and reserved_bytes >= plan.predicted.peak_bytes
    assert reserved_bytes < plan.plain.reserved_bytes  # type: ignore[operator]
    assert reserved_bytes % (2 * MIB) == 0
    assert f"the allocator reserves about {plan_text.in_words(reserved_bytes)}." in str(plan)
    assert Plan.from_json(plan.to_json()).predicted.reserved_bytes == reserved_bytes
    assert planned(budget="50%").predicted.reserved_bytes is None  # on a CPU


def test_the_default_budget_leaves_a_reserve() -> None:
    spec = replace(SPEC, memory_bytes=10**9)
    budgets = {reserve: planned(device=spec, reserve=reserve).budget_bytes for reserve in (None, 0, "10%", "300MB", 1)}
    assert budgets == {None: 950 * 10**6, 0: 10**9, "10%": 900 * 10**6, "300MB": 700 * 10**6, 1: 10**9 - 1}


def test_the_default_plan_fits_as_the_allocator_reserves_it() -> None:
    """With a budget of all memory what is allocated fits, and what is reserved does not: the default budget is smaller."""
    whole = planned(budget="100%", device=SPEC)
    assert whole.plain.reserved_bytes is not None and whole.plain.reserved_bytes > whole.plain.peak_bytes
    tight = replace(SPEC, memory_bytes=(whole.plain.reserved_bytes + whole.plain.peak_bytes) // 2)
    naive = planned(budget=tight.memory_bytes, device=tight)
    assert naive.predicted.reserved_bytes > tight.memory_bytes  # type: ignore[operator]
    too_much = f", and mine has {plan_text.in_words(tight.memory_bytes)}: give a smaller budget, or leave it out."
    assert too_much in str(naive)
    found = planned(device=tight, reserve=0)
    assert found.predicted.reserved_bytes <= tight.memory_bytes  # type: ignore[operator]
    assert found.budget_bytes < tight.memory_bytes and too_much not in str(found)
    assert any(decision.candidate.recompute for decision in found.decisions)
    with pytest.raises(PlanInfeasible):
        planned(device=replace(SPEC, memory_bytes=30 * 10**6))


def test_what_is_no_reserve_is_refused() -> None:
    with pytest.raises(UsageError, match=r"plan\(reserve='much'\): it takes bytes \(0 for none\)"):
        parse_reserve("much", None)
    with pytest.raises(UsageError, match="it takes bytes"):
        parse_reserve(True, None)
    with pytest.raises(UsageError, match=r"left free by the default budget .* Leave out budget="):
        planned(budget="50%", reserve="5%", device=SPEC)


def test_a_measurement_says_both() -> None:
    found = Measurement(100, 60, 60, 20, 1.0, 1.0, 4 * MIB, 6 * MIB)
    assert "predicted 60 B (6.00 MiB reserved), measured 60 B (4.00 MiB reserved)" in str(found)
    assert "reserved" not in str(Measurement(100, 60, 60, 20, 1.0, 1.0))
