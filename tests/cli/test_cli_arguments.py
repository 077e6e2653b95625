"""Arguments of the command line: policies, configurations of transformers, and one line for each that is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_cases import answer, line, sets
from several import each

import reactivate
from reactivate import policies, report
from reactivate.cli import huggingface
from reactivate.errors import UsageError
from reactivate.integrations.recipe._text import parse_policy
from reactivate.storage import Disk, Host

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
    assert said in line("verify", "cli_cases:blocks", "--policy", text, code=2)


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
        (["plan", "cli_cases:blocks", "--bugdet", "1"], "--budget"),
        (["paln"], "paln"),
        (["plan", "cli_cases:blocks", "--budget", "8GB/s"], "budget='8GB/s'"),
        (["plan", "cli_cases:blocks", "--budget", "0"], "leaves no memory"),
        (["plan", "cli_cases:blocks"], "budget='8GiB'"),
        (["plan", "cli_cases:blocks", "--device", "H1000"], "H1000"),
        (["plan", "cli_cases:blocks", "--device", "none.json"], "none.json"),
        (["plan", "cli_cases:blocks", "--optimizer", "adamx"], "adamx"),
        (["plan", "cli_cases:blocks", "--out", "plan.pdf"], ".html"),
        (["plan", "cli_cases:blocks", "--set", "layers"], "NAME=VALUE"),
        (["plan", "cli_cases:blocks", "--set", "layer=3"], "It takes layers, batch, dim"),
        (["plan", "cli_cases:blocks", "--length", "3"], "'length'"),
        (["plan", "cli_cases:blocks", "--batch", "0"], "--batch"),
        (["plan", "cli_cases:blcks"], "Did you mean 'blocks'"),
        (["plan", "no_such_module:make"], "no module 'no_such_module'"),
        (["plan", "os.no_such_module:make"], "os"),
        (["plan", "cli_cases:NUMBER"], "It takes a function"),
        (["plan", "cli_cases:a_number"], "returned (int)"),
        (["plan", "cli_cases:model_alone"], "Return (model, args)"),
        (["plan", "cli_cases:ready"], "Return (model, args)"),
        (["plan", "cli_cases:function", "--budget", "1GiB"], "torch.nn.Module"),
        (["plan", "cli_cases:sharded", "--world", "12", "--mesh", "dp=2,tp=4"], "2 x 4 = 8 ranks"),
        (["plan", "cli_cases:sharded", "--mesh", "dp=2,dp=4"], "NAME=SIZE"),
        (["plan", "cli_cases:blocks", "--mesh", "dp=2"], "It takes layers, batch, dim"),
        (["plan", "LlamaConfig", "--mesh", "dp=2"], "takes `mesh`"),
        (["plan", "cli_cases:sharded_by_name", "--mesh", "data=2"], "--mesh has the dimensions data, and TARGET"),
        (["plan", "cli_cases:sharded_alone", "--meta"], "Add --world 8, or --mesh dp=8"),
        (["plan", "not a target"], "package.module:factory"),
        (["verify", "cli_cases:blocks", "--device", "H100-SXM"], "nothing can run there"),
    ],
)
def test_usage_is_refused_in_one_line(arguments: list[str], said: str) -> None:
    assert said in line(*arguments, code=2)
    document = answer(*arguments, code=2)
    assert document["error"]["kind"] == "usage"
    assert said in document["error"]["message"]
