"""Spans of a long `Sequential` in plans: which are offered, what they come to, and budgets below those of blocks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_models import Case, peak_with
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by
from reactivate._region.region import Region
from reactivate.errors import UsageError
from reactivate.planner.candidates import FULL, Assignment
from reactivate.planner.plan import Plan
from reactivate.planner.planner import Planner
from reactivate.planner.step import TrainingStep
from reactivate.planner.target import find_target


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width)
        self.down, self.dropout = nn.Conv2d(width, width, 3, 1, 1), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.norm(self.up(x)))))


class Net(nn.Module):
    """A stem, blocks in one list, and a head."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers, self.head = nn.Conv2d(3, 8, 3, 1, 1), layers, nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class Looped(Net):
    """A loop of the user's calls the members."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for member in self:
            x = member(x) * 1.5
        return x


def blocks(count: int) -> list[nn.Module]:
    return [Block() for _ in range(count)]


def images(make: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    return Case(make(), (torch.randn(4, 3, 16, 16),), loss=lambda out: out.square().sum())


def long(count: int = 16) -> Case:
    return images(lambda: Net(nn.Sequential(*blocks(count))))


def among_others() -> Case:
    """Blocks between layers that are none, in the model itself."""
    stem, head = nn.Conv2d(3, 8, 3, 1, 1), [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return images(lambda: nn.Sequential(stem, *blocks(2), nn.ReLU(), *blocks(2), *head))


def stages() -> Case:
    return images(lambda: Net(nn.Sequential(*(nn.Sequential(*blocks(2)) for _ in range(4)))))


def before_a_large_head() -> Case:
    """The last span is followed by more memory than any other."""
    return images(lambda: nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 1), *blocks(8)), nn.Conv2d(8, 256, 1), nn.Tanh()))


def planner_of(case: Case) -> Planner:
    """Return what plans a step on the device of a table: its times depend on nothing that runs here."""
    step = TrainingStep(case.model, case.args, case.kwargs, case.loss)
    place = find_target(case.model, case.args, case.kwargs, "H100-SXM")
    return Planner(step, place, None, lambda text: None).prepare()


def offered_in(case: Case) -> set[str]:
    return {entry.span for span in planner_of(case).table.spans for entry in span.options}


def test_spans_are_powers_of_two() -> None:
    found = {"[0:2]", "[2:4]", "[4:6]", "[6:8]", "[8:10]", "[0:4]", "[4:8]", "[0:8]"}
    assert offered_in(long(10)) == {f"layers{span}" for span in found}


def test_members_between_units_are_in_the_span() -> None:
    assert offered_in(among_others()) == {"[1:3]", "[4:6]"}
    between = images(lambda: Net(nn.Sequential(Block(), nn.ReLU(), Block(), nn.ReLU(), Block())))
    assert offered_in(between) == {"layers[0:3]"}


def test_members_may_be_stages() -> None:
    assert offered_in(stages()) == {*(f"layers.{number}" for number in range(4)), "layers[0:2]", "layers[2:4]"}


class Shared(nn.Module):
    """A `Sequential` one of whose members is called once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*blocks(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.layers(x.repeat(1, 3, 1, 1)[:, :8]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Looped(nn.ModuleList(blocks(4))),
        lambda: Looped(nn.Sequential(*blocks(4))),
        lambda: Net(Own(*blocks(4))),
        lambda: Net(nn.Sequential(*blocks(2))),
    ],
)
def test_where_nothing_calls_several_members_no_span_is_offered(make: Callable[[], nn.Module]) -> None:
    assert offered_in(images(make)) == set()


def test_a_member_that_is_called_elsewhere_too_is_in_no_span() -> None:
    assert offered_in(images(Shared)) == {"layers[1:3]", "layers[3:5]", "layers[1:5]"}


@pytest.mark.parametrize("make", [functools.partial(long, 8), among_others, stages, before_a_large_head])
def test_spans_come_to_what_their_step_does(make: Callable[[], Case]) -> None:
    """Though most have the figures of another span, which is equal."""
    planner = planner_of(make())
    table, keep = planner.table, planner.search.chain.menus
    for span in table.spans:
        stop = span.start + len(span.options)
        entries = [*(menu[0] for menu in keep[: span.start]), *span.options, *(menu[0] for menu in keep[stop:])]
        promised = planner.search.chain.solution_of(entries)
        (path,) = {entry.span for entry in span.options}
        candidate = next(item for item in planner.all_menus[path] if item.name == span.options[0].name)
        trace, reading = planner.attempt({path: candidate})
        assert sum(call.regions for call in reading.calls) == len(candidate.recompute)
        assert promised.peak_bytes >= trace.peak_bytes, "never less than it is"
        assert promised.peak_bytes - trace.peak_bytes <= 0.02 * planner.plain.peak_bytes


def test_what_lies_behind_a_span_is_not_in_it() -> None:
    """The last span is one of those whose figures others have."""
    table = planner_of(before_a_large_head()).table
    most = max(entry.need_bytes for span in table.spans for entry in span.options)
    assert 2 * most < table.plain.outside_bytes[-1]


def test_equal_spans_are_tried_once() -> None:
    """Of 16 blocks: four steps for spans of 2, 4 and 8 members, each recomputed as a whole and nested."""
    planner = planner_of(long())
    tried = []
    attempt = planner.attempt
    planner.attempt = lambda *args: (tried.append(args[0]), attempt(*args))[1]  # type: ignore[method-assign, misc]
    planner.tabulate()
    assert len(planner.table.spans) == 2 * (8 + 4 + 2)
    assert sum(any("[" in path for path in candidates) for candidates in tried) == 4


@pytest.fixture(scope="module")
def planned() -> tuple[Case, Plan]:
    case = long()
    return case, reactivate.plan(case.model, case.args, case.kwargs, budget="100%", loss=case.loss)


@pytest.mark.parametrize("budget", ["60%", "40%", "30%", "least"])
def test_plans_with_spans_keep_their_budgets(planned: tuple[Case, Plan], budget: str) -> None:
    """Proved by a step, measured in a real one, bitwise with dropout and buffers, in a file and in a copy of the model."""
    case, first = planned
    plan = first.at(budget) if budget != "least" else least_of(first)
    own = first.plain.peak_bytes - first.fixed.total
    peak = peak_with(case, plan)
    assert plan.fixed.total + peak <= plan.budget_bytes
    assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.02 * own
    spans = [decision.path for decision in plan.decisions if "[" in decision.path]
    assert spans
    again = Plan.from_json(plan.to_json())
    assert again == plan
    verdict = reactivate.verify(case.model, case.args, policy=again)
    regions = sum(len(decision.candidate.recompute) for decision in plan.decisions)
    assert verdict.is_same and regions <= verdict.regions
    with reactivate.apply(case.model, plan) as handle:
        assert set(spans) <= set(handle.regions)
        twin = copy.deepcopy(case.model)
        torch.manual_seed(0)
        twin(*case.args).sum().backward()
    torch.manual_seed(0)
    case.model(*case.args).sum().backward()
    pairs = list(zip(case.model.named_parameters(), twin.parameters(), strict=True))
    assert all(one.grad is not None and other.grad is not None for (_, one), other in pairs)
    assert all(torch.equal(one.grad, other.grad) for (_, one), other in pairs)  # type: ignore[arg-type]
    case.model.zero_grad()


def least_of(plan: Plan) -> Plan:
    with pytest.raises(reactivate.errors.PlanInfeasible) as raised:
        plan.at("1%")
    return plan.at(raised.value.least_bytes)


def test_spans_make_smaller_budgets_feasible(planned: tuple[Case, Plan]) -> None:
    """Below what plans of single blocks can hold, measured."""
    case, first = planned
    planner = planner_of(case)
    least = planner.smallest_bytes()
    planner.table.spans.clear()
    own = planner.plain.peak_bytes
    assert planner.smallest_bytes() - least > 0.1 * own
    recomputed = reactivate.plan(case.model, case.args, case.kwargs, budget="100%", loss=case.loss).policies
    full = next(point for point in recomputed if "full()" in point.label)
    # By how much depends on what a convolution of this release takes for itself, in real steps.
    assert first.fixed.total + peak_with(case, least_of(first)) < full.peak_bytes - 0.05 * own


def test_a_plan_in_words(planned: tuple[Case, Plan]) -> None:
    """Equal spans are one row, whatever their regions inside are called."""
    plan = least_of(planned[1])
    rows = [line.split()[0] for line in str(plan).splitlines() if line.strip().startswith("layers")]
    assert any("…layers[" in row for row in rows)
    explained = reactivate.compare(planned[0].model, planned[0].args, policy=plan)
    around = {change.path: change.action for change in explained.changes}
    spans = [path for path in around if "[" in path]
    assert spans and all(around[path] == "recompute" for path in spans)
    assert around["layers.0"] == f"inside of {spans[0]}"
    assert type(explained).from_json(explained.to_json()).changes == explained.changes


def test_a_choice_of_another_rank_may_have_spans() -> None:
    planner = planner_of(long(8))
    search = planner.search
    found = search.smallest()
    assert any("[" in path for path in found.candidates)
    assert search.prove(found.names).candidates == found.candidates


def test_a_plan_is_refused_where_the_sequential_has_a_forward_of_its_own(planned: tuple[Case, Plan]) -> None:
    with pytest.raises(UsageError, match=r"it has no 'layers\["):
        reactivate.apply(Net(Own(*blocks(16))), least_of(planned[1]))
    with pytest.raises(UsageError):
        reactivate.apply(Net(nn.Sequential(*blocks(15))), least_of(planned[1]))


def test_other_lists_of_that_name_are_let_be() -> None:
    """The spans of a plan are those at their paths: another list whose path ends alike is none of its business."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*blocks(8))
            self.side = nn.ModuleDict({"layers": nn.ModuleList(blocks(8))})
            self.head = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Any:
            x = self.layers(x.repeat(1, 3, 1, 1)[:, :8])
            for layer in self.side["layers"]:  # type: ignore[union-attr]
                x = layer(x)
            return self.head(x.mean((2, 3)))

    case = images(Two)
    verdict = reactivate.verify(case.model, case.args, policy=Assignment({"layers[0:4]": FULL}))
    assert verdict.is_same and verdict.regions == 1


class Again(nn.Sequential):
    """A model that is a `Sequential`, one of whose members is there twice."""

    def __init__(self) -> None:
        shared = Block()
        super().__init__(*blocks(2), shared, *blocks(2), shared, nn.Flatten(), nn.Linear(8 * 16, 10))


def test_beside_a_layer_that_is_called_twice() -> None:
    torch.manual_seed(0)
    case = Case(Again(), (torch.randn(4, 8, 4, 4),))
    policy = Assignment({"[0:2]": FULL, "2": FULL, "[3:5]": FULL})
    verdict = reactivate.verify(case.model, case.args, policy=policy)
    assert verdict.is_same and verdict.regions == 4
    twin = copy.deepcopy(case.model)
    with reactivate.apply(twin, policy) as handle:
        assert handle.regions == ("[0:2]", "[3:5]", "2")
        assert reactivate.apply(twin, policy) is handle
    handle.remove()
    assert all("forward" not in vars(module) for module in twin.modules())


def test_plans_of_batches_of_all_shapes() -> None:
    """Each class of shapes has spans of its own, or none."""
    case = long(8)
    plan = reactivate.plan(case.model, case.args, budget="35%", loss=case.loss, shapes="adaptive")
    plain = copy.deepcopy(case.model)
    regions = []
    with reactivate.apply(case.model, plan):
        for size in (4, 1, 3, 4):
            images = torch.randn(size, 3, 16, 16)
            for model in (plain, case.model):
                counted = Regions()
                torch.manual_seed(1)
                with observed_by(counted):
                    model(images).square().sum().backward()
            regions.append(counted.names)
    pairs = zip(plain.state_dict().values(), case.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    pairs = zip(plain.parameters(), case.model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    assert any("[" in name for name in regions[0]) and regions[0] == regions[3]
    assert not regions[1]


class Regions:
    """The names of the regions whose forwards run inside of the context."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def forward_done(self, region: Region) -> None:
        self.names.append(region.options.name or "")

    def recomputation_done(self, region: Region) -> None:
        """Nothing is noted."""
