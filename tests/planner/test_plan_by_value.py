"""Candidates that save single calls: what is known of calls, how they are ranked, and that steps stay as they are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from memory import allocated_by
from oracle import assert_bitwise
from plan_models import MODELS, Block, Case, gpt
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

import reactivate
from reactivate import is_recomputing
from reactivate.planner import planner, simulator
from reactivate.planner.call_values import RecordedCall, SavedCalls, best_choices, ranked, saving_candidate
from reactivate.planner.candidates import FULL, KEEP, Assignment, CallName, Candidate
from reactivate.planner.cost.overhead import Overhead
from reactivate.planner.planner import Planner
from reactivate.planner.recorded_calls import recorded_calls
from reactivate.planner.simulator import on_tensors
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import find_target
from reactivate.planner.trace.records import Cost


def prepared(case: Case) -> Planner:
    step = TrainingStep(case.model, case.args, case.kwargs, case.loss)
    return Planner(step, find_target(case.model, case.args, case.kwargs, None), None, lambda words: None).prepare()


def by_value(found: Planner, path: str) -> list[Candidate]:
    return [item for item in found.menus[path] if " of " in item.name]


# -- the choices of a plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet", "vit", "t5", "unet"])
def test_every_choice_leaves_the_step_as_it_is(name: str) -> None:
    """Every bit of the gradients and buffers is there, regions ran, and more is held than where all is recomputed."""
    torch.manual_seed(0)
    case = MODELS[name]()
    found = prepared(case)
    calls = found._simulator.record(
        {path: found._called[path].functions for path in found.units}, found.profile.costs, 0
    )
    assert calls.keys() == found.units.keys()
    least = held_in(found, dict.fromkeys(found.units, FULL))
    for share in (0.3, 0.6, 0.9):
        candidates = {}
        for path in found.units:
            path_of_choices = ranked(calls[path])
            candidates[path] = saving_candidate(path_of_choices[round(share * (len(path_of_choices) - 1))].names, "x")
        verdict = reactivate.verify(case.model, case.args, case.kwargs, policy=Assignment(candidates))
        assert verdict and verdict.regions >= len(candidates), verdict
        assert least < held_in(found, candidates)


def held_in(found: Planner, candidates: Mapping[str, Candidate]) -> int:
    return sum(call.held_bytes for call in found.attempt(candidates)[1].calls)


class _Ones:
    """The time of an op is one second if it computes much, and nothing if not."""

    rounding = 1
    has_streams = False
    _counted = ("addmm", "mm", "gelu", "native_layer_norm", "_scaled_dot_product_flash_attention_for_cpu", "bernoulli_")

    def of(self, op: Any, args: Any, kwargs: Any, result: Any) -> Cost:
        return Cost(float(op.overloadpacket.__name__ in self._counted))


def test_what_is_known_of_calls_is_what_a_step_shows() -> None:
    """Bytes to the byte; of the time, which calls are recomputed."""
    torch.manual_seed(0)
    planned = prepared(gpt(layers=2))
    planned.profile = replace(planned.profile, costs=_Ones())
    path = "blocks.0"
    functions = planned._called[path].functions
    calls = planned._simulator.record({path: functions}, planned.profile.costs, 0)[path]
    names = [call.name for call in calls if not call.reason]
    assert {CallName("mlp.4"), CallName("attn", "scaled_dot_product_attention")} <= set(names)
    seen = {call.name: {**call.saved, **call.results} for call in calls}
    assert sum(seen[CallName("mlp.4")].values()) == 2 * 4 * 64 * 32 * 4  # noise and result
    base = planned.attempt({path: FULL})[1].calls[0].held_bytes
    random = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 4, 6, len(names)):
        saved = frozenset(names[at] for at in torch.randperm(len(names), generator=random)[:size])
        modules = tuple(call.path for call in saved if not call.op)
        functions = tuple(call for call in saved if call.op)
        trace, reading = planned.attempt({path: Candidate("x", ("",), modules, save_calls=functions)})
        found = SavedCalls(calls, saved).costs
        again = sum(op.seconds for op in trace.ops if op.is_recomputation)
        assert again == found.seconds, saved
        assert reading.calls[0].held_bytes - base == found.held_bytes, saved


def test_plans_have_such_choices_hold_their_budgets_and_come_back_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(planner, "measure_overhead", lambda: Overhead(0.0, 0.0, 0.0, 0.0))  # as in a large model
    case = gpt(layers=6, dim=64)
    plan = reactivate.plan(case.model, case.args, budget="100%", loss=case.loss)
    used = set()
    for share in range(90, 30, -12):
        plan = plan.at(f"{share}%")
        used |= {item.candidate.name for item in plan.decisions}
        measured = plan.measure()
        assert measured.holds and abs(measured.error) < 0.01
        plan.save(tmp_path / "plan.json")
        assert reactivate.Plan.load(tmp_path / "plan.json").decisions == plan.decisions
    assert any(" of " in name for name in used), used


def test_what_a_block_returns_is_there_anyway() -> None:
    """The backward of a last ReLU reads its result, which is the input of the next block: to save the call takes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.ReLU()) for _ in range(2))
    )
    step = TrainingStep(model, (torch.randn(1, 2, 16, 16),))
    units, functions = {"0": model[0], "1": model[1]}, {"0": ("conv2d", "relu")}
    device = torch.device("cpu")
    calls = recorded_calls(model, lambda: on_tensors(step, device, None), units, functions, _Ones())["0"]
    assert [call.name.path for call in calls] == ["0", "1", "2", "3"]
    assert sum(calls[1].saved.values()) == 2 * 14 * 14 * 4 and sum(calls[3].saved.values()) == 0
    assert sum(calls[0].results.values()) == 2 * 14 * 14 * 4 and sum(calls[3].results.values()) == 0


def lack_values(*_: Any) -> None:
    raise DataDependentOutputException(torch.ops.aten.item.default)


@pytest.mark.parametrize("can_simulate", [True, False])
def test_where_memory_is_scarce_calls_are_recorded_without_any(
    can_simulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(simulator, "QUICK", 1e9)
    found = prepared(gpt(layers=2))
    assert found._simulator.is_real
    if not can_simulate:
        run = TrainingStep.on_tensors
        monkeypatch.setattr(
            TrainingStep, "on_tensors", lambda step, device: run(step, None) if device is None else lack_values()
        )
    functions = {"blocks.0": found._called["blocks.0"].functions}
    scarce = found._simulator.record(functions, found.profile.costs, 10**18)
    roomy = found._simulator.record(functions, found.profile.costs, 0)["blocks.0"]
    if can_simulate:
        assert [call.name for call in scarce["blocks.0"]] == [call.name for call in roomy]
        sizes = ([sum(call.results.values()) for call in calls] for calls in (scarce["blocks.0"], roomy))
        assert next(sizes) == next(sizes)
    else:
        assert scarce == {}


# -- calls and their names ----------------------------------------------------------------------------------------------


class _Sines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).sin() + 1
        x = x.sin().cos()
        return self.two(x.exp().sin())


class _CountedAgain(TorchDispatchMode):
    """Counts the ops that recomputations make."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_recomputing():
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_call_of_several_is_saved(number: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Sines(), _Sines(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    expected = [item.grad.clone() for item in model.parameters()]
    model.zero_grad()
    candidate = Candidate("one", ("",), save_calls=(CallName("", "sin", number),))
    handle = reactivate.apply(model, Assignment({"0": candidate, "1": candidate}))
    with _CountedAgain() as counted:
        model(x).sum().backward()
    assert len(handle.regions) == 2 and counted.ops.count("sin") == 4 and counted.ops.count("cos") == 2
    for item, gradient in zip(model.parameters(), expected):
        assert_bitwise(item.grad, gradient, "a gradient")


def test_torchs_compiler_saves_such_calls() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Sines(), _Sines(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    expected = [item.grad.clone() for item in model.parameters()]
    model.zero_grad()
    candidate = Candidate("x", ("",), ("one",), save_calls=(CallName("", "sin", 2),))
    reactivate.apply(model, Assignment({"0": candidate, "1": candidate}))
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    for item, gradient in zip(model.parameters(), expected):
        assert_bitwise(item.grad, gradient, "a gradient")


def test_a_saved_call_is_held_and_no_more() -> None:
    """Saved calls hold their results; where nothing is saved, only the input is."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(32), Block(32))
    x = torch.randn(4, 64, 32)

    def held(candidate: Candidate) -> int:
        with reactivate.apply(model, Assignment({"0": candidate, "1": KEEP})):
            return allocated_by(lambda: model(x).sum()).peak_bytes

    saved = Candidate("x", ("",), ("mlp.1",))
    assert held(FULL) < held(saved) < held(KEEP)


# -- the ranking --------------------------------------------------------------------------------------------------------


@st.composite
def _chains(draw: Any) -> list[RecordedCall]:
    found = []
    for number in range(draw(st.integers(1, 7))):
        saved = {2 * number: size} if (size := draw(st.integers(0, 6))) else {}
        results = {2 * number + 1: draw(st.integers(1, 9))}
        reason = draw(st.sampled_from(["", "", "", "it writes into its arguments"]))
        needs = draw(st.booleans())
        found.append(RecordedCall(CallName(str(number)), float(draw(st.integers(0, 9))), saved, results, needs, reason))
    return found


@settings(max_examples=150, deadline=None)
@given(_chains())
def test_the_ranking_is_near_the_optimum(calls: list[RecordedCall]) -> None:
    """Between two choices of the ranking no choice lies further below than one call is worth, as of Dantzig's bound."""
    path = ranked(calls)
    assert path[0].names == frozenset() and all(one.names < two.names for one, two in itertools.pairwise(path))
    names = [call.name for call in calls if not call.reason]
    most = max((call.seconds for call in calls), default=0.0) + max(0.0, *(path[0].costs.seconds - 0.0,)) * 0.5
    for size in range(len(names) + 1):
        for saved in itertools.combinations(names, size):
            exact = SavedCalls(calls, saved).costs
            best = min(choice.costs.seconds for choice in path if choice.costs.held_bytes <= exact.held_bytes)
            assert best <= exact.seconds + most


def test_what_follows_the_last_needed_tensor_is_worth_nothing() -> None:
    first = RecordedCall(CallName("first"), 2.0, {}, {0: 4}, needs_arguments=True)
    last = RecordedCall(CallName("last"), 5.0, {}, {1: 4}, needs_arguments=True)
    assert SavedCalls([first, last], ()).costs == (0, 2.0)
    assert SavedCalls([first, last], [last.name]).costs == (0, 2.0)  # neither made nor kept
    assert SavedCalls([first, last], [first.name]).costs == (4, 0.0)
    mask = RecordedCall(CallName("dropout"), 1.0, {2: 1}, {3: 4})
    assert SavedCalls([first, last, mask], ()).costs == (0, 8.0)  # the mask is drawn last: all is recomputed
    assert SavedCalls([first, last, mask], [mask.name]).costs == (1, 2.0)
    chosen = best_choices([first, last, mask], keep_bytes=9)
    assert chosen[0].names == {mask.name}  # six seconds for a byte


def test_memory_that_two_calls_keep_counts_once() -> None:
    one = RecordedCall(CallName("one"), 1.0, {7: 4}, {8: 4}, needs_arguments=True)
    two = RecordedCall(CallName("two"), 1.0, {8: 4}, {9: 4})
    end = RecordedCall(CallName("end"), 1.0, {10: 1}, {})
    assert SavedCalls([one, two, end], [one.name, two.name]).costs.held_bytes == 4 + 4 + 4


def test_choices_that_add_little_are_left_out() -> None:
    end = RecordedCall(CallName("end"), 0.0, {9: 1})
    even = [RecordedCall(CallName(str(number)), 1.0, {}, {number: 8}, needs_arguments=True) for number in range(6)]
    assert best_choices([*even, end], keep_bytes=41, others=[[end.name]]) == []  # all on one line
    dear = [RecordedCall(CallName("0"), 9.0, {}, {0: 8}, needs_arguments=True), *even[1:], end]
    saved = frozenset({CallName("0"), end.name})
    assert [choice.names for choice in best_choices(dear, keep_bytes=41)] == [saved]
    assert best_choices(dear, keep_bytes=41, others=[saved]) == []


def test_the_last_dropout_is_what_a_block_saves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise is kept and its result is not, and of all that comes after the last product nothing runs."""
    torch.manual_seed(0)
    monkeypatch.setattr(planner, "measure_overhead", lambda: Overhead(0.0, 0.0, 0.0, 0.0))
    found = prepared(gpt(layers=4, dim=64))
    first = by_value(found, "blocks.0")[0]
    assert first.save_modules == ("mlp.4",) and not first.save_calls
    saved, full = (found.table.change("blocks.0", item) for item in (first, FULL))
    assert saved is not None and full is not None
    assert 0 < saved.held_bytes - full.held_bytes <= 4 * 64 * 64 * 4
    trace, whole = (found.attempt({"blocks.0": item})[0] for item in (first, FULL))
    assert sum(op.is_recomputation for op in trace.ops) < sum(op.is_recomputation for op in whole.ops)
