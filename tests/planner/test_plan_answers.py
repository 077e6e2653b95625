"""Steps that need values are simulated with those of one real step: the same ops, the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from journal import Journal
from plan_models import Mixture
from test_plan_values import MODELS, made, peak_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import reactivate
from reactivate.errors import UnsupportedError
from reactivate.planner import simulator
from reactivate.planner.candidates import FULL, KEEP, Assignment, Candidate, list_candidates
from reactivate.planner.cost.op_costs import RooflineCosts
from reactivate.planner.plan import Plan
from reactivate.planner.simulator import simulate
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import find_target
from reactivate.planner.trace import tracer
from reactivate.planner.trace.answers import RealAnswers
from reactivate.planner.trace.records import Trace
from reactivate.planner.trace.value_names import ValueNames
from reactivate.planner.units import find_units

Run = Callable[..., Trace]


def steps_of(model: nn.Module, x: Tensor) -> tuple[Run, list[str]]:
    """Return what runs a step with candidates, and the paths of its units."""
    step, units = TrainingStep(model, (x,)), find_units(model)
    place = find_target(model, (x,), {}, None)
    costs = RooflineCosts(place.spec, place.rounding)

    def run(candidates: dict[str, Candidate], **options: Any) -> Trace:
        return simulate(step, Assignment(candidates), units, costs, place.device, **options)

    return run, list(units)


def bytes_of(trace: Trace) -> list[tuple[str, bool, int, int]]:
    return [(op.name, op.is_recomputation, op.top_bytes, op.live_bytes) for op in trace.ops]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("least", [False, True], ids=["from a plain step", "from one that recomputes all"])
def test_a_simulated_step_is_the_real_one(name: str, least: bool) -> None:
    run, paths = steps_of(*made(name))
    with pytest.raises(Exception, match="aten|DataDependent"):
        run({})
    answers = RealAnswers()
    run(dict.fromkeys(paths, FULL) if least else {}, is_real=True, answers=answers)
    assert not answers.are_used
    half = dict.fromkeys(paths[::2], FULL)
    for candidates in ({}, dict.fromkeys(paths, FULL), half):
        real = run(candidates, is_real=True)
        fake = run(candidates, answers=answers)
        assert bytes_of(fake) == bytes_of(real)
        assert any(op.is_recomputation for op in fake.ops) == bool(candidates)
    assert answers.are_used


class Reading(nn.Module):
    """Reads lists and numbers, of what it has computed and written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x).relu()
        sizes = torch.stack([(x.detach() > limit).any(-1).sum() for limit in (0.0, 1.0)])
        sizes[1] += 1
        one, two = sizes.tolist()
        rows = x[: max(1, min(one, two))]
        return torch.cat([x, rows.sin()])[: len(x)]


class Readers(nn.Module):
    """Reads an array, as a loss does that matches boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reading() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        array = (x.detach() > 0).sum(0).numpy()
        return x[: int(array.max())]


def test_what_python_reads() -> None:
    torch.manual_seed(0)
    run, paths = steps_of(Readers(), torch.randn(64, 16))
    answers = RealAnswers()
    run({}, is_real=True, answers=answers)
    for candidates in ({}, dict.fromkeys(paths, FULL)):
        real = run(
            candidates, is_real=True, answers=RealAnswers()
        )  # which reads lists item by item, as fake tensors do
        fake = run(candidates, answers=answers)
        assert fake.peak_bytes == real.peak_bytes
        assert any(op.is_recomputation for op in fake.ops) == bool(candidates)
    assert answers.are_used


class KeptArray(nn.Module):
    """Has an array while its blocks run: the memory of the tensor that it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_().sin()
        array = x.detach().double().numpy()
        for block in self.blocks:
            x = block(x)
        return x * float(array.mean())


def test_an_array_keeps_its_memory() -> None:
    torch.manual_seed(0)
    run, _ = steps_of(KeptArray(), torch.randn(64, 16))
    answers = RealAnswers()
    run({}, is_real=True, answers=answers)
    real, fake = (run({}, is_real=True), run({}, answers=answers))
    assert [op for op in bytes_of(fake) if op[0] != "detach"] == [op for op in bytes_of(real) if op[0] != "detach"]


class MaskedAligned(nn.Module):
    """Its backward needs values where fake gradients of `ctc_loss` lie in another order than real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.empty = nn.Linear(32, 32), nn.Linear(32, 32), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[h[..., 0] > 0] = self.empty
        h = self.second(h)
        targets = torch.arange(1, 5).expand(len(x), 4)
        lengths = torch.full((len(x),), 4)
        return F.ctc_loss(h.log_softmax(-1).transpose(0, 1), targets, torch.full_like(lengths, x.shape[1]), lengths)


def test_strides_are_those_of_real_results() -> None:
    torch.manual_seed(0)
    run, _ = steps_of(MaskedAligned(), torch.randn(8, 64, 32))
    answers = RealAnswers()
    run({}, is_real=True, answers=answers)
    assert run({}, answers=answers).peak_bytes == run({}, is_real=True).peak_bytes


def test_what_returns_its_argument_has_no_answer() -> None:
    """A tensor of its own in the place of the argument would be another memory."""
    library = torch.library.Library("reactivate_answers", "FRAGMENT")
    library.define("touch(Tensor(a!) x) -> Tensor(a!)")
    library.impl("touch", lambda x: x.add_(1), "CPU")

    class Touching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = torch.ops.reactivate_answers.touch(x.detach() * self.weight[0, 0])
            return super().forward(x) + y

    run, _ = steps_of(nn.Sequential(Touching(16, 16), nn.Linear(16, 16)), torch.randn(64, 16))
    answers = RealAnswers()
    run({}, is_real=True, answers=answers)
    with pytest.raises(Exception, match="touch"):
        run({}, answers=answers)


def test_saved_calls_leave_the_others_their_answers() -> None:
    """A recomputation does not make the calls that are saved."""
    model, x = made("experts")
    run, paths = steps_of(model, x)
    answers = RealAnswers()
    plain = run({}, is_real=True, answers=answers, count_functions=True)
    functions = frozenset(plain.calls[0][0].functions)
    seen = 0
    for candidate in list_candidates(model.get_submodule(paths[0]), functions):
        if candidate in (KEEP, FULL):
            continue
        candidates = dict.fromkeys(paths, candidate)
        assert bytes_of(run(candidates, answers=answers)) == bytes_of(run(candidates, is_real=True))
        seen += 1
    assert seen >= 2


class Twice(nn.Module):
    """Two draws that nothing tells apart but their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + sum(len(torch.nonzero(torch.rand_like(x) > 0.5)) for _ in range(2))
        for block in self.blocks:
            x = block(x)
        return x


def test_draws_that_are_not_told_apart_have_no_answer() -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(64, 16)
    run, _ = steps_of(model, x)
    answers = RealAnswers()
    run({}, is_real=True, answers=answers)
    with pytest.raises(Exception, match="nonzero"):
        run({}, answers=answers)
    plan = reactivate.plan(model, x, budget=10**6)
    assert plan.proof.method == "real" and plan.proof.margin_bytes


def test_another_value_has_another_name() -> None:
    x = torch.randn(4, 6)
    names = ValueNames({}, [x])
    seen: dict[int, str] = {}
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.aten.sum.dim_IntList, (x, [-1])),
        (torch.ops.aten.sum.dim_IntList, (x, [-2])),
        (torch.ops.aten.add.Tensor, (x, 1)),
        (torch.ops.aten.add.Tensor, (x, 1.0)),
        (torch.ops.aten.add.Tensor, (x, True)),
        (torch.ops.aten.add.Tensor, (x, x)),
        (torch.ops.aten.add.Tensor, (x, x.t().reshape(4, 6))),
        (torch.ops.aten.relu.default, (x,)),
        (torch.ops.aten.relu.default, (x[:, 1:],)),
        (torch.ops.aten.relu.default, (x.clone(),)),
        (torch.ops.aten.index.Tensor, (x, [None, torch.tensor([1])])),
        (torch.ops.aten.index.Tensor, (x, [torch.tensor([1]), None])),
        (torch.ops.aten.index.Tensor, (x, [torch.tensor([2]), None])),
    ]
    for op, args in calls:
        name = names.call(op, args, {})
        assert name not in seen, (op, args, seen[name])
        assert names.call(op, args, {}) == name
        seen[name] = str((op, args))


def test_writing_changes_the_name_of_all_that_shares_the_memory() -> None:
    x = torch.randn(4, 6)
    names = ValueNames({}, [x])
    view, before = x[1:], names.of(x)

    def call(op: Any, *args: Any) -> Tensor:
        number = names.call(op, args, {})
        result = op(*args)
        names.made(number, op, args, {}, result)
        return result

    copy = call(torch.ops.aten.clone.default, x)
    assert names.of(copy) == before
    of_view = names.of(view)
    call(torch.ops.aten.add_.Tensor, x[:1], 1)
    written = names.of(x)
    assert written != before and names.of(view) != of_view and names.of(copy) == before
    call(torch.ops.aten.add_.Tensor, x[:1], 2)
    assert names.of(x) not in (before, written)
    call(torch.ops.aten.copy_.default, x, copy)  # as a recomputation puts back what was written
    assert names.of(x) == before and names.of(view) == of_view
    call(torch.ops.aten.copy_.default, x[0], x[1])
    assert names.of(x) != before


def test_outputs_have_the_names_of_what_is_written() -> None:
    """As parameters do that are gathered again into the same memory; a part of a memory leaves the rest of it."""
    x = torch.randn(4)
    names, room = ValueNames({}, [x]), torch.empty(8)
    add = torch.ops.aten.add.out

    def written(out: Tensor, number: int) -> int:
        call = names.call(add, (x, number), {"out": out})
        names.made(call, add, (x, number), {"out": out}, add(x, number, out=out))
        return names.of(out if out.numel() == 4 and out.untyped_storage().nbytes() == 16 else room)

    whole = torch.empty(4)
    assert written(whole, 1) == (again := written(whole, 1)) != written(whole, 2) != again
    parts = [written(room[:4], 1), written(room[4:], 1), written(room[:4], 2), written(room[4:], 1)]
    assert len(set(parts)) == 4


# -- plans ------------------------------------------------------------------------------------------------------------


def planned_with(model: nn.Module, x: Tensor, **options: Any) -> tuple[Plan, Counter[bool]]:
    """The plan, and how many forwards ran on fake tensors (True) and for real."""
    runs = Journal()

    def count(module: Any, args: Any, output: Tensor) -> None:
        runs.append(isinstance(output.detach(), FakeTensor))

    handle = model.register_forward_hook(count)
    plan = reactivate.plan(model, x, **options)
    handle.remove()
    return plan, Counter(runs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("why", ["large", "slow"])
def test_plans_of_large_and_slow_steps(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    """A plain step that does not fit is not run; one that takes long runs a few times."""
    model, x = made(name)
    if why == "slow":
        monkeypatch.setattr(simulator, "time_call", lambda run, device: (run(), 1e9)[1])
    else:
        run, paths = steps_of(model, x)
        plain, least = (run(item, is_real=True).peak_bytes for item in ({}, dict.fromkeys(paths, FULL)))
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        free = int(((plain + least) / 2 + gradients) / (1 - simulator.RESERVE))
        monkeypatch.setattr(simulator, "available_bytes", lambda device: free)
    plan, counts = planned_with(model, x, budget="50%")
    assert plan.proof.method == "simulated" and plan.proof.margin_bytes and counts[True] > 4
    monkeypatch.undo()
    peak = peak_of(model, x, plan)
    assert plan.fixed.total + peak + plan.proof.margin_bytes <= plan.budget_bytes
    verdict = reactivate.verify(model, x, policy=plan)
    assert verdict.is_same and verdict.regions > 0, verdict


def test_a_step_that_fits_in_no_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made("experts")
    monkeypatch.setattr(simulator, "available_bytes", lambda device: 1_000_000)
    with pytest.raises(
        UnsupportedError, match=r"needs more than the .* that are free on cpu. Plan it with a smaller batch"
    ):
        reactivate.plan(model, x, budget="50%")


class Counting(nn.Module):
    """Reads a buffer that it writes: a recomputation finds it put back, by nothing that has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = x.tanh() if self.calls.max().item() > 2 else x
        return x + self.down(self.up(h).relu())


class Masked(nn.Module):
    """Depends on the values of dropout, whose recomputation is made of bits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(x)
        h = h + h[h[:, 0] > 0].mean(0)
        return x + self.down(self.up(h).relu())


class Array(nn.Module):
    """Reads an array inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down((self.up(x) * float(x.detach()[:1].numpy().mean())).relu())


@pytest.mark.parametrize("kind", [Counting, Masked, Array])
def test_a_policy_that_lacks_an_answer_is_tried_for_real(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]
) -> None:
    monkeypatch.setattr(simulator, "time_call", lambda run, device: (run(), 1e9)[1])
    torch.manual_seed(0)
    model, x = nn.Sequential(*(kind() for _ in range(3))), torch.randn(512, 32)
    for device in (None, "H100-SXM"):
        plan, counts = planned_with(model, x, budget="75%", device=device)
        assert counts[True] and counts[False] and plan.proof.margin_bytes
        verdict = reactivate.verify(model, x, policy=plan)
        assert verdict.is_same and verdict.regions > 0, verdict
    plan = reactivate.plan(model, x, budget="75%")
    assert plan.fixed.total + peak_of(model, x, plan) + plan.proof.margin_bytes <= plan.budget_bytes


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("experts", {}, 0),  # beside the real step, to learn whether sizes depend on the data
        ("experts", {"device": "H100-SXM"}, 0),  # alone
        ("experts", {"device": "H100-SXM"}, 1),  # with the values of the real step
        ("experts", {"device": "H100-SXM"}, 3),  # a policy
    ],
)
def test_an_error_of_our_own_is_not_one_for_the_want_of_values(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], steps: int
) -> None:
    seen = Journal()
    enter = tracer._Tracer._enter

    def broken(self: Any, tensor: Tensor, *rest: Any) -> None:
        if isinstance(tensor, FakeTensor):
            if not any(item is self for item in seen):
                seen.append(self)
            if len(seen) > steps:
                raise AttributeError("of our own")
        enter(self, tensor, *rest)

    monkeypatch.setattr(tracer._Tracer, "_enter", broken)
    model, x = made(name)
    with pytest.raises(AttributeError, match="of our own"):
        reactivate.plan(model, x, budget="60%", **options)


class Printing(nn.Module):
    """Writes a number into a text, which torch refuses for fake tensors with a `TypeError`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Masked() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        self.said = f"{x.mean():.2f}"
        return x


def test_a_step_that_prints_a_number_is_planned() -> None:
    torch.manual_seed(0)
    model, x = Printing(), torch.randn(512, 32)
    plan = reactivate.plan(model, x, budget="75%", device="H100-SXM")
    assert plan.proof.method == "real"
    verdict = reactivate.verify(model, x, policy=plan)
    assert verdict.is_same and verdict.regions > 0, verdict


def test_for_a_device_that_is_not_here() -> None:
    model, x = made("experts")
    plan, counts = planned_with(model, x, budget="60%", device="H100-SXM")
    assert plan.made_for.is_predicted and plan.proof.method == "simulated" and plan.proof.margin_bytes
    assert counts[False] == 1  # which gives the values
    verdict = reactivate.verify(model, x, policy=plan)
    assert verdict.is_same and verdict.regions > 0, verdict


def test_batches_of_other_lengths() -> None:
    """Each class of shapes has a plan, from the values of its first batch."""
    model, x = made("experts")
    plan = reactivate.plan(model, x, budget="60%", shapes="adaptive")
    other = Mixture()
    other.load_state_dict(model.state_dict())
    handle = reactivate.apply(model, plan)
    for length in (64, 40, 64, 40, 8):
        batch, results = torch.randn(8, length, 32), []
        for each in (model, other):
            torch.manual_seed(length)
            each.zero_grad()
            each(batch).sum().backward()
            results.append([parameter.grad.clone() for parameter in each.parameters()])
        assert all(map(torch.equal, *results)), length
    handle.remove()
    long, middle, short = plan.classes
    assert long.recomputed and middle.recomputed and not short.recomputed


def test_batches_of_other_lengths_have_a_margin() -> None:
    model, x = made("experts")
    short = x[:, :40]
    plain_bytes = reactivate.plan(model, short, budget="90%").plain.peak_bytes
    plan = reactivate.plan(model, x, budget=int(plain_bytes * 1.01), shapes="adaptive")
    with reactivate.apply(model, plan):
        model(short)
    assert plan.classes[-1].recomputed
