"""Reports of `explain`: the table, which folds layers that are alike, the page of a notebook, JSON, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
from explain_cases import Normed, every_model, prepared
from several import each

import reactivate
from reactivate._inspect.comparison import Comparison
from reactivate._inspect.explain import explain
from reactivate._inspect.explanation import Explanation
from reactivate._region.accounts import in_words
from reactivate.errors import UsageError
from reactivate.policies import full


@every_model
def test_json_round_trip(name: str) -> None:
    explanation = explain(*prepared(name))
    text = json.dumps(explanation.to_json())
    assert Explanation.from_json(json.loads(text)) == explanation


@each(
    ("value", "words"),
    [
        ({"version": 99}, "version 99"),
        (
            '{"version": 1}',
            r"from_json takes what \w+\.to_json returned, a dict; got '.*'. Read text with json.loads first",
        ),
        (None, "got None"),
        ({"version": 1}, r"This is no (explanation|comparison) as `\w+\.save` writes it: the field '\w+' is missing"),
    ],
)
def test_what_is_no_json_of_it_is_refused(value: Any, words: str) -> None:
    for kind in (Explanation, Comparison):
        with pytest.raises(UsageError, match=words):
            kind.from_json(value)


def test_the_table() -> None:
    model, x = prepared("save_ops")
    text = str(explain(model, x))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    title = "Kept for the backward: 2.17 KiB, of which 300 B outside of regions. Recomputed: 2.03 KiB."
    assert lines[0].startswith(title) and explain(model, x).title == title
    assert any("layers.0…layers.3 (4 alike) Block" in line and "640 B" in line for line in lines)
    assert any(line.strip().startswith("up linear") and "explain_cases.py:" in line for line in lines)
    assert lines[-1].split()[0] == "all"


def test_a_notebook_and_a_debugger_show_it() -> None:
    explanation = explain(*prepared("save_ops"))
    assert re.fullmatch(
        r"Explanation\(2.17 KiB kept, 2.03 KiB recomputed: 4 regions and \d+ sites? outside\)", repr(explanation)
    )
    compared = reactivate.compare(*prepared("plain"), policy=full())
    assert repr(compared).startswith("Comparison(before=Explanation(") and len(repr(compared)) < 200
    for shown, rows in ((explanation, str(explanation).splitlines()), (compared, compared.table().rows)):
        page = ElementTree.fromstring(f"<div>{shown._repr_html_()}</div>")
        assert page.findtext("p") == str(shown).splitlines()[0]
        assert 3 < len(page.findall("table/tbody/tr")) <= len(rows)


def test_the_table_is_as_wide_as_asked() -> None:
    explanation = explain(*prepared("save_ops"))
    assert max(map(len, explanation.text(width=100).splitlines())) <= 100
    assert "layers.0…layers.3 (4 alike) Block" in explanation.text(plain=True)


def test_layers_that_keep_alike_share_their_rows_with_their_sums() -> None:
    """Of a model without a policy too."""
    explanation = explain(*prepared("plain"))
    lines = explanation.text(plain=True).splitlines()
    (folded,) = (number for number, line in enumerate(lines) if "alike" in line)
    inside = [entry for entry in explanation.outside if entry.path.startswith("layers.")]
    assert lines[folded].startswith("layers.0…layers.3 (4 alike) Block")
    assert lines[folded].endswith(in_words(sum(entry.kept_bytes for entry in inside)))
    up = [entry for entry in inside if entry.path.endswith(".up")]
    (line,) = (line for line in lines if line.startswith("  up: 4 tensors "))
    assert in_words(sum(entry.kept_bytes for entry in up)) in line
    assert len(lines) == folded + 8  # four places in a layer; the head, the loss and the total


def test_folded_rows_are_sums_at_any_depth() -> None:
    """Of regions in regions too."""
    explanation = explain(*prepared("nested"))
    inner = [entry for entry in explanation.walk() if entry.path == "layers.0.first" and entry.kind == "recomputed"]
    assert inner
    text = explanation.text(plain=True)
    for entry in inner:
        assert f"    {4 * entry.tensors} tensors" in text and in_words(4 * entry.recomputed_bytes) in text


def test_only_layers_that_are_alike_share_rows() -> None:
    model, x = prepared("plain")
    model.layers[2] = Normed(8)
    text = explain(model, x).text(plain=True)
    for row in ("layers.0…layers.1 (2 alike) Block ", "\nlayers.2 Normed ", "\nlayers.3 Block "):
        assert text.count(row) == 1


def test_the_sums_of_layers_are_values_too() -> None:
    explanation = explain(*prepared("every second"))
    layers = [entry for entry in explanation.outside_by_layer if entry.kind == "layer"]
    assert [(entry.path, entry.name) for entry in layers] == [("layers.1", "Block"), ("layers.3", "Block")]
    for layer in layers:
        inside = [entry for entry in explanation.outside if entry.path.startswith(layer.path)]
        assert list(layer.inside) == inside and len(inside) > 2
        assert layer.kept_bytes == sum(entry.kept_bytes for entry in inside) > 0
    others = [entry for entry in explanation.outside_by_layer if entry.kind != "layer"]
    assert [entry.path for entry in others] == [entry.path for entry in explanation.outside if "." not in entry.path]


def test_torch_alone_is_enough_to_print() -> None:
    """Each once, and nothing beside it: neither the profiler's log nor a warning."""
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'jinja2', 'click', 'pydantic', 'yaml'): sys.modules[name] = None\n"
        "import torch, reactivate\n"
        "layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.ones(2, 4, 8)\n"
        "print(reactivate.explain(model, x))\n"
        "plan = reactivate.plan(model, x, budget='100%')\n"
        "print(plan)\n"
        "print(plan.measure())\n"
        "print(reactivate.verify(model, x))\n"
        "print(reactivate.apply(model, plan))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for said in ("Kept for the backward", "fits into", "Peak: predicted", "The same, bit for bit", "Plan("):
        assert done.stdout.count(said) == 1, said
    assert all(line.startswith("plan: ") for line in done.stderr.splitlines())  # its progress, on a slow machine


def test_the_first_table_draws_no_random_numbers() -> None:
    """The import of rich does."""
    code = (
        "import random, torch, reactivate\n"
        "explanation = reactivate.explain(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.ones(2, 4))\n"
        "random.seed(0)\n"
        "before = random.getstate()\n"
        "print(explanation)\n"
        "assert random.getstate() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_nothing_to_explain_is_refused() -> None:
    with pytest.raises(UsageError, match="requires a gradient"):
        explain(lambda x: x * 2, torch.ones(2))
    model, x = prepared("plain")
    with pytest.raises(UsageError, match=r"no backward .* Write model.requires_grad_\(\)"):
        explain(model.requires_grad_(False), x)
    with pytest.raises(UsageError, match=r"although args\[0\] does: the model detaches it"):
        explain(lambda x: x.detach(), torch.ones(2, requires_grad=True))
