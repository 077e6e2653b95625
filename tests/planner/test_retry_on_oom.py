"""A step that runs out of memory runs again under a tighter plan: every bit is that of a step with enough memory."""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guard_cases
import numpy
import pytest
import torch
from journal import Journal
from oracle import assert_bitwise, random_states
from plan_models import GPT, loss_of, tokens
from ranks import errors_of, listed
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import Plan, policies
from reactivate._torch.modes import FakeTensor
from reactivate.errors import PlanInfeasible, UsageError


class Model(GPT):
    """With running statistics, a counter, a list, and a place where memory runs out."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.statistics = nn.BatchNorm1d(32)
        self.calls, self.seen = 0, []
        self.fails: Callable[[str], None] = _never

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(random.random() + numpy.random.rand())
        x = self.statistics(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2:
                self.fails("forward")
        if x.requires_grad:
            x.register_hook(lambda gradient: self.fails("backward"))
            self.blocks[1].mlp[1].weight
        return self.head(self.norm(x))


def _never(place: str) -> None:
    pass


class Failing:
    """Raises the error of an allocator, at one place, some times."""

    def __init__(self, place: str, times: int = 1, asked: str = "64.00 KiB") -> None:
        self.place, self.times, self.asked = place, times, asked
        self.failed = Journal()  # which is not put back

    def __call__(self, place: str) -> None:
        if place == self.place and len(self.failed) < self.times:
            self.failed.append(place)
            raise torch.OutOfMemoryError(f"Out of memory. Tried to allocate {self.asked}. The device has no more.")


@pytest.fixture(scope="module")
def planned() -> tuple[Model, Plan]:
    model = Model()
    return model, reactivate.plan(model, tokens(4, 64), budget="80%", loss=loss_of)


def trained(model: Model, wrap: Callable[[Any], Any], fails: Any = _never, fused: bool = False) -> dict[str, Any]:
    """Return all that two steps leave, each of two micro-batches; memory fails in the second one."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    optimizer.register_step_pre_hook(lambda *given: model.fails("optimizer begins"))

    @wrap
    def step(one: Tensor, two: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss_of(model(one)).backward()
        loss = loss_of(model(two))
        loss.backward()
        model.fails("before the optimizer")
        optimizer.step()
        model.fails("after the optimizer")
        return loss.detach()

    losses = []
    for place in (_never, fails):
        model.fails = place
        losses.append(step(tokens(4, 64), tokens(4, 63)))
    found: dict[str, Any] = {f"loss {index}": loss for index, loss in enumerate(losses)}
    found |= {f"gradient {name}": item.grad for name, item in model.named_parameters()}
    for index, entries in enumerate(optimizer.state.values()):
        found |= {f"state {index} {name}": value for name, value in entries.items()}
    found |= random_states()
    found |= model.state_dict()
    found["python"] = torch.tensor([random.random(), model.calls, *model.seen])
    return found


def guarded(**options: Any) -> Callable[[Any], Any]:
    return lambda step: reactivate.retry_on_oom(step, **options)


@pytest.fixture
def model(planned: tuple[Model, Plan]) -> Model:
    model = copy.deepcopy(planned[0])
    reactivate.apply(model, planned[1])
    return model


@pytest.fixture(scope="module")
def expected(planned: tuple[Model, Plan]) -> dict[str, Any]:
    return trained(copy.deepcopy(planned[0]), lambda step: step)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise(found[name], value, name)


def policy_of(model: nn.Module) -> Any:
    handle = reactivate.Handle.of(model)
    assert handle is not None
    return handle.policy


@pytest.mark.parametrize("place", ["forward", "backward", "before the optimizer", "optimizer begins"])
def test_every_bit_is_that_of_a_step_with_enough_memory(
    model: Model, planned: tuple[Model, Plan], expected: dict[str, Any], place: str
) -> None:
    with pytest.warns(UserWarning, match=r"ran out of memory \(it asked for 64.0 KiB more\)") as told:
        found = trained(model, guarded(), Failing(place))
    assert len([item for item in told if "ran out of memory" in str(item.message)]) == 1
    assert policy_of(model).predicted.peak_bytes <= planned[1].predicted.peak_bytes - 2**16
    assert_same(found, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_has_stepped_is_put_back_from_copies(
    model: Model, planned: tuple[Model, Plan], fused: bool
) -> None:
    expected = trained(copy.deepcopy(planned[0]), lambda step: step, fused=fused)
    with pytest.warns(UserWarning, match="ran out of memory"):
        found = trained(model, guarded(undo_optimizer=True), Failing("after the optimizer"), fused)
    assert_same(found, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_is_never_run_twice_without_copies(model: Model, fused: bool) -> None:
    fails = Failing("after the optimizer")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(model, guarded(), fails, fused)
    assert len(fails.failed) == 1
    assert "undo_optimizer=True" in said_in(caught.value)


def test_a_step_that_fails_again_has_a_plan_that_is_tighter_still(
    model: Model, planned: tuple[Model, Plan], expected: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match="ran out of memory"):
        found = trained(model, guarded(), Failing("backward", 3, "16.00 KiB"))
    assert policy_of(model).budget_bytes <= planned[1].predicted.peak_bytes - (1 + 2 + 4) * 2**14
    assert_same(found, expected)


def said_in(error: BaseException) -> str:
    return "".join([*getattr(error, "__notes__", ()), *map(str, error.args)])


def test_plans_go_down_to_the_least_and_then_the_error_is_raised_with_all_put_back(
    model: Model, planned: tuple[Model, Plan]
) -> None:
    with pytest.raises(PlanInfeasible) as infeasible:
        planned[1].at(1)

    @reactivate.retry_on_oom
    def step() -> None:
        loss_of(model(tokens(4, 64))).backward()

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, states = copy.deepcopy(model.state_dict()), random_states()
    model.fails = Failing("backward", 99, "16.00 KiB")
    with pytest.warns(UserWarning, match="ran out of memory"), pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    assert policy_of(model).budget_bytes == infeasible.value.least_bytes
    assert 3 <= len(model.fails.failed) <= 6
    assert "it has run" in said_in(caught.value) and "the last under the least plan" in said_in(caught.value)
    assert all(torch.equal(item.grad, torch.ones_like(item)) for item in model.parameters() if item.grad is not None)
    assert model.calls == len(model.seen) == 0
    assert_same(dict(model.state_dict()) | random_states(), dict(before) | states)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    assert "no plan takes less memory" in said_in(caught.value)


def test_a_plan_that_keeps_everything_is_tightened(planned: tuple[Model, Plan], expected: dict[str, Any]) -> None:
    model = copy.deepcopy(planned[0])
    plan = planned[1].at("1GiB")
    assert not any(decision.candidate.name != "keep" for decision in plan.decisions)
    reactivate.apply(model, plan)
    with pytest.warns(UserWarning, match="ran out of memory"):
        found = trained(model, guarded(), Failing("backward"))
    assert policy_of(model).predicted.peak_bytes < plan.predicted.peak_bytes
    assert_same(found, expected)


class Drawing(GPT):
    """Draws which of its layers run; more than a few need more memory than there is, in trials of a plan as well."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        self.least_kept = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        kept = 0
        for block in self.blocks:
            if torch.rand(()) < 0.6:
                kept += "forward" not in vars(block)
                x = block(x)
        if kept > self.least_kept and not isinstance(x, FakeTensor):
            raise torch.OutOfMemoryError("Out of memory. Tried to allocate 128.00 KiB. The device has no more.")
        return self.head(self.norm(x))


def test_a_step_that_draws_which_layers_run() -> None:
    """Plans for other budgets are made for the draw of the profile, whatever is drawn by then."""
    model, losses = Drawing(), []
    torch.manual_seed(3)
    model.least_kept = 6
    plan = reactivate.plan(model, tokens(4, 64), budget="1GiB", loss=loss_of)
    plain = copy.deepcopy(model)
    assert 0 < len(plan.decisions) < 6
    for trained, limit, wrap in ((plain, 6, lambda step: step), (model, 1, reactivate.retry_on_oom)):
        trained.least_kept = limit
        torch.manual_seed(0)
        if trained is model:
            reactivate.apply(model, plan)

        @wrap
        def step(trained: nn.Module = trained) -> Tensor:
            loss = loss_of(trained(tokens(4, 64)))
            loss.backward()
            return loss.detach()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append([step() for _ in range(8)])
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    for parameter, other in zip(plain.parameters(), model.parameters()):
        assert_bitwise(other.grad, parameter.grad, "gradient")
    assert policy_of(model).budget_bytes < plan.plain.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("undo_optimizer", [False, True])
def test_parameters_that_the_step_itself_writes_to_without_a_trace(
    model: Model, undo_optimizer: bool, dtype: torch.dtype
) -> None:
    written = model.scale = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        written.data.mul_(0.5)
        loss_of(model(tokens(4, 64))).backward()
        optimizer.step()
        model.fails("after the optimizer" if undo_optimizer else "before the optimizer")

    model.fails = Failing("after the optimizer" if undo_optimizer else "backward")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        reactivate.retry_on_oom(step, undo_optimizer=undo_optimizer)()
    assert "the step had changed tensors in a way that leaves no trace" in said_in(caught.value)


@each(
    "write",
    [
        lambda average: average.data.mul_(0.9),
        lambda average: numpy.multiply(average.numpy(), 0.9, out=average.numpy()),
        lambda average: None,
    ],
)
def test_other_tensors_that_the_step_writes_to_without_a_trace(write: Callable[[Tensor], Any]) -> None:
    model, average = Model(), torch.ones(20_000)
    reactivate.apply(model, reactivate.plan(model, tokens(4, 64), budget="80%", loss=loss_of))

    @reactivate.retry_on_oom
    def step() -> None:
        write(average)
        loss_of(model(tokens(4, 64))).backward()

    model.fails = Failing("backward")
    if write(torch.ones(3)) is None:
        with pytest.warns(UserWarning, match="ran out of memory"):
            step()
        return
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    assert "the step had changed tensors in a way that leaves no trace" in said_in(caught.value)


def test_the_tensors_of_a_failed_step_are_gone_before_it_is_planned_again() -> None:
    model, references, alive = Model(), Journal(), Journal()
    reactivate.apply(model, reactivate.plan(model, tokens(4, 64), budget="80%", loss=loss_of))

    def look(module: nn.Module, args: Any) -> None:
        alive.append([reference() is not None for reference in references])

    @reactivate.retry_on_oom
    def step() -> None:
        logits = model(tokens(4, 64))
        references.append(weakref.ref(logits))
        loss_of(logits).backward()

    model.fails = Failing("backward")
    handle = model.register_forward_pre_hook(look)
    with pytest.warns(UserWarning, match="ran out of memory"):
        step()
    handle.remove()
    assert len(alive) > 3 and not any(any(found) for found in alive)


def test_other_errors_are_the_steps_own(model: Model) -> None:
    @reactivate.retry_on_oom
    def step() -> None:
        model(tokens(4, 64))
        raise RuntimeError("of the step")

    with pytest.raises(RuntimeError, match="of the step"):
        step()
    assert model.calls == 1


def test_an_adaptive_plan_is_tightened_for_all_shapes() -> None:
    model = Model()
    plan = reactivate.plan(model, tokens(4, 64), budget="60%", loss=loss_of, shapes="adaptive")
    expected = trained(copy.deepcopy(model), lambda step: step)
    reactivate.apply(model, plan)
    with pytest.warns(UserWarning, match="ran out of memory"):
        found = trained(model, guarded(), Failing("backward"))
    assert policy_of(model).budget_bytes < plan.budget_bytes
    assert all(one.peak_bytes <= policy_of(model).budget_bytes for one in policy_of(model).classes)
    assert_same(found, expected)


def test_memory_that_runs_out_while_a_shape_is_planned() -> None:
    """Take it for the step's own shortage: neither for an error about shapes, nor for the end."""
    model = Model()
    plan = reactivate.plan(model, tokens(4, 64), budget="60%", loss=loss_of, shapes="adaptive")
    plain = copy.deepcopy(model)
    reactivate.apply(model, plan)
    fails = Failing("forward")

    def fails_on_fakes(place: str) -> None:
        if any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            fails(place)

    model.fails = fails_on_fakes
    for trained, wrap in ((plain, lambda step: step), (model, reactivate.retry_on_oom)):
        torch.manual_seed(0)
        step = wrap(lambda trained=trained: loss_of(trained(tokens(4, 48))).backward())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step()
    assert len(fails.failed) == 1
    for parameter, other in zip(plain.parameters(), model.parameters()):
        assert_bitwise(other.grad, parameter.grad, "gradient")


def test_memory_that_runs_out_while_a_tighter_plan_is_made(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise what the step has raised, and say that there was no memory for a plan."""

    def short(plan: Plan, budget: object) -> Plan:
        raise torch.OutOfMemoryError("Out of memory. Tried to allocate 1.00 GiB.")

    monkeypatch.setattr(Plan, "at", short)
    before, states = copy.deepcopy(model.state_dict()), random_states()
    model.fails = Failing("backward", asked="16.00 KiB")
    with pytest.raises(torch.OutOfMemoryError, match=r"16\.00 KiB") as caught:
        reactivate.retry_on_oom(lambda: loss_of(model(tokens(4, 64))).backward())()
    assert "memory ran out while a tighter plan was made, too" in said_in(caught.value)
    assert_same(dict(model.state_dict()) | random_states(), dict(before) | states)


def test_what_is_refused(planned: tuple[Model, Plan], tmp_path: Path) -> None:
    plain, batch = copy.deepcopy(planned[0]), tokens(4, 64)
    step = reactivate.retry_on_oom(lambda: plain(batch))
    with pytest.raises(UsageError, match="policies found are: none"):
        step()
    with reactivate.apply(plain, policies.full()), pytest.raises(UsageError, match=r"full\(\)"):
        step()
    planned[1].save(tmp_path / "plan.json")
    with reactivate.apply(plain, Plan.load(tmp_path / "plan.json")), pytest.raises(UsageError, match="from a file"):
        step()
    with pytest.raises(UsageError, match="takes a function"):
        reactivate.retry_on_oom(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", listed(guard_cases.CASES))
def test_ranks_that_run_a_step_together(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("guard_cases", name, tmp_path_factory)
