"""`plan`: what it asks for, what it returns, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from journal import Journal
from memory import allocated_by
from oracle import assert_bitwise, random_states
from plan_models import GPT, Block, Case, gpt, resnet
from several import each
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate._region.accounts import in_words
from reactivate._torch.modes import FakeTensor
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.planner import planner, progress, simulator
from reactivate.planner.cost import measured
from reactivate.planner.cost.devices import find
from reactivate.planner.cost.overhead import Overhead
from reactivate.planner.plan import Plan
from reactivate.planner.target import available_bytes, memory_bytes


def planned(case: Case, budget: int | str = "60%", **options: Any) -> Plan:
    return reactivate.plan(case.model, case.args, case.kwargs, budget=budget, loss=case.loss, **options)


@pytest.fixture(scope="module")
def three_blocks() -> tuple[Case, Plan]:
    """A model with its plan for 60%, for tests of what a plan can be used for."""
    case = gpt(layers=3)
    return case, planned(case, "60%")


def assert_all_bitwise(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, item in one.items():
        assert_bitwise(item, other[name], name)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: item.grad.clone() for name, item in model.named_parameters()}


def peak_of(case: Case, plan: Plan | None, step: Any = None) -> int:
    """Return what a step allocates at most, above what is there before."""
    for parameter in case.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    handle = None if plan is None else reactivate.apply(case.model, plan)
    (step or case.step)()
    peak = allocated_by(step or case.step).peak_bytes
    if handle is not None:
        handle.remove()
    case.model.zero_grad()
    return peak


def assert_holds(case: Case, plan: Plan) -> None:
    """The real step stays within the budget, is as large as was said, and comes to the same gradients."""
    peak = peak_of(case, plan)
    assert plan.fixed.total + peak <= plan.budget_bytes
    own = plan.plain.peak_bytes - plan.fixed.total
    assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.01 * own
    assert len(repr(plan.predicted)) < 400, "it is no list of every moment"
    assert peak < own
    verdict = reactivate.verify(case.model, case.args, case.kwargs, policy=plan)
    assert verdict and verdict.regions > 0


# -- what it leaves alone ---------------------------------------------------------------------------------------------


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


# -- where the peak is ------------------------------------------------------------------------------------------------


class InForward(nn.Module):
    """A large value on the way that nothing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            large = x.repeat(1, 1, 200).sum(-1, keepdim=True)
        return self.last(x) + large


def test_a_step_that_peaks_in_the_forward() -> None:
    case = Case(InForward(), (torch.randn(4, 32, 16),), loss=lambda out: out.sum())
    plan = planned(case, "90%")
    assert_holds(case, plan)
    assert plan.predicted.peak.seconds <= plan.predicted.forward_seconds


def test_a_step_that_peaks_in_the_loss() -> None:
    case = gpt(layers=3, tokens=2000)
    plan = planned(case, "85%", head="keep")
    assert_holds(case, plan)


@pytest.mark.parametrize("wide", [(16, 1, 1, 1), (1, 1, 1, 16), (2, 8, 1, 4)], ids=["first", "last", "uneven"])
def test_uneven_blocks(wide: tuple[int, ...]) -> None:
    case = gpt(layers=4, wide=wide)
    plan = planned(case, "70%")
    assert_holds(case, plan)


def test_placement_matters() -> None:
    """Of equal blocks it is not the first that are recomputed: what those hold is there at the peak of the others."""
    case = gpt(layers=8)
    plan = planned(case, "60%")
    assert_holds(case, plan)
    counts = Counter(decision.candidate.name for decision in plan.decisions)
    assert len(counts) > 1 and plan.decisions[-1].held_bytes >= plan.decisions[0].held_bytes


class Giant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(16), nn.Sequential(*(Block(16) for _ in range(6))), nn.Linear(16, 16)])
        self.body = nn.Sequential(self.parts[0], self.parts[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_one_giant_block() -> None:
    case = Case(Giant(), (torch.randn(4, 64, 16),), loss=lambda out: out.sum())
    plan = planned(case, "60%")
    assert_holds(case, plan)


class LoRA(nn.Module):
    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def test_a_frozen_trunk_with_adapters() -> None:
    case = gpt(layers=4)
    case.model.requires_grad_(False)
    for block in case.model.blocks:
        block.attn.qkv = LoRA(block.attn.qkv)
    plan = planned(case, "60%")
    assert plan.fixed.gradients == sum(item.nbytes for item in case.model.parameters() if item.requires_grad)
    assert_holds(case, plan)


def test_gradients_of_several_batches_are_accumulated() -> None:
    case = gpt(layers=4)
    parts = [torch.randint(64, (4, 64)), torch.randint(64, (2, 64))]

    def step() -> None:
        for tokens in parts:
            logits = case.model(tokens)
            F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    plan = reactivate.plan(case.model, budget="60%", step=step)
    assert plan.made_for.loss == "step()"
    assert plan.fixed.total + peak_of(case, plan, step) <= plan.budget_bytes
    own = plan.plain.peak_bytes - plan.fixed.total
    assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak_of(case, plan, step)) <= 0.01 * own


def test_no_block_structure() -> None:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(32, 32), nn.GELU()]
    case = Case(nn.Sequential(*layers), (torch.randn(64, 32),), loss=lambda out: out.sum())
    plan = planned(case, "100%")
    assert [decision.path for decision in plan.decisions] == [""]
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(plan.fixed.total + 1)
    smallest = plan.at(caught.value.least_bytes)
    assert smallest.fixed.total + peak_of(case, smallest) <= caught.value.least_bytes


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(16), Block(16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return self.last(x)


def test_a_block_that_runs_several_times() -> None:
    case = Case(Shared(), (torch.randn(4, 64, 16),), loss=lambda out: out.sum())
    plan = planned(case, "60%")
    assert [decision.path for decision in plan.decisions] == ["block", "last"]
    assert_holds(case, plan)


# -- the budget -------------------------------------------------------------------------------------------------------


def test_the_least_budget_is_named_and_holds_and_one_byte_less_is_refused() -> None:
    case = gpt(layers=2)
    with pytest.raises(PlanInfeasible, match="the least that does takes") as caught:
        planned(case, 1000)
    least = caught.value.least_bytes
    assert caught.value.budget_bytes == 1000
    plan = planned(case, least)
    assert plan.fixed.total + peak_of(case, plan) <= least
    with pytest.raises(PlanInfeasible) as again:
        planned(case, least - 1)
    assert again.value.least_bytes == least


def test_a_budget_is_all_included() -> None:
    case = gpt(layers=3)
    optimizer = torch.optim.Adam(case.model.parameters())
    plan = planned(case, "60%", optimizer=optimizer)
    parameters = sum(item.nbytes for item in case.model.parameters())
    assert plan.fixed.parameters == plan.fixed.gradients == parameters
    steps = 4 * len(list(case.model.parameters()))  # a number of steps for each parameter
    assert plan.fixed.optimizer == 2 * parameters + steps
    assert plan.fixed.inputs == case.args[0].nbytes
    assert not optimizer.state  # untouched
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    found = allocated_by(optimizer.step).peak_bytes
    assert abs(plan.optimizer_bytes - plan.fixed.total - found) <= 0.01 * found
    tight = max(plan.predicted.peak_bytes, plan.optimizer_bytes)
    assert plan.at(tight).peak_bytes <= tight
    with pytest.raises(PlanInfeasible) as caught:
        plan.at(plan.optimizer_bytes - 1)
    assert caught.value.least_bytes >= plan.optimizer_bytes


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


def test_a_share_is_of_the_activations() -> None:
    plan = planned(gpt(layers=3), "50%")
    own = plan.plain.peak_bytes - plan.fixed.total
    assert plan.budget_bytes == plan.fixed.total + own // 2


def test_a_cpu_has_no_default_budget() -> None:
    case, calls = gpt(layers=2), []
    case.model.register_forward_pre_hook(lambda *call: calls.append(call))
    with pytest.raises(UsageError, match="needs a budget on a CPU"):
        reactivate.plan(case.model, case.args)
    assert not calls, "it is refused before anything runs"


def test_less_memory_is_more_time_on_the_frontier() -> None:
    plan = planned(gpt(layers=4), "70%")
    points = plan.frontier
    assert len(points) > 3
    assert [point.peak_bytes for point in points] == sorted({point.peak_bytes for point in points})
    seconds = [point.seconds for point in points]
    assert seconds == sorted(seconds, reverse=True)
    assert {"none()", "full()", "recompute_every(2)"} <= {point.label for point in plan.policies}
    none = next(point for point in plan.policies if point.label == "none()")
    assert none.peak_bytes == plan.plain.peak_bytes
    for policy in plan.policies:  # none is both smaller and faster than what the solver found
        assert not any(policy.peak_bytes < point.peak_bytes and policy.seconds < point.seconds for point in points)


@pytest.mark.slow
def test_the_largest_batch_is_found() -> None:
    class Labelled(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(tokens).flatten(0, 1), tokens.flatten())

    model = Labelled(layers=2)
    tokens = torch.randint(64, (2, 32))
    budget = reactivate.plan(model, tokens, budget="100%").budget_bytes * 2
    plan = reactivate.plan(model, tokens, budget=budget, maximize="batch")
    assert plan.largest is not None and plan.largest > 4
    assert plan.made_for.inputs[0][1] == (plan.largest, 32)
    assert plan.predicted.peak_bytes <= budget
    with pytest.raises(PlanInfeasible):
        reactivate.plan(model, torch.randint(64, (plan.largest + 1, 32)), budget=budget)
    longer = reactivate.plan(model, tokens, budget=budget, maximize={"length": 1})
    assert longer.largest is not None and longer.made_for.inputs[0][1] == (2, longer.largest)


@each("maximize", ["length", {"a": 0, "b": 1}, 3, {"length": True}])
def test_what_cannot_be_maximized_is_refused(maximize: Any) -> None:
    with pytest.raises(UsageError, match="takes 'batch'"):
        reactivate.plan(GPT(layers=2), torch.zeros(2, 8, dtype=torch.long), budget="1GiB", maximize=maximize)


def test_a_loss_with_targets_of_its_own_cannot_be_maximized() -> None:
    case = gpt(layers=2)
    with pytest.raises(UsageError, match="does not run with another size than"):
        planned(case, "1GiB", maximize="batch")


class Positions(nn.Module):
    """A model whose table of positions ends at 20."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.blocks = nn.Embedding(20, 32), nn.ModuleList(Block(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("length", [*(pytest.param(length, marks=pytest.mark.slow) for length in (8, 15)), 20])
def test_the_end_of_a_table_of_positions_ends_the_search(length: int) -> None:
    x = torch.randn(2, length, 32)
    with pytest.warns(UserWarning, match="20 is the largest length with which the model runs; with .* it raises"):
        plan = reactivate.plan(Positions(), x, budget="1GiB", maximize={"length": 1})
    assert plan.largest == 20


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda model: None, "called no block of the Positions"),
        (lambda model: copy.deepcopy(model)(torch.randn(2, 8, 32)).sum().backward(), "called no block"),
        (lambda model: model(torch.randn(2, 8, 32)), "ran no backward"),
    ],
)
def test_a_step_that_is_none_of_the_model_is_refused(step: Callable[[nn.Module], object], words: str) -> None:
    model = Positions()
    with pytest.raises(UsageError, match=words):
        reactivate.plan(model, budget="50%", step=lambda: step(model))


def test_a_frozen_model_has_nothing_to_plan() -> None:
    model = Positions().requires_grad_(False)
    for options in ({}, {"loss": lambda out: out.sum()}):
        with pytest.raises(UsageError, match="all parameters of the Positions are frozen"):
            reactivate.plan(model, torch.randn(2, 8, 32), budget="50%", **options)
    assert reactivate.plan(model, torch.randn(2, 8, 32, requires_grad=True), budget="90%").decisions


def test_another_budget_does_not_look_at_the_model_again(three_blocks: tuple[Case, Plan]) -> None:
    case, plan = three_blocks
    runs = Journal()
    handle = case.model.blocks[0].register_forward_hook(lambda *_: runs.append(1))
    with reactivate.apply(case.model, plan):
        other = plan.at("60%")
    handle.remove()
    assert other.decisions == plan.decisions and not list(runs)


# -- on devices that are not here -------------------------------------------------------------------------------------


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


def test_real_and_fake_agree(three_blocks: tuple[Case, Plan]) -> None:
    case, real = three_blocks
    fake = planned(case, "60%", device=find("cpu"))
    assert not real.made_for.is_predicted and fake.made_for.is_predicted
    own = real.plain.peak_bytes - real.fixed.total
    assert abs(fake.plain.peak_bytes - real.plain.peak_bytes) <= 0.01 * own
    assert fake.fixed == real.fixed


def test_a_faster_device_is_faster() -> None:
    case = gpt(layers=2)
    seconds = [planned(case, "100%", device=name).plain.seconds for name in ("T4", "A100-80GB")]
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize(("device", "message"), [("H1000", "H100"), ("cuda", "Move it there first")])
def test_an_unknown_device_is_refused(device: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(gpt(layers=2), "60%", device=device)


# -- a policy, a file -------------------------------------------------------------------------------------------------


def test_a_plan_is_saved_and_loaded(tmp_path: Path, three_blocks: tuple[Case, Plan]) -> None:
    case, plan = three_blocks
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.to_json() == plan.to_json()
    assert_holds(case, loaded)
    with pytest.raises(UsageError, match="loaded from a file"):
        loaded.measure()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "cannot be read as a plan"),
        ("nothing", "cannot be read as a plan"),
        ("[]", "is no plan: it has a list"),
        ("{}", "is no plan as `Plan.save` writes it: the field 'version' is missing."),
        ('{"version": 1}', "is no plan as `Plan.save` writes it: the field 'budget' is missing."),
        ('{"version": 99}', "is of version 99; this release reads version 1 of the class Plan. Make it again."),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(f"{str(path)!r} {found}")):
        Plan.load(path)
    with pytest.raises(UsageError, match="cannot be read"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(UsageError, match="takes the path of a file that Plan.save wrote; got None"):
        Plan.load(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="what Plan.to_json returned, a dict; got"):
        Plan.from_json(text)  # type: ignore[arg-type]


def test_a_plan_for_another_model_is_refused(three_blocks: tuple[Case, Plan]) -> None:
    _, plan = three_blocks
    with pytest.raises(UsageError, match=r"it has no 'blocks\.2'"):
        reactivate.apply(GPT(layers=2), plan)
    with pytest.raises(UsageError, match="has other parameters"):
        reactivate.apply(GPT(layers=3, dim=16), plan)


def test_copies_of_a_planned_model_have_the_plan(three_blocks: tuple[Case, Plan]) -> None:
    case, plan = three_blocks
    handle = reactivate.apply(case.model, plan)
    for twin in (copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))):
        found = reactivate.Handle.of(twin)
        assert found is not None and found.regions == handle.regions and found.policy == plan
        torch.manual_seed(1)
        case.loss(twin(*case.args)).backward()
        case.model.zero_grad()
        torch.manual_seed(1)
        case.step()
        assert_all_bitwise(gradients_of(case.model), gradients_of(twin))
    handle.remove()


def test_a_plan_is_measured_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str], three_blocks: tuple[Case, Plan]
) -> None:
    _, plan = three_blocks
    found = plan.measure()
    assert found.holds and abs(found.error) <= 0.0005 and found.measured_bytes <= plan.budget_bytes
    assert any(decision.candidate.recompute for decision in plan.decisions)  # whose checksums would take memory
    assert found.measured_seconds > 0
    assert str(found).startswith("Peak: predicted")
    assert capsys.readouterr().out == ""


def test_other_shapes_are_told_of() -> None:
    case = gpt(layers=3)
    plan = reactivate.plan(case.model, case.args, budget="60%")
    handle = reactivate.apply(case.model, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.model(*case.args)
    longer = torch.randint(64, (8, 64))
    with pytest.warns(
        UserWarning, match=r"shape \(4, 64\), and the model is called with \(8, 64\).*does not hold"
    ) as told:
        case.model(longer)
    assert "The peak will be" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.model(longer)  # once
    with pytest.warns(UserWarning, match="still holds"):
        case.model(case.args[0][:1])
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.model(torch.randint(64, (3, 64)))


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class WithLoss(GPT):
    """Returns its loss if it is given labels, as models of transformers do."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        logits = super().forward(tokens)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


@contextmanager
def nothing_told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_step_that_is_not_one_of_training_is_warned_of() -> None:
    tokens = torch.randint(64, (4, 64))
    model = WithLoss(layers=2)
    with nothing_told():
        plan = reactivate.plan(model, (tokens, tokens), budget="100%")
    assert plan.made_for.trains and "on cpu, in training mode, with backward called on the output's .loss" in str(plan)
    with pytest.warns(UserWarning, match="WithLoss has returned no loss, so the sum.*put the labels") as told:
        plan = reactivate.plan(model, tokens, budget="100%")
    assert len(told) == 1 and "backward called on the sum of the model's output, whose .loss is None" in str(plan)
    with nothing_told():
        plan.at("90%")
        reactivate.plan(model, tokens, budget="100%", loss=lambda output: output.logits.sum())
    model.eval()
    with pytest.warns(UserWarning, match=r"is in eval\(\) mode.*call model.train\(\) first") as told:
        plan = reactivate.plan(model, (tokens, tokens), budget="100%")
    assert len(told) == 1 and "on cpu, in eval() mode" in str(plan)
    with torch.device("meta"):
        elsewhere = GPT(layers=2)
    with pytest.warns(UserWarning, match="is on the meta device, and its step was planned for a cpu. Name the device"):
        reactivate.plan(elsewhere, tokens, budget="1GiB")
    with nothing_told():
        reactivate.plan(elsewhere, tokens, budget="1GiB", device="A100-80GB")


def test_a_step_in_another_mode_than_the_planned_one_is_told_of_once() -> None:
    case = gpt(layers=2)
    case.model.eval()
    plan = planned(case, "60%")
    case.model.train()
    assert plan.at("70%").made_for.trains is False  # it is for the step that was planned
    reactivate.apply(case.model, plan)
    with pytest.warns(UserWarning, match=r"made for a model in eval\(\) mode, and this one is in training mode"):
        case.step()
    with nothing_told():
        case.step()


class Drawing(GPT):
    """Runs some of its blocks: those that it draws, of those that it has."""

    first = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks[self.first :]:
            x = block(x) if torch.rand(()) < 0.7 else x
        return self.head(self.norm(x))


def test_a_plan_for_another_budget_is_for_the_step_that_was_planned() -> None:
    """Whatever is drawn by then, and if the model itself runs other blocks by now."""
    torch.manual_seed(3)
    model = Drawing(layers=6)
    plan = reactivate.plan(model, torch.randint(64, (4, 64)), budget="90%")
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        before = random_states()
        tighter = plan.at(int(0.7 * plan.plain.peak_bytes) + seed)  # no plan that was tried before
        found.append((tighter.predicted.peak_bytes, tighter.decisions))
        assert_all_bitwise(before, random_states())
    assert found[0] == found[1] == found[2]
    assert abs(plan.measure().error) <= 0.0005
    model.first = 4
    assert plan.at("65%").decisions


class Short(GPT):
    """Has too little memory for a real step, from one moment on."""

    is_short = False

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_short and not isinstance(self.embed.weight, FakeTensor):
            raise torch.OutOfMemoryError("Out of memory. Tried to allocate 64.00 KiB.")
        return super().forward(tokens)


def test_a_plan_for_another_budget_needs_no_more_memory_than_there_is() -> None:
    model = Short(layers=3)
    plan = reactivate.plan(model, torch.randint(64, (4, 64)), budget="90%")
    assert plan.proof.method == "real"
    model.is_short = True
    tighter = plan.at("55%")
    assert tighter.proof.method == "simulated" and tighter.predicted.peak_bytes <= tighter.budget_bytes


class OtherGPT(GPT):
    pass


def test_a_plan_from_a_file_tells_of_another_step_once(tmp_path: Path) -> None:
    case = gpt(layers=2)
    planned(case, "100%").save(tmp_path / "plan.json")
    planned(case, "100%", device="H100-SXM").save(tmp_path / "h100.json")
    handle = reactivate.apply(case.model, Plan.load(tmp_path / "plan.json"))
    with nothing_told():
        case.step()
    shorter = case.args[0][:2]
    with pytest.warns(UserWarning, match=r"shape \(4, 64\), and the model is called with \(2, 64\).*was not predicted"):
        case.model(shorter)
    with nothing_told():
        case.model(shorter)
    handle.remove()
    other = OtherGPT(layers=2)
    reactivate.apply(other, Plan.load(tmp_path / "h100.json"))
    with pytest.warns(
        UserWarning,
        match="made for a GPT, and this is a OtherGPT; H100-SXM, and the model is on cpu. It predicts nothing",
    ) as told:
        other(*case.args)
    assert len(told) == 1
    with nothing_told():
        other(*case.args)


def test_the_plan_reaches_the_compiler() -> None:
    case = gpt(layers=2)
    case.model.eval()
    plan = planned(case, "60%", head="keep")
    case.step()
    expected = gradients_of(case.model)
    case.model.zero_grad()
    reactivate.apply(case.model, plan)
    compiled = torch.compile(case.model, backend="aot_eager")
    case.loss(compiled(*case.args)).backward()
    assert_all_bitwise(expected, gradients_of(case.model))


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_what_a_step_would_not_read_is_refused() -> None:
    case = gpt(layers=2)
    for given, words in (
        ({"args": case.args}, "so args= would not be read: leave out either step= or it"),
        (
            {"kwargs": {"x": 1}, "loss": Tensor.sum},
            "so kwargs= and loss= would not be read: leave out either step= or them",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            reactivate.plan(case.model, budget="60%", step=case.step, **given)


def test_an_optimizer_in_the_step_is_refused() -> None:
    case = gpt(layers=2)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1.0)
    before = {name: item.clone() for name, item in case.model.state_dict().items()}

    def step() -> None:
        case.step()
        optimizer.step()

    with pytest.raises(UsageError, match=r"it called SGD\.step"):
        reactivate.plan(case.model, budget="60%", step=step)
    assert_all_bitwise(before, dict(case.model.state_dict()))

    for parameter in case.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UsageError, match=r"a hook of the model or a parameter called SGD\.step"):
        planned(case, "60%")


def test_an_optimizer_of_another_model_is_refused() -> None:
    """As that of a model that was built anew: no state would be counted. One of a part of the parameters is none."""
    case = gpt(layers=2)
    others = torch.optim.AdamW(gpt(layers=2).model.parameters())
    with pytest.raises(UsageError, match="optimizer= has none of the parameters of the GPT"):
        planned(case, "60%", optimizer=others)
    some = list(case.model.parameters())[:2]
    part = planned(case, "100%", device="A100-40GB", optimizer=torch.optim.AdamW(some))
    assert part.fixed.optimizer == sum(2 * item.numel() * 4 + 4 for item in some)


def test_a_model_without_blocks_is_said_to_have_none() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    with pytest.raises(PlanInfeasible, match=r"The Sequential has no blocks, so a plan keeps .* nn\.Sequential\.$"):
        reactivate.plan(model, torch.randn(64, 8), budget="10%", loss=Tensor.sum)
    case = gpt(layers=2)
    with pytest.raises(PlanInfeasible) as caught:
        planned(case, "1%")
    assert "has no blocks" not in str(caught.value)


@pytest.mark.parametrize(("device", "message"), [(0, "no such device here"), ("gpu", "write 'cuda'")])
def test_a_device_that_torch_does_not_know_is_refused(device: Any, message: str) -> None:
    if torch.accelerator.current_accelerator() is not None:
        pytest.skip("for this build of torch, 0 is a device")
    with pytest.raises(UsageError, match=message):
        planned(gpt(layers=2), "100%", device=device)


def test_a_model_with_a_policy_is_planned_and_measured_without_it() -> None:
    case = gpt(layers=2)
    expected = planned(case)
    handle = reactivate.apply(case.model, reactivate.policies.full())
    plan = planned(case)
    # Not the candidates: times are measured, and two measurements may come to two plans of about the same time.
    units = [[(item.path, item.kind, item.parameters) for item in one.decisions] for one in (plan, expected)]
    assert units[0] == units[1] and plan.budget_bytes == expected.budget_bytes
    assert plan.plain.peak_bytes == expected.plain.peak_bytes
    assert reactivate.Handle.of(case.model) is handle
    assert abs(plan.measure().error) <= 0.01
    replaced = reactivate.apply(case.model, plan, replace=True)
    assert reactivate.Handle.of(case.model) is replaced
    assert abs(plan.measure().error) <= 0.01
    assert plan.at("100%").budget == "100%"
    assert reactivate.apply(case.model, plan) is replaced
    with pytest.raises(UsageError) as caught:
        reactivate.apply(case.model, plan.at("100%"))
    assert "replace=True" in str(caught.value) and "\n" not in str(caught.value)
    assert reactivate.Handle.of(case.model) is replaced


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


@each(
    ("loss", "message"),
    [
        (lambda out: out, "whose result is a scalar to go back from; got a Tensor of shape"),
        (lambda out: 3.0, "a scalar to go back from"),
        (lambda out: out.detach().sum(), r"the loss requires no gradient.*: the model or loss= detaches it"),
        (nn.CrossEntropyLoss(), r"'target'\)\. Write loss=lambda output: CrossEntropyLoss\(\)\(output, labels\)"),
        (nn.CrossEntropyLoss, r"'target'\)\. Write loss=lambda output: CrossEntropyLoss\(\)\(output, labels\)"),
        (F.mse_loss, r"'target'\)\. Write loss=lambda output: mse_loss\(output, labels\)"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, message: str) -> None:
    case = gpt(layers=2)
    with pytest.raises(UsageError, match=message):
        reactivate.plan(case.model, case.args, budget="60%", loss=loss)


def test_a_bare_number_may_have_been_meant_as_a_share_or_with_a_unit() -> None:
    model, x = nn.Linear(4, 4), torch.ones(1, 4)
    with pytest.raises(PlanInfeasible, match='A number alone is one of bytes: "40%" is a share, "40GiB" has a unit'):
        reactivate.plan(model, x, budget=40)
    with pytest.raises(PlanInfeasible) as caught:
        reactivate.plan(model, x, budget="40%")
    assert "A number alone" not in str(caught.value)


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


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module"):
        reactivate.plan(lambda x: x, torch.ones(1), budget="60%")  # type: ignore[arg-type]


def test_a_plan_for_fewer_layers_is_refused() -> None:
    """The layers that it does not know would be kept, and the budget broken."""

    def make(layers: int) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    plan = reactivate.plan(make(4), torch.randn(2, 8, 16), budget="60%")
    with pytest.raises(
        UsageError, match="6 blocks and other modules that contain modules, and the planned model had 4"
    ):
        reactivate.apply(make(6), plan)


def test_the_table_says_what_is_done_in_all_calls_of_a_layer() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                for layer in self.layers:
                    x = layer(x)
            return x

    plan = reactivate.plan(Shared(), torch.randn(8, 64, 32), budget="60%", device="H100-SXM")
    assert all(decision.held_bytes > 0 for decision in plan.decisions)
