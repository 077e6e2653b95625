"""The commands `plan`, `show`, `verify` and `explain`: what they print, save and answer, and when the answer is no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_cases import answer, blocks, line, run

import reactivate
from reactivate import report


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    model, inputs = blocks()
    reactivate.plan(model, inputs, budget="75%", device="H100-SXM").save(path)
    return path


# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_prints_and_saves(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    result = run("plan", "cli_cases:blocks", "--budget", "75%", "--out", path)
    assert result.exit_code == 0, result.output
    plan = reactivate.Plan.load(path)
    assert result.stdout.strip() == str(plan).strip()
    assert f"wrote {path}" in result.stderr
    assert not plan.made_for.is_predicted, "it ran"
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes
    model, _ = blocks()
    assert reactivate.apply(model, plan).regions


def test_plan_as_json_is_a_plan(tmp_path: Path) -> None:
    document = answer("plan", "cli_cases:blocks", "--budget", "75%", "--out", tmp_path / "plan.json")
    assert document["feasible"] is True
    assert reactivate.Plan.from_json(document) == reactivate.Plan.load(tmp_path / "plan.json")


def test_plan_says_the_least_where_nothing_fits() -> None:
    document = answer("plan", "cli_cases:blocks", "--meta", "--budget", "1KiB", code=1)
    assert document["feasible"] is False
    assert document["budget_bytes"] == 1024
    assert document["error"]["kind"] == "infeasible"
    least = document["least_bytes"]
    assert answer("plan", "cli_cases:blocks", "--meta", "--budget", least)["budget_bytes"] == least
    assert answer("plan", "cli_cases:blocks", "--meta", "--budget", least - 1, code=1)["least_bytes"] == least
    assert f"budget={least}" in line("plan", "cli_cases:blocks", "--meta", "--budget", "1KiB", code=1)


def test_plan_takes_the_loss_by_rows_or_does_not() -> None:
    command_line = ("plan", "cli_cases:classifier", "--budget", "95%")
    kept = answer(*command_line, "--head", "keep", code=1)
    assert kept["least_bytes"] > kept["budget_bytes"]
    for head in ((), ("--head", "rows")):
        plan = reactivate.Plan.from_json(answer(*command_line, *head))
        assert [item.path for item in plan.decisions if item.candidate.by_rows] == ["2"]


def test_plan_for_a_device_that_is_too_small_says_no(tmp_path: Path) -> None:
    """A budget that is more than the device has never makes a plan that does not fit there."""
    least = answer("plan", "cli_cases:blocks", "--device", "H100-SXM", "--budget", "1KiB", code=1)["least_bytes"]
    small = tmp_path / "small.json"
    rates = {"bandwidth_bytes_per_second": 1e9, "flops_per_second": {"float32": 1e9}, "workspace_bytes": 2**25}
    for memory_bytes, code in ((least, 0), (least - 1, 1)):
        small.write_text(json.dumps({"name": "small", "memory_bytes": memory_bytes, **rates}))
        result = run("plan", "cli_cases:blocks", "--device", small, "--budget", "75GiB")
        assert result.exit_code == code, result.output
        assert "does not fit" not in result.output and ("fits into" in result.stdout) == (code == 0)
    assert "all that small has" in result.stderr


def test_plan_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    plan = reactivate.Plan.from_json(answer("plan", "cli_cases:blocks", "--device", "h100 sxm", "--budget", "75%"))
    assert plan.made_for.is_predicted
    assert plan.made_for.device == "H100-SXM"
    mine = tmp_path / "mine.json"
    rates = {"memory_bytes": 10**9, "bandwidth_bytes_per_second": 1e9, "flops_per_second": {"float32": 1e9}}
    mine.write_text(json.dumps({"name": "mine", **rates}))
    slower = reactivate.Plan.from_json(answer("plan", "cli_cases:blocks", "--device", mine))
    assert slower.made_for.device == "mine"
    assert slower.budget_bytes == 95 * 10**7, "what is free there"
    assert slower.plain.seconds > plan.plain.seconds


def test_plan_on_meta_makes_everything_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plan = reactivate.plan
    monkeypatch.setattr(
        reactivate, "plan", lambda model, *args, **kwargs: seen.append(model) or plan(model, *args, **kwargs)
    )
    answer("plan", "cli_cases:blocks", "--meta", "--budget", "75%")
    assert {parameter.device.type for parameter in seen[0].parameters()} == {"meta"}


def test_plan_counts_the_optimizer() -> None:
    parameters = sum(parameter.nbytes for parameter in blocks()[0].parameters())
    for name, states in (("sgd", 0), ("sgd-momentum", 1), ("AdamW", 2)):
        document = answer("plan", "cli_cases:blocks", "--meta", "--budget", "1GiB", "--optimizer", name)
        assert states * parameters <= document["fixed"]["optimizer"] <= states * parameters * 1.1


def test_plan_of_one_rank_of_many() -> None:
    whole = sum(parameter.nbytes for parameter in blocks()[0].parameters())
    more = ("--meta", "--device", "H100-SXM", "--budget", "1GiB")
    for ranks in (("--mesh", "dp=16"), ("--world", "16", "--mesh", "replicas=4,shards=4")):
        document = answer("plan", "cli_cases:sharded", *ranks, *more)
        shards = 16 if "dp=16" in ranks else 4
        assert document["fixed"]["parameters"] == document["fixed"]["gradients"]
        assert whole // shards <= document["fixed"]["parameters"] <= 1.5 * whole // shards  # multiples of 512 bytes
        assert document["predicted"]["collective_seconds"] > document["predicted"]["hidden_seconds"] > 0
        assert not torch.distributed.is_initialized()


def test_plan_takes_sizes_and_a_dtype() -> None:
    more = ("--batch", 2, "--set", "layers=5", "--dtype", "bfloat16")
    plan = reactivate.Plan.from_json(answer("plan", "cli_cases:blocks", "--meta", "--budget", "1GiB", *more))
    assert len(plan.decisions) == 5
    assert [(shape, dtype) for _, shape, dtype in plan.made_for.inputs] == [((2, 16), "bfloat16")]


def test_plan_finds_the_largest_batch() -> None:
    command_line = ("plan", "cli_cases:blocks", "--meta", "--set", "layers=1", "--budget", "30KiB", "--maximize")
    largest = answer(*command_line, "batch")["largest"]
    assert largest > 4
    assert answer(*command_line, "rows=0")["largest"] == largest
    assert "length=1" in line(*command_line, "rows=x", code=2)


def test_plan_draws_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    more = ("--out", folder, "--out", tmp_path / "one.svg")
    result = run("plan", "cli_cases:blocks", "--meta", "--budget", "75%", *more)
    assert result.exit_code == 0, result.output
    plan = reactivate.Plan.load(folder / "plan.json")
    for file, start in (
        (folder / "plan.html", b"<!doctype"),
        (folder / "plan.png", b"\x89PNG"),
        (tmp_path / "one.svg", b"<?xml"),
    ):
        assert file.read_bytes()[:20].lower().startswith(start.lower()), file
    assert str(plan.budget_bytes) in (folder / "plan.json").read_text()


# -- show -------------------------------------------------------------------------------------------------------------


def test_show(saved: Path, tmp_path: Path) -> None:
    plan = reactivate.Plan.load(saved)
    assert run("show", saved).stdout.strip() == str(plan).strip()
    assert reactivate.Plan.from_json(answer("show", saved, "--out", tmp_path / "again.json")) == plan
    assert reactivate.Plan.load(tmp_path / "again.json") == plan
    assert "cannot be read as a plan" in line("show", tmp_path / "none.json", code=2)


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_says_yes(saved: Path) -> None:
    result = run("verify", "cli_cases:blocks", "--policy", "full()")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("The same, bit for bit")
    document = answer("verify", "cli_cases:blocks", "--policy", "recompute_every(2)")
    assert document["is_same"] is True
    assert document["regions"] == document["recomputations"] == 2
    assert document["kept_bytes"] < document["plain_bytes"]
    assert answer("verify", "cli_cases:blocks", "--plan", saved)["is_same"] is True
    assert answer("verify", "cli_cases:blocks")["regions"] == 1
    assert answer("verify", "cli_cases:with_keywords")["is_same"] is True
    assert answer("verify", "cli_cases:function")["is_same"] is True


def test_verify_says_no() -> None:
    result = run("verify", "cli_cases:never_the_same")
    assert result.exit_code == 1
    assert "differs between two runs" in result.stdout
    document = answer("verify", "cli_cases:never_the_same", code=1)
    assert document["is_same"] is False
    assert document["is_deterministic"] is False


def test_a_plan_for_another_model_is_refused(saved: Path) -> None:
    assert "made for Sequential" in line("verify", "cli_cases:blocks", "--set", "layers=2", "--plan", saved, code=2)
    assert "one of the two" in line("verify", "cli_cases:blocks", "--plan", saved, "--policy", "full()", code=2)


# -- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", ["with_keywords", "with_a_dict", "with_a_list"])
def test_a_factory_returns_a_batch_as_it_comes(factory: str) -> None:
    assert answer("verify", f"cli_cases:{factory}")["is_same"] is True


def test_explain(saved: Path) -> None:
    result = run("explain", "cli_cases:blocks", "--policy", "full()")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Kept for the backward: ")
    document = answer("explain", "cli_cases:blocks", "--policy", "first_match(save_ops('gelu'), full())")
    explanation = report.Explanation.from_json(document)
    assert len(explanation.regions) == 3
    assert json.loads(json.dumps(explanation.to_json())) == document
    assert explanation.seconds is not None
    fake = report.Explanation.from_json(answer("explain", "cli_cases:blocks", "--fake", "--plan", saved))
    assert fake.is_fake
    assert 0 < len(fake.regions) < 4
    assert "applied to a module" in line("explain", "cli_cases:function", "--policy", "full()", code=2)
    compared = report.Comparison.from_json(
        answer("explain", "cli_cases:blocks", "--policy", "full()", "--fake", "--compare")
    )
    assert compared.after.kept_bytes < compared.before.kept_bytes and not compared.before.regions
    assert "--compare needs the policy" in line("explain", "cli_cases:blocks", "--compare", code=2)
