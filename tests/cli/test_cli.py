"""The command `reactivate`: what it answers, what it refuses, and the exit code of each."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from several import each
from torch import Tensor, nn

pytest.importorskip("click", reason="the extra `cli`")

from click.testing import CliRunner, Result

import reactivate
from reactivate import _doctor, policies, report
from reactivate._torch.private_api import Way
from reactivate.cli import command, huggingface
from reactivate.cli.where import where_of
from reactivate.errors import UsageError
from reactivate.integrations.recipe._text import parse_policy
from reactivate.planner.cost.devices import DEVICES
from reactivate.storage import Disk, Host

PACKAGE = Path(reactivate.__file__).parents[1]
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
VIT = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "image_size": 32,
    "num_labels": 3,
}
T5 = {"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2, "d_kv": 8, "vocab_size": 32}
BERT = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}

# -- targets ----------------------------------------------------------------------------------------------------------


def blocks(layers: int = 3, batch: int = 64, dim: int = 16) -> tuple[nn.Module, Tensor]:
    made = (nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers))
    return nn.Sequential(*made), torch.randn(batch, dim)


def sharded(mesh: Any, layers: int = 3) -> tuple[nn.Module, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model, x = blocks(layers)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), x


def sharded_by_name(mesh: Any) -> tuple[nn.Module, Tensor]:
    return sharded(mesh["dp"])


def sharded_alone() -> tuple[nn.Module, Tensor]:
    return sharded(None)


class Classifier(nn.Sequential):
    """Most of its step is its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x), torch.zeros(len(x), dtype=torch.long))


def classifier() -> tuple[nn.Module, Tensor]:
    return Classifier(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)), nn.Linear(8, 2000)), torch.randn(
        64, 8
    )


def with_keywords() -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    return nn.Linear(4, 4), (), {"input": torch.randn(2, 4)}


def with_a_dict() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Linear(4, 4), {"input": torch.randn(2, 4)}


def with_a_list() -> tuple[nn.Module, list[Tensor]]:
    return nn.Linear(4, 4), [torch.randn(2, 4)]


def model_alone() -> nn.Module:
    return nn.Linear(4, 4)


def a_number() -> int:
    return 7


CALLS: SimpleQueue[None] = SimpleQueue()  # which nothing rewinds


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.put(None)
        return super().forward(x) * float(CALLS.qsize())


def never_the_same() -> tuple[nn.Module, Tensor]:
    return Counting(4, 4), torch.randn(2, 4)


def function() -> tuple[Any, Tensor]:
    return torch.sin, torch.randn(4, requires_grad=True)


def failing() -> None:
    raise ValueError("no\n  luck")


def leaving() -> None:
    sys.exit(0)


def interrupted() -> None:
    raise KeyboardInterrupt


ready = nn.Linear(4, 4)
NUMBER = 7

# -- running ----------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def answer(*arguments: object, code: int = 0) -> Any:
    """The one JSON document on stdout."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def line(*arguments: object, code: int) -> str:
    """The one line of an error; the same is in the JSON document."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (only,) = result.stderr.splitlines()
    assert only.startswith("error: ")
    return only


def sets(fields: dict[str, Any]) -> list[str]:
    return [text for name, value in fields.items() for text in ("--set", f"{name}={value}")]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    model, inputs = blocks()
    reactivate.plan(model, inputs, budget="75%", device="H100-SXM").save(path)
    return path


# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_prints_and_saves(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    result = run("plan", "test_cli:blocks", "--budget", "75%", "--out", path)
    assert result.exit_code == 0, result.output
    plan = reactivate.Plan.load(path)
    assert result.stdout.strip() == str(plan).strip()
    assert f"wrote {path}" in result.stderr
    assert not plan.made_for.is_predicted, "it ran"
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes
    model, _ = blocks()
    assert reactivate.apply(model, plan).regions


def test_plan_as_json_is_a_plan(tmp_path: Path) -> None:
    document = answer("plan", "test_cli:blocks", "--budget", "75%", "--out", tmp_path / "plan.json")
    assert document["feasible"] is True
    assert reactivate.Plan.from_json(document) == reactivate.Plan.load(tmp_path / "plan.json")


def test_plan_says_the_least_where_nothing_fits() -> None:
    document = answer("plan", "test_cli:blocks", "--meta", "--budget", "1KiB", code=1)
    assert document["feasible"] is False
    assert document["budget_bytes"] == 1024
    assert document["error"]["kind"] == "infeasible"
    least = document["least_bytes"]
    assert answer("plan", "test_cli:blocks", "--meta", "--budget", least)["budget_bytes"] == least
    assert answer("plan", "test_cli:blocks", "--meta", "--budget", least - 1, code=1)["least_bytes"] == least
    assert f"budget={least}" in line("plan", "test_cli:blocks", "--meta", "--budget", "1KiB", code=1)


def test_plan_takes_the_loss_by_rows_or_does_not() -> None:
    command_line = ("plan", "test_cli:classifier", "--budget", "95%")
    kept = answer(*command_line, "--head", "keep", code=1)
    assert kept["least_bytes"] > kept["budget_bytes"]
    for head in ((), ("--head", "rows")):
        plan = reactivate.Plan.from_json(answer(*command_line, *head))
        assert [item.path for item in plan.decisions if item.candidate.by_rows] == ["2"]


def test_plan_for_a_device_that_is_too_small_says_no(tmp_path: Path) -> None:
    """A budget that is more than the device has never makes a plan that does not fit there."""
    least = answer("plan", "test_cli:blocks", "--device", "H100-SXM", "--budget", "1KiB", code=1)["least_bytes"]
    small = tmp_path / "small.json"
    rates = {"bandwidth_bytes_per_second": 1e9, "flops_per_second": {"float32": 1e9}, "workspace_bytes": 2**25}
    for memory_bytes, code in ((least, 0), (least - 1, 1)):
        small.write_text(json.dumps({"name": "small", "memory_bytes": memory_bytes, **rates}))
        result = run("plan", "test_cli:blocks", "--device", small, "--budget", "75GiB")
        assert result.exit_code == code, result.output
        assert "does not fit" not in result.output and ("fits into" in result.stdout) == (code == 0)
    assert "all that small has" in result.stderr


def test_plan_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    plan = reactivate.Plan.from_json(answer("plan", "test_cli:blocks", "--device", "h100 sxm", "--budget", "75%"))
    assert plan.made_for.is_predicted
    assert plan.made_for.device == "H100-SXM"
    mine = tmp_path / "mine.json"
    rates = {"memory_bytes": 10**9, "bandwidth_bytes_per_second": 1e9, "flops_per_second": {"float32": 1e9}}
    mine.write_text(json.dumps({"name": "mine", **rates}))
    slower = reactivate.Plan.from_json(answer("plan", "test_cli:blocks", "--device", mine))
    assert slower.made_for.device == "mine"
    assert slower.budget_bytes == 95 * 10**7, "what is free there"
    assert slower.plain.seconds > plan.plain.seconds


def test_plan_on_meta_makes_everything_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plan = reactivate.plan
    monkeypatch.setattr(
        reactivate, "plan", lambda model, *args, **kwargs: seen.append(model) or plan(model, *args, **kwargs)
    )
    answer("plan", "test_cli:blocks", "--meta", "--budget", "75%")
    assert {parameter.device.type for parameter in seen[0].parameters()} == {"meta"}


def test_plan_counts_the_optimizer() -> None:
    parameters = sum(parameter.nbytes for parameter in blocks()[0].parameters())
    for name, states in (("sgd", 0), ("sgd-momentum", 1), ("AdamW", 2)):
        document = answer("plan", "test_cli:blocks", "--meta", "--budget", "1GiB", "--optimizer", name)
        assert states * parameters <= document["fixed"]["optimizer"] <= states * parameters * 1.1


def test_plan_of_one_rank_of_many() -> None:
    whole = sum(parameter.nbytes for parameter in blocks()[0].parameters())
    more = ("--meta", "--device", "H100-SXM", "--budget", "1GiB")
    for ranks in (("--mesh", "dp=16"), ("--world", "16", "--mesh", "replicas=4,shards=4")):
        document = answer("plan", "test_cli:sharded", *ranks, *more)
        shards = 16 if "dp=16" in ranks else 4
        assert document["fixed"]["parameters"] == document["fixed"]["gradients"]
        assert whole // shards <= document["fixed"]["parameters"] <= 1.5 * whole // shards  # multiples of 512 bytes
        assert document["predicted"]["collective_seconds"] > document["predicted"]["hidden_seconds"] > 0
        assert not torch.distributed.is_initialized()


def test_plan_takes_sizes_and_a_dtype() -> None:
    more = ("--batch", 2, "--set", "layers=5", "--dtype", "bfloat16")
    plan = reactivate.Plan.from_json(answer("plan", "test_cli:blocks", "--meta", "--budget", "1GiB", *more))
    assert len(plan.decisions) == 5
    assert [(shape, dtype) for _, shape, dtype in plan.made_for.inputs] == [((2, 16), "bfloat16")]


def test_plan_finds_the_largest_batch() -> None:
    command_line = ("plan", "test_cli:blocks", "--meta", "--set", "layers=1", "--budget", "30KiB", "--maximize")
    largest = answer(*command_line, "batch")["largest"]
    assert largest > 4
    assert answer(*command_line, "rows=0")["largest"] == largest
    assert "length=1" in line(*command_line, "rows=x", code=2)


def test_plan_draws_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    more = ("--out", folder, "--out", tmp_path / "one.svg")
    result = run("plan", "test_cli:blocks", "--meta", "--budget", "75%", *more)
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
    result = run("verify", "test_cli:blocks", "--policy", "full()")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("The same, bit for bit")
    document = answer("verify", "test_cli:blocks", "--policy", "recompute_every(2)")
    assert document["is_same"] is True
    assert document["regions"] == document["recomputations"] == 2
    assert document["kept_bytes"] < document["plain_bytes"]
    assert answer("verify", "test_cli:blocks", "--plan", saved)["is_same"] is True
    assert answer("verify", "test_cli:blocks")["regions"] == 1
    assert answer("verify", "test_cli:with_keywords")["is_same"] is True
    assert answer("verify", "test_cli:function")["is_same"] is True


def test_verify_says_no() -> None:
    result = run("verify", "test_cli:never_the_same")
    assert result.exit_code == 1
    assert "differs between two runs" in result.stdout
    document = answer("verify", "test_cli:never_the_same", code=1)
    assert document["is_same"] is False
    assert document["is_deterministic"] is False


def test_a_plan_for_another_model_is_refused(saved: Path) -> None:
    assert "made for Sequential" in line("verify", "test_cli:blocks", "--set", "layers=2", "--plan", saved, code=2)
    assert "one of the two" in line("verify", "test_cli:blocks", "--plan", saved, "--policy", "full()", code=2)


# -- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", ["with_keywords", "with_a_dict", "with_a_list"])
def test_a_factory_returns_a_batch_as_it_comes(factory: str) -> None:
    assert answer("verify", f"test_cli:{factory}")["is_same"] is True


def test_explain(saved: Path) -> None:
    result = run("explain", "test_cli:blocks", "--policy", "full()")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Kept for the backward: ")
    document = answer("explain", "test_cli:blocks", "--policy", "first_match(save_ops('gelu'), full())")
    explanation = report.Explanation.from_json(document)
    assert len(explanation.regions) == 3
    assert json.loads(json.dumps(explanation.to_json())) == document
    assert explanation.seconds is not None
    fake = report.Explanation.from_json(answer("explain", "test_cli:blocks", "--fake", "--plan", saved))
    assert fake.is_fake
    assert 0 < len(fake.regions) < 4
    assert "applied to a module" in line("explain", "test_cli:function", "--policy", "full()", code=2)
    compared = report.Comparison.from_json(
        answer("explain", "test_cli:blocks", "--policy", "full()", "--fake", "--compare")
    )
    assert compared.after.kept_bytes < compared.before.kept_bytes and not compared.before.regions
    assert "--compare needs the policy" in line("explain", "test_cli:blocks", "--compare", code=2)


# -- policies ---------------------------------------------------------------------------------------------------------


@each(
    ("text", "policy"),
    [
        (" full() ", policies.full()),
        ("recompute_every(k=2, offset=1)", policies.recompute_every(2, 1)),
        (
            "first_match(save_ops('linear', 'gelu', within=('*.0',), storage=Host(limit=1000)), full())",
            policies.first_match(
                policies.save_ops("linear", "gelu", within=("*.0",), storage=Host(limit=1000)), policies.full()
            ),
        ),
        ("full(inputs=Disk('tensors', limit=1000))", policies.full(inputs=Disk("tensors", limit=1000))),
        ("exclude(full(), recompute_modules('0'))", policies.exclude(policies.full(), policies.recompute_modules("0"))),
    ],
)
def test_a_policy_is_what_python_says(text: str, policy: Any) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch stolen')",
        "full.__globals__",
        "full().__class__",
        "(lambda: full())()",
        "[full() for _ in (1,)]",
        "full() if True else none()",
        'save_ops(f\'{open("stolen", "w")}\')',
        "save_ops(*['linear'])",
        "save_ops('linear', **{'within': '*'})",
        "recompute_every(1 + 1)",
        "recompute_every((k := 2))",
        "recompute_modules(full.__class__)",
        "full(), none()",
        "import os",
        "open('stolen', 'w')",
        "Site()",
        "Host()",
        "recompute_every(9 ** 9 ** 9)",
        "(" * 400 + "full()" + ")" * 400,
        "-" * 5000 + "1",
        "first_match(" * 3000,
        "full()\0",
        "x" * 20_000,
        "",
    ],
)
def test_any_other_text_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--policy: "):
        parse_policy(text)
    assert list(tmp_path.iterdir()) == []


@each(
    ("text", "said"),
    [
        ("full", "write the call: full(...)"),
        ("ful()", "Did you mean 'full'?"),
        ("full(3)", "full does not take this"),
        ("recompute_every(0)", "recompute_every"),
        ("recompute_every(-1)", "-1"),
        ("save_ops('no_such_op')", "no_such_op"),
        ("every_nth(2, 'linear')", "linear"),
    ],
)
def test_a_policy_that_is_wrong_says_how(text: str, said: str) -> None:
    assert said in line("verify", "test_cli:blocks", "--policy", text, code=2)


# -- demo and devices -------------------------------------------------------------------------------------------------

demo = importlib.import_module("reactivate.cli.commands.demo")  # as a name of the room it is the command


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "SIZE", demo.Size(layers=3, dim=32, heads=2, context=64, batch=4))


def test_demo(small_demo: None, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    document = answer("demo", "--out", tmp_path / "demo")
    assert document["identical"] is True
    assert document["plain"]["losses"] == document["planned"]["losses"]
    assert len(set(document["plain"]["losses"])) == 3, "it learns"
    assert document["planned"]["peak_bytes"] <= document["budget_bytes"] < document["plain"]["peak_bytes"]
    assert document == json.loads((tmp_path / "demo/results.json").read_text())
    plan = reactivate.Plan.load(tmp_path / "demo/plan.json")
    assert any(item.candidate.name != "keep" for item in plan.decisions)
    assert torch.equal(before, torch.get_rng_state())


def test_demo_notices_a_difference(small_demo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nudge(model: nn.Module, plan: reactivate.Plan) -> None:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1

    monkeypatch.setattr(demo, "standard_library", lambda: torch.randint(256, (1000,), dtype=torch.uint8))
    monkeypatch.setattr(reactivate, "apply", nudge)
    result = run("demo", "--out", tmp_path)
    assert result.exit_code == 1
    assert "The two runs differ, first in the " in result.stdout


def test_devices() -> None:
    result = run("devices")
    assert result.exit_code == 0
    for device in DEVICES.values():
        assert device.name in result.stdout
        assert device.source in result.stdout
    assert [(item["name"], item["memory_bytes"]) for item in answer("devices")] == [
        (device.name, device.memory_bytes) for device in DEVICES.values()
    ]


def test_where() -> None:
    assert where_of("cpu", on_meta=False).device == torch.device("cpu")
    assert where_of("cpu", on_meta=True).spec == DEVICES["cpu"]
    assert where_of("meta", on_meta=False).on_meta
    assert where_of(None, on_meta=False) == where_of(None, on_meta=False)
    assert where_of("B200", on_meta=False).spec == DEVICES["B200"]


# -- configs of transformers ------------------------------------------------------------------------------------------


@each(
    ("name", "fields", "more"),
    [
        ("LlamaConfig", LLAMA, ("--length", 8)),
        ("T5Config", T5, ("--length", 8)),
        ("BertConfig", BERT, ("--length", 8, "--dtype", "bfloat16")),
        ("ViTConfig", VIT, ()),
    ],
)
def test_a_config_by_name(name: str, fields: dict[str, Any], more: tuple[object, ...]) -> None:
    pytest.importorskip("transformers")
    document = answer("verify", name, *sets(fields), *more, "--batch", 2, "--policy", "full()")
    assert document["is_same"] is True
    assert document["regions"] == (4 if name == "T5Config" else 2)
    assert document["kept_bytes"] < document["plain_bytes"]
    fake = report.Explanation.from_json(answer("explain", name, *sets(fields), *more, "--policy", "full()", "--fake"))
    assert fake.is_fake
    assert len(fake.regions) == document["regions"]


@pytest.mark.slow
def test_a_config_is_planned_without_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    more = ("--batch", 3, "--length", 8, "--dtype", "bfloat16", "--device", "H100-SXM", "--budget", "1GiB")
    by_name = reactivate.Plan.from_json(answer("plan", "LlamaConfig", *sets(LLAMA), *more, "--optimizer", "adamw"))
    assert by_name.made_for.is_predicted
    assert by_name.made_for.model == "LlamaForCausalLM"
    assert {(shape, dtype) for _, shape, dtype in by_name.made_for.inputs} == {((3, 8), "int64")}
    assert [item.path for item in by_name.decisions] == ["model.layers.0", "model.layers.1"]
    assert by_name.fixed.optimizer >= 2 * by_name.fixed.gradients > 0

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    by_file = reactivate.Plan.from_json(answer("plan", tmp_path / "config.json", *more, "--optimizer", "adamw"))
    assert (by_file.made_for, by_file.decisions) == (by_name.made_for, by_name.decisions)
    assert (
        answer("verify", tmp_path, "--set", "num_hidden_layers=3", "--length", 8, "--policy", "full()")["regions"] == 3
    )


def test_a_config_chooses_its_head(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True, **BERT}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    made, _ = huggingface.made_of(huggingface.config_of(str(tmp_path), {}), None, batch=1, length=8, on_meta=True)
    assert type(made).__name__ == "BertLMHeadModel"


def test_what_is_not_a_config(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert "Did you mean 'LlamaConfig'" in line("plan", "LamaConfig", code=2)
    assert "Did you mean 'num_hidden_layers'" in line("plan", "LlamaConfig", "--set", "num_hiden_layers=2", code=2)
    assert "LlamaConfig refuses this" in line("plan", "LlamaConfig", "--set", "hidden_size=big", code=2)
    assert "2048 positions" in line("plan", "LlamaConfig", "--length", 4096, code=2)
    assert "takes images" in line("plan", "ViTConfig", *sets(VIT), "--length", 8, code=2)
    assert "has neither" in line("plan", "WhisperConfig", "--meta", code=2)
    assert "are free here" in line("verify", "LlamaConfig", "--set", "num_hidden_layers=1000", code=2)
    assert "Nothing is downloaded" in line("plan", "meta-llama/Llama-3.1-8B", code=2)
    path = tmp_path / "config.json"
    for text, said in (
        ("{", "not JSON"),
        ("[]", "no `model_type`"),
        ('{"model_type": "lama"}', "Did you mean 'llama'"),
    ):
        path.write_text(text)
        assert said in line("plan", tmp_path, code=2)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


# -- exit codes -------------------------------------------------------------------------------------------------------


@each(
    ("arguments", "said"),
    [
        (["plan"], "Missing argument 'TARGET'"),
        (["plan", "test_cli:blocks", "--bugdet", "1"], "--budget"),
        (["paln"], "paln"),
        (["plan", "test_cli:blocks", "--budget", "8GB/s"], "budget='8GB/s'"),
        (["plan", "test_cli:blocks", "--budget", "0"], "leaves no memory"),
        (["plan", "test_cli:blocks"], "budget='8GiB'"),
        (["plan", "test_cli:blocks", "--device", "H1000"], "H1000"),
        (["plan", "test_cli:blocks", "--device", "none.json"], "none.json"),
        (["plan", "test_cli:blocks", "--optimizer", "adamx"], "adamx"),
        (["plan", "test_cli:blocks", "--out", "plan.pdf"], ".html"),
        (["plan", "test_cli:blocks", "--set", "layers"], "NAME=VALUE"),
        (["plan", "test_cli:blocks", "--set", "layer=3"], "It takes layers, batch, dim"),
        (["plan", "test_cli:blocks", "--length", "3"], "'length'"),
        (["plan", "test_cli:blocks", "--batch", "0"], "--batch"),
        (["plan", "test_cli:blcks"], "Did you mean 'blocks'"),
        (["plan", "no_such_module:make"], "no module 'no_such_module'"),
        (["plan", "os.no_such_module:make"], "os"),
        (["plan", "test_cli:NUMBER"], "It takes a function"),
        (["plan", "test_cli:a_number"], "returned (int)"),
        (["plan", "test_cli:model_alone"], "Return (model, args)"),
        (["plan", "test_cli:ready"], "Return (model, args)"),
        (["plan", "test_cli:function", "--budget", "1GiB"], "torch.nn.Module"),
        (["plan", "test_cli:sharded", "--world", "12", "--mesh", "dp=2,tp=4"], "2 x 4 = 8 ranks"),
        (["plan", "test_cli:sharded", "--mesh", "dp=2,dp=4"], "NAME=SIZE"),
        (["plan", "test_cli:blocks", "--mesh", "dp=2"], "It takes layers, batch, dim"),
        (["plan", "LlamaConfig", "--mesh", "dp=2"], "takes `mesh`"),
        (["plan", "test_cli:sharded_by_name", "--mesh", "data=2"], "--mesh has the dimensions data, and TARGET"),
        (["plan", "test_cli:sharded_alone", "--meta"], "Add --world 8, or --mesh dp=8"),
        (["plan", "not a target"], "package.module:factory"),
        (["verify", "test_cli:blocks", "--device", "H100-SXM"], "nothing can run there"),
    ],
)
def test_usage_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    assert said in line(*arguments, code=2)
    document = answer(*arguments, code=2)
    assert document["error"]["kind"] == "usage"
    assert said in document["error"]["message"]


def test_what_a_target_raises_is_one_line() -> None:
    assert line("plan", "test_cli:failing", code=4) == "error: ValueError: no luck (--traceback shows where)"
    assert answer("verify", "test_cli:failing", code=4)["error"]["kind"] == "failed"
    assert "sys.exit(0)" in line("verify", "test_cli:leaving", code=4)
    traced = run("explain", "test_cli:failing", "--traceback")
    assert traced.exit_code == 4
    assert "in failing" in traced.stderr
    stopped = run("plan", "test_cli:interrupted", "--json")
    assert stopped.exit_code == 130
    assert stopped.stderr.strip() == "error: interrupted"
    assert json.loads(stopped.stdout)["error"]["kind"] == "interrupted"


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without("transformers", monkeypatch)
    assert "pip install" in line("plan", "LlamaConfig", code=3)
    document = run("plan", "LlamaConfig", "--json")
    assert document.exit_code == 3
    assert json.loads(document.stdout)["error"]["kind"] == "missing_extra"


def test_without_rich_tables_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    without("rich", monkeypatch)
    result = run("devices")
    assert result.exit_code == 0 and "H100-SXM" in result.stdout


def test_help_and_version() -> None:
    for arguments in ([], ["--help"], ["plan", "--help"], ["-h"]):
        result = run(*arguments)
        assert result.exit_code == 0
        assert "Usage: " in result.stdout
    assert "Exit codes: 0 success; 1 no" in run("--help").stdout
    assert reactivate.__version__ in run("--version").stdout


# -- processes --------------------------------------------------------------------------------------------------------


def process(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(PACKAGE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    command_line = [sys.executable, *program]
    return subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_a_module_of_the_folder_is_found_and_stdout_has_json_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2))\n"
        "    return torch.nn.Sequential(*layers), torch.randn(2, 4)\n"
    )
    # As the script runs, whose folder is not the current one.
    script = "import sys; sys.path.remove(''); from reactivate.__main__ import main; sys.exit(main())"
    done = process(["-c", script, "plan", "mine:make", "--budget", "100%", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(reactivate.Plan.from_json(json.loads(done.stdout)).decisions) == 2
    progress = done.stderr.splitlines()  # where that takes long
    assert all(line.startswith("plan: ") for line in progress), done.stderr
    done = process(["-m", "reactivate", "plan", "mine:none"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: TARGET 'mine:none'")
    assert done.stdout == ""


def test_without_click_the_extra_is_named(tmp_path: Path) -> None:
    script = "import sys; sys.modules['click'] = None; from reactivate.__main__ import main; sys.exit(main())"
    done = process(["-c", script, "devices"], tmp_path)
    assert done.returncode == 3
    assert done.stderr == "error: the command needs click, which is not installed: pip install click rich\n"
    assert done.stdout == ""
    twice = script.replace(
        "sys.exit(main())", "assert main() == 0; print('-----'); sys.argv += ['--help']; sys.exit(main())"
    )
    done = process(["-c", twice], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for shown in done.stdout.split("-----"):
        assert "doctor" in shown and "pip install click rich" in shown


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_names_what_is_installed() -> None:
    document = answer("doctor")
    assert document == _doctor.examine()
    assert (document["torch"], document["python"]) == (torch.__version__, platform.python_version())
    assert document["devices"][0] == "cpu"
    assert document["packages"]["click"]
    result = run("doctor")
    assert result.exit_code == 0
    assert torch.__version__ in result.stdout and platform.platform() in result.stdout


def test_doctor_needs_no_extra(tmp_path: Path) -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in ("click", "rich", "matplotlib", "jinja2"))
    script = f"import sys; {blocked}from reactivate.__main__ import main; sys.exit(main())"
    done = process(["-c", script, "doctor", "--json"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["torch"] == torch.__version__


def test_doctor_names_what_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Way(("torch._C._gone",), "what is gone", False, "every backward")
    slow = Way((), "the memory of something", False)
    monkeypatch.setattr(_doctor, "ways", [Way(("torch._C._there",), "what is there", True, "it"), gone, slow])
    assert _doctor.slow_ways() == [
        {"what": "what is gone", "names": ["torch._C._gone"], "lost": "every backward"},
        {"what": "the memory of something", "names": [], "lost": ""},
    ]
    shown = run("doctor").stdout
    assert "1 private names and layouts" in shown
    assert "not: what is gone (torch._C._gone); lost: every backward" in shown
    assert "not: the memory of something (a layout in memory); a public way takes its place, slower" in shown


SCRIPT = """
import sys
import torch
from torch.utils.checkpoint import checkpoint

x = torch.ones(2, requires_grad=True)
checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
print(__name__, sys.argv[1:], torch.utils.checkpoint.checkpoint.__globals__["__name__"])
{}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise KeyError('mine')", 1)])
def test_run_runs_a_script_as_python_does(end: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(end), encoding="utf-8")
    command_line = [sys.executable, "-m", "reactivate", "run", str(script), "--lr", "3", "-x"]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == code
    assert done.stdout == "__main__ ['--lr', '3', '-x'] reactivate.dropin.torch\n"
    assert ("KeyError: 'mine'" in done.stderr) is (code == 1)
    assert done.stderr.endswith("reactivate: 1 checkpointed region ran.\n")


def test_run_says_why_no_region_ran(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "reactivate", "run", script], capture_output=True, text=True, check=True
    )
    assert "0 checkpointed regions ran. The script never called torch.utils.checkpoint" in done.stderr
