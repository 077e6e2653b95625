"""Plans whose loss is computed by rows: found without help, as small as was said, every bit as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import allocated_by
from oracle import assert_bitwise
from plan_models import GPT, Case, unet
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate._loss.logits import Logits
from reactivate.errors import PlanInfeasible, UnsupportedError, UsageError
from reactivate.planner import simulator
from reactivate.planner.candidates import BY_ROWS
from reactivate.planner.plan import Plan

CLASSES = 1500


def wide(dtype: torch.dtype = torch.float32) -> Case:
    """A GPT whose logits are most of its step, with the loss outside of it."""
    torch.manual_seed(0)
    tokens = torch.randint(CLASSES, (4, 64))
    model = GPT(layers=3, tokens=CLASSES).to(dtype)
    return Case(model, (tokens,), loss=lambda logits: F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()))


def wide_llama() -> Case:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=CLASSES, use_cache=False)
    tokens = torch.randint(CLASSES, (4, 48))
    return Case(transformers.LlamaForCausalLM(config), kwargs={"input_ids": tokens, "labels": tokens})


class Tied(nn.Module):
    """The head is no module: the logits are what the model itself returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT(layers=3, tokens=CLASSES)
        self.inner.head = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.inner(tokens), self.inner.embed.weight)


def tied() -> Case:
    case = wide()
    torch.manual_seed(0)
    return Case(Tied(), case.args, loss=case.loss)


def planned(case: Case, budget: str, **options: Any) -> Plan:
    return reactivate.plan(case.model, case.args, case.kwargs, budget=budget, loss=case.loss, **options)


def heads_of(plan: Plan) -> list[str]:
    return [decision.path for decision in plan.decisions if decision.candidate == BY_ROWS]


def steps_of(case: Case, plan: Plan | None) -> tuple[int, list[Tensor]]:
    """The peak of a step, and its gradients."""
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    handle = None if plan is None else reactivate.apply(case.model, plan)
    case.step()
    for parameter in case.model.parameters():
        parameter.grad.zero_()  # type: ignore[union-attr]
    torch.manual_seed(3)
    output: list[Any] = []
    remember = case.model.register_forward_hook(lambda model, args, result: output.append(result))
    peak = allocated_by(case.step).peak_bytes
    remember.remove()
    if handle is not None:
        handle.remove()
    return peak, [parameter.grad.clone() for parameter in case.model.parameters()]  # type: ignore[union-attr]


CASES = {
    "a loss outside": (wide, ["head"]),
    "a cast": (lambda: wide(torch.bfloat16), ["head"]),
    "a loss inside": (wide_llama, ["lm_head"]),
    "a tied head": (tied, [""]),
}


@pytest.mark.parametrize("how", ["real", pytest.param("simulated", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_budget_below_the_plain_loss_is_held_to_the_bit(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, heads = CASES[name]
    case = make()
    monkeypatch.setattr(simulator, "QUICK", 1e9 if how == "real" else 0.0)
    if how == "simulated":
        monkeypatch.setattr(simulator, "is_alone", lambda: False)
    with pytest.raises(PlanInfeasible):
        planned(case, "68%", head="keep")
    plan = planned(case, "68%")
    assert plan.proof.method == how
    assert heads_of(plan) == heads
    plain_peak, plain = steps_of(case, None)
    peak, found = steps_of(case, plan)
    assert plan.fixed.total + peak <= plan.budget_bytes
    assert abs(plan.predicted.peak_bytes - plan.fixed.total - peak) <= 0.01 * plain_peak
    assert peak < 0.7 * plain_peak
    for one, other in zip(plain, found, strict=True):
        assert_bitwise(one, other, "gradient")


def test_a_plan_with_a_head_says_so_and_goes_through_a_file(tmp_path: Path) -> None:
    case = wide()
    plan = planned(case, "68%")
    assert "loss by rows" in str(plan) and "planned, loss by rows" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.decisions == plan.decisions
    with reactivate.apply(case.model, loaded) as handle:
        assert handle.heads == ("head",)
        assert isinstance(case.model(*case.args), Logits)
    plan.save(tmp_path / "plan.html")
    old = json.loads((tmp_path / "plan.json").read_text())
    for decision in old["decisions"]:
        del decision["treatment"]["by_rows"]  # as older files are
    assert heads_of(Plan.from_json(old)) == []


def test_where_everything_fits_the_loss_stays_as_it_is() -> None:
    case = wide()
    assert heads_of(planned(case, "100%")) == []
    assert heads_of(planned(case, "95%", head="keep")) == []


def test_other_budgets_of_a_plan_know_the_head_as_well() -> None:
    case = wide()
    plan = planned(case, "100%")
    assert heads_of(plan.at("68%")) == ["head"]
    assert plan.at("68%").measure().holds


def test_an_impossible_budget_names_the_logits_and_what_takes_less() -> None:
    case = wide()
    with pytest.raises(PlanInfeasible) as error:
        planned(case, "5%")
    assert "the logits that head returns take 1.46 MiB" in str(error.value)
    assert "reactivate.loss.chunked_cross_entropy(hidden, weight, targets, chunks=8)" in str(error.value)
    assert planned(case, f"{error.value.least_bytes}B").predicted.peak_bytes <= error.value.least_bytes
    with pytest.raises(PlanInfeasible) as other:
        planned(unet(), "1%")
    assert "chunked" not in str(other.value)


def test_a_loss_that_has_no_rows_is_left_alone() -> None:
    case = wide()
    targets = case.args[0].flatten()
    case.loss = lambda logits: F.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=0.1)
    with pytest.raises(PlanInfeasible, match="no plan keeps") as error:
        planned(case, "30%")
    assert "chunked" not in str(error.value)


@pytest.mark.slow
def test_the_largest_batch_is_larger_with_the_loss_by_rows() -> None:
    model = wide().model

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, tokens: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(tokens).flatten(0, 1), tokens.flatten())

    tokens = torch.randint(CLASSES, (2, 64))
    sizes = [
        reactivate.plan(WithLoss(), tokens, budget="9MiB", maximize="batch", head=head).largest
        for head in ("keep", "rows")
    ]
    assert sizes[0] is not None and sizes[1] is not None and sizes[1] > sizes[0]


def test_an_adaptive_plan_keeps_the_loss_as_it_is() -> None:
    model, tokens = GPT(layers=3), torch.randint(64, (4, 64))

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits[..., 0].numel(), dtype=torch.long))

    plan = reactivate.plan(model, tokens, budget="60%", loss=loss_of, shapes="adaptive")
    with reactivate.apply(model, plan):
        assert type(model(tokens)) is Tensor


def test_a_model_that_is_compiled_is_told_to_keep_the_loss() -> None:
    case = wide()
    reactivate.apply(case.model, planned(case, "68%"))
    with pytest.raises(UnsupportedError, match='plan.*head="keep"'):
        torch.compile(case.model, backend="eager")(*case.args)


def test_another_head_is_refused() -> None:
    case = wide()
    with pytest.raises(UsageError, match='head= takes "rows" or "keep"; got'):
        planned(case, "50%", head="chunks")
