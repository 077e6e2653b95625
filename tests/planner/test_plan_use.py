"""Use of a plan that is made: applied, measured, saved, loaded, copied with its model, and asked for another budget."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from journal import Journal
from plan_checks import assert_all_bitwise, assert_holds, gradients_of, planned
from plan_models import GPT, Case, gpt
from torch import nn

import reactivate
from reactivate.errors import UsageError
from reactivate.planner.cost.devices import find
from reactivate.planner.plan import Plan


@pytest.fixture(scope="module")
def three_blocks() -> tuple[Case, Plan]:
    """A model with its plan for 60%, for tests of what a plan can be used for."""
    case = gpt(layers=3)
    return case, planned(case, "60%")


def test_another_budget_does_not_look_at_the_model_again(three_blocks: tuple[Case, Plan]) -> None:
    case, plan = three_blocks
    runs = Journal()
    handle = case.model.blocks[0].register_forward_hook(lambda *_: runs.append(1))
    with reactivate.apply(case.model, plan):
        other = plan.at("60%")
    handle.remove()
    assert other.decisions == plan.decisions and not list(runs)


def test_real_and_fake_agree(three_blocks: tuple[Case, Plan]) -> None:
    case, real = three_blocks
    fake = planned(case, "60%", device=find("cpu"))
    assert not real.made_for.is_predicted and fake.made_for.is_predicted
    own = real.plain.peak_bytes - real.fixed.total
    assert abs(fake.plain.peak_bytes - real.plain.peak_bytes) <= 0.01 * own
    assert fake.fixed == real.fixed


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
