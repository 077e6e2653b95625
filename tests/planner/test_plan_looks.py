"""The costs of ops, looked at several times: what noise on a busy machine does to them, and to plans. No clock decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_models import gpt

import reactivate
from reactivate.planner import planner
from reactivate.planner.cost import measured
from reactivate.planner.cost.measured import Sample
from reactivate.planner.cost.op_costs import Key, op_key
from reactivate.planner.cost.overhead import Overhead
from reactivate.planner.plan import Plan
from reactivate.planner.trace.records import Cost


def key(shape: tuple[int, ...], *, turned: bool = False) -> Key:
    tensor = torch.empty(shape[::-1]).t() if turned else torch.empty(shape)
    return op_key(torch.ops.aten.exp.default, (tensor,), {})


def sample(**seconds: list[float]) -> Sample:
    keys = {"one": key((4, 8)), "turned": key((4, 8), turned=True), "other": key((3, 3))}
    return Sample({keys[name]: [Cost(value, 7, (5,)) for value in values] for name, values in seconds.items()}, {})


def test_the_least_of_all_times_counts() -> None:
    found = measured.best_costs([sample(one=[2.0, 3.0], other=[1.0]), sample(one=[9.0, 2.5], other=[4.0])])
    assert [cost.seconds for cost in found.values()] == [2.0, 1.0]
    assert all(cost.top_bytes == 7 and cost.result_bytes == (5,) for cost in found.values())


def test_uncertainty_is_what_a_second_look_adds() -> None:
    twice = [sample(one=[1.0, 1.0], other=[2.0]), sample(one=[1.5, 1.2], other=[2.0])]
    assert measured.time_uncertainty(twice) == pytest.approx(0.4 / 4.0)
    assert measured.time_uncertainty([*twice, sample(one=[1.0, 3.0], other=[2.0])]) == 0.0
    assert measured.time_uncertainty([]) == 0.0


def test_times_that_are_far_apart_are_implausible() -> None:
    near, far = sample(one=[1.0], other=[1.0]), sample(one=[4.0], other=[1.1])
    assert measured.implausible([near, near]) == set()
    assert measured.implausible([near, far]) == {key((4, 8))}
    assert measured.implausible([near, far, near]) == set()  # two agree


def test_an_op_far_above_its_twin_is_looked_at_once_more() -> None:
    found = sample(one=[1.0], turned=[3.5], other=[1.0])
    assert measured.implausible([found, found]) == {key((4, 8), turned=True)}
    assert measured.implausible([found, found, found]) == set()  # then it is slow


def test_what_does_not_matter_is_let_be() -> None:
    near, far = sample(one=[0.001], other=[1.0]), sample(one=[0.008], other=[1.0])
    assert measured.implausible([near, far]) == set()


# -- on a busy machine --------------------------------------------------------------------------------------------------


class Machine:
    """A machine on which ops take what a roofline says, and much longer now and then."""

    def __init__(self, seed: int, share: float) -> None:
        self.random, self.share, self.looks = random.Random(seed), share, 0

    def on_cpu(self, meter: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, int]:
        result = func(*args, **kwargs)
        seconds = measured.roofline.seconds_of(func, args, kwargs, result, meter._spec)
        is_disturbed = self.random.random() < self.share
        return result, seconds * (self.random.uniform(1.2, 9.0) if is_disturbed else 1.0), 0

    def time_call(self, run: Callable[[], object], device: torch.device) -> float:
        run()
        return 1.0 * (self.random.uniform(1.0, 1.2) if self.share else 1.0)


def plans_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    torch.manual_seed(0)
    monkeypatch.setattr(measured._Meter, "_on_cpu", lambda *args: machine.on_cpu(*args))
    monkeypatch.setattr(measured, "time_call", machine.time_call)
    monkeypatch.setattr(planner, "measure_overhead", lambda: Overhead(1e-6, 1e-7, 1e-7, 1e-7))
    case = gpt(layers=6, dim=64)
    plan = reactivate.plan(case.model, case.args, budget="80%", loss=case.loss)
    return [plan, plan.at("65%"), plan.at("50%"), plan.at("40%")]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_plans_on_a_busy_machine_are_those_of_a_quiet_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = plans_on(Machine(0, 0.0), monkeypatch)
    busy = plans_on(Machine(seed, 0.3), monkeypatch)
    for one, other in zip(quiet, busy):
        assert [item.candidate for item in one.decisions] == [item.candidate for item in other.decisions]
        assert one.uncertainty == 0.0 < other.uncertainty
        assert "A repeated measurement was" in str(other) and "A repeated measurement" not in str(one)
    assert any(item.candidate.recompute for item in quiet[-1].decisions)


def test_a_second_look_is_taken_where_the_first_two_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    original = measured.measure

    def measure(run: Callable[[], object], *args: Any, takes_memory: bool, **more: Any) -> Sample:
        found = original(run, *args, takes_memory=takes_memory, **more)
        taken.append(takes_memory)
        if len(taken) == 1:  # as if another program had the machine
            return found._replace(
                seen={key: [cost._replace(seconds=1e3) for cost in item] for key, item in found.seen.items()}
            )
        return found

    monkeypatch.setattr(measured, "measure", measure)
    case = gpt(layers=2)
    plan = reactivate.plan(case.model, case.args, budget="80%", loss=case.loss)
    assert taken[0] and not any(taken[1:]) and len(taken) > measured.LEAST_LOOKS
    assert plan.predicted.seconds < 10
