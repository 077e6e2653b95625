"""Reports of a plan: the text says what the plan says, and files of every kind are written, or refused with a reason."""

from __future__ import annotations

import itertools
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from report_cases import EVIL, PLANS, SINGLE, TWELVE, every_plan

import reactivate
from reactivate import Plan, report
from reactivate.errors import UsageError
from reactivate.planner import text as plan_text
from reactivate.report.html import page as written

# -- tables of text ---------------------------------------------------------------------------------------------------


def test_the_text_says_what_the_plan_says() -> None:
    text = plan_text.text(TWELVE, width=120).replace("\u00a0", " ")
    assert text.startswith(
        "GPT fits into 228 MiB (75% of the plain step's activation peak). Peak: 225 MiB, plain 564 MiB."
    )
    assert "Step: 1.47 s, plain 1.20 s (+22.5 %)." in text
    assert text.splitlines()[1] == "For a step on cpu, in training mode, with backward called on default."
    assert "Proved by a simulated step that peaked at 225 MiB (the last of 2 plans tried). Planned in 4.25 s." in text
    assert "optimizer 40.0 MiB, inputs 1.00 MiB, kept 108 MiB, recomputed 33.0 MiB, workspace 3.00 MiB." in text
    assert re.search(r"blocks\.1…blocks\.7 \(7 alike\) +Block +recompute but products +63\.0 MiB +210 ms", text)
    assert re.search(r"all 12 +108 MiB +270 ms", text)
    assert re.search(r"→ +this plan +225 MiB +1\.47 s +\+22\.5 % +fits", text)
    assert re.search(r"none\(\) +564 MiB +1\.20 s +\+0\.0 % +over", text)


def test_the_text_names_what_is_special() -> None:
    assert "while the optimizer steps, plain 564 MiB" in plan_text.text(PLANS["optimizer"])
    assert "at a size of 48, the largest that does" in plan_text.text(PLANS["optimizer"])
    assert "Nothing ran: times are predicted." in plan_text.text(EVIL)
    assert "GPT fits into 80.0 GiB. Peak" in plan_text.text(PLANS["loose"])
    assert "the model itself" in plan_text.text(SINGLE)
    assert "full(), recompute_every(2)" in plan_text.text(SINGLE)


@every_plan
def test_the_text_has_every_block_once(plan: Plan) -> None:
    runs = plan_text.runs(plan.decisions)
    assert [decision for alike in runs for decision in alike] == list(plan.decisions)
    assert all(len({(item.kind, item.candidate) for item in alike}) == 1 for alike in runs)
    assert all(first[-1].candidate != then[0].candidate for first, then in itertools.pairwise(runs))
    text = plan_text.text(plan, plain=True)
    assert all(text.count(f"\n{plan_text.named(alike)} ") == 1 for alike in runs)


def test_the_text_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich draws on the page there, and returns nothing, unless it is told not to."""
    text = str(TWELVE)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(TWELVE) == text and text.count("blocks.1…blocks.7 (7 alike)") == 1


@every_plan
def test_a_notebook_shows_the_tables(plan: Plan) -> None:
    page = ElementTree.fromstring(f"<div>{plan._repr_html_().replace('<br>', '<br/>')}</div>")
    assert "".join(page.find("p").itertext()).startswith(plan_text.verdict(plan))
    blocks, *_, choices = page.findall("table")
    assert len(blocks.findall("tbody/tr")) == len(plan_text.runs(plan.decisions)) + 1
    assert len(choices.findall("tbody/tr")) == len(plan_text.choices(plan))


@every_plan
def test_exactly_one_choice_is_marked(plan: Plan) -> None:
    choices, rows = plan_text.choices(plan), [row.cells for row in plan_text.choice_table(plan).rows]
    (chosen,) = [point for point, cells in zip(choices, rows, strict=True) if cells[0] == "→"]
    assert (chosen.peak_bytes, chosen.seconds) == (plan.predicted.peak_bytes, plan.predicted.seconds)
    assert all((cells[-1] == "fits") == (point.peak_bytes <= plan.budget_bytes) for point, cells in zip(choices, rows))
    for point in (*plan.policies, *plan.frontier[:1], *plan.frontier[-1:]):
        assert any(plan_text.is_same(choice, point) for choice in choices)


# -- files, and what is missing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".html", ".png", ".svg", ".txt", ".HTML"])
def test_write_chooses_by_the_suffix(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan{suffix}"
    report.write(TWELVE, str(path))
    starts = {".html": b"<!doctype html>", ".png": b"\x89PNG", ".svg": b"<?xml", ".txt": b"GPT fits into"}
    assert path.read_bytes().startswith(starts[suffix.lower()])


def test_write_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"takes \.html, \.json, \.png, \.svg, \.txt; .*ends in '\.pdf'"):
        report.write(TWELVE, tmp_path / "plan.pdf")
    assert not list(tmp_path.iterdir())


def test_an_explanation_is_written(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    explanation = reactivate.explain(model, torch.ones(2))
    for suffix in (".txt", ".html"):
        report.write(explanation, tmp_path / f"step{suffix}")
        assert "Kept for the backward: 16 B" in (tmp_path / f"step{suffix}").read_text("utf-8")
    with pytest.raises(UsageError, match=r"takes \.html, \.json, \.txt; .*ends in '\.png'"):
        report.write(explanation, tmp_path / "step.png")
    with pytest.raises(UsageError, match=r"takes what plan, explain or compare returned, and a path; got 3"):
        report.write(3, tmp_path / "step.html")  # type: ignore[arg-type]


@pytest.mark.parametrize(("package", "suffix"), [("matplotlib", ".png"), ("matplotlib", ".html"), ("jinja2", ".html")])
def test_what_is_missing_is_named(package: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"{package}, which is not installed: `pip install matplotlib jinja2`"):
        report.write(TWELVE, tmp_path / f"plan{suffix}")
    assert not list(tmp_path.iterdir())


def test_without_rich_tables_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {"rich", *(name for name in sys.modules if name.startswith("rich."))}:
        monkeypatch.setitem(sys.modules, name, None)
    assert str(TWELVE) == plan_text.text(TWELVE, plain=True)
    assert "blocks.1…blocks.7 (7 alike)" in str(TWELVE)
    report.write(TWELVE, tmp_path / "plan.txt")
    assert "blocks.1…blocks.7 (7 alike)" in (tmp_path / "plan.txt").read_text("utf-8")


def test_a_plan_that_was_made_is_reported(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    plan = reactivate.plan(model, torch.randn(8, 64, 32), budget="50%")
    assert plan.predicted.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes
    assert any(decision.candidate.recompute for decision in plan.decisions)
    for suffix in (".html", ".png", ".svg", ".txt"):
        report.write(plan, tmp_path / f"plan{suffix}")
    assert written(Plan.from_json(plan.to_json())) == (tmp_path / "plan.html").read_text("utf-8")
    assert sum(plan_text.at_peak(plan).values()) == plan.predicted.peak_bytes
