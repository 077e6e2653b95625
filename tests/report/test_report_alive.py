"""The tensors that are alive at the peak of a plan: their bytes add up to the promise, and reports show them on hover too."""

from __future__ import annotations

import html
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from plan_models import GPT
from report_cases import BROWSER, TWELVE, opened, read, texts_of
from torch import Tensor
from torch.nn import functional as F

import reactivate
from reactivate import Plan
from reactivate.planner import text as plan_text
from reactivate.planner.contents import LiveTensors
from reactivate.planner.text import MOST, alive_table
from reactivate.report import pareto, timeline
from reactivate.report.html import page


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(len(logits.flatten(0, 1)), dtype=torch.long))


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    model, tokens = GPT(layers=4), torch.randint(64, (4, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    return reactivate.plan(model, tokens, budget="100%", loss=loss_of, optimizer=optimizer)


def of(plan: Plan, **facts: object) -> list[LiveTensors]:
    alive = plan.predicted.alive
    return [item for item in alive if all(getattr(item, name) == value for name, value in facts.items())]


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["100%", "60%", "35%"])
def test_the_tensors_add_up_to_the_peak_to_the_byte(plan: Plan, budget: str) -> None:
    tight = plan.at(budget)
    for step in (tight.plain, tight.predicted):
        assert sum(item.nbytes for item in step.alive) == step.peak_bytes - tight.fixed.total > 0
        sizes = plan_text.bytes_at(tight, step.peak)
        for kind in ("kept", "recomputed", "workspace"):
            assert sum(item.nbytes for item in step.alive if item.kind == kind) == sizes[kind]
    assert Plan.from_json(json.loads(json.dumps(tight.to_json()))) == tight


def test_on_an_accelerator_they_add_up_as_its_allocator_rounds() -> None:
    with torch.device("meta"):
        model, tokens = GPT(layers=4), torch.randint(64, (3, 33))
    plan = reactivate.plan(model, tokens, budget="50%", loss=lambda out: out.float().sum(), device="H100-SXM")
    assert sum(item.nbytes for item in plan.predicted.alive) == plan.predicted.peak_bytes - plan.fixed.total
    assert all(item.nbytes % 512 == 0 for item in plan.predicted.alive)


def test_a_tensor_has_the_name_of_what_made_it_and_of_the_block_that_holds_it(plan: Plan) -> None:
    (qkv,) = of(plan, op="addmm", module="*.attn.qkv")
    assert (qkv.shape, qkv.dtype, qkv.count) == ((256, 96), "float32", 4)
    assert qkv.held_by == tuple(f"blocks.{number}" for number in range(4))
    assert qkv.nbytes == 4 * 256 * 96 * 4
    (embedded,) = of(plan, op="embedding")
    assert (embedded.module, embedded.held_by) == ("embed", ("blocks.0",))  # its input
    (logits,) = of(plan, op="addmm", module="head")
    assert logits.held_by == ("the step",)  # the model's output is alive to the end


def test_recomputed_tensors_are_told_from_kept_ones() -> None:
    model = GPT(layers=4, wide=(32, 2, 2, 2))  # the first block is the peak, when it is recomputed
    plan = reactivate.plan(model, torch.randint(64, (4, 64)), budget="100%", loss=loss_of)
    with pytest.raises(reactivate.errors.PlanInfeasible) as caught:
        plan.at(1)
    least = plan.at(caught.value.least_bytes)
    (wide,) = of(least, op="gelu", module="*.mlp.2")
    assert (wide.kind, wide.held_by, wide.shape) == ("recomputed", ("blocks.0",), (4, 64, 1024))


# -- tables -----------------------------------------------------------------------------------------------------------


def test_the_table_has_the_largest_and_sums_up_the_rest(plan: Plan) -> None:
    table = alive_table(plan)
    *rows, total = table.rows
    assert len(rows) == MOST + 1
    assert rows[-1].cells[0].endswith("other kinds")
    assert total.is_total and total.cells[4] == plan_text.in_words(plan.predicted.peak_bytes)
    names = [row.cells[0] for row in alive_table(plan, 100).rows]
    assert {"parameters", "gradients", "optimizer", "inputs"} <= set(names)
    assert len(names) == len(plan.predicted.alive) + 4 + 1
    assert "alive at the peak" in plan_text.text(plan)


def test_a_plan_of_an_older_file_has_no_such_table() -> None:
    assert not TWELVE.predicted.alive
    assert "alive at the peak" not in plan_text.text(TWELVE)
    assert "Tensors at the peak" not in page(TWELVE)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_tensors(plan: Plan) -> None:
    root = read(page(plan))
    assert [item.text for item in root.all("h2")][-1] == "Tensors at the peak"
    rows = texts_of(root, 3)
    assert ["addmm", "*.attn.qkv", "4 x (256, 96)", "float32", "384 KiB", "kept"] in [row[:6] for row in rows]
    assert rows[-1][0] == "the peak"


def test_each_point_of_the_frontier_has_a_button_for_its_call(plan: Plan) -> None:
    tight = plan.at("60%")
    root = read(page(tight))
    calls = [item.attributes["data-copy"] for item in root.all("button")]
    assert calls.count('plan.at("60%")') == 1
    for point in tight.frontier:
        if not plan_text.is_same(point, plan_text.plan_point(tight)):
            assert calls.count(f'plan.at("{point.peak_bytes}B")') == 1
    for call in calls:  # it is what it says
        again = eval(call, {"plan": tight})
        assert again.predicted.peak_bytes <= again.budget_bytes
    circles = [item.attributes.get("data-copy") for item in root.all("circle")]
    assert set(filter(None, circles)) == set(calls)


def test_spots_say_what_there_is_at_a_moment(plan: Plan) -> None:
    bands = list(timeline.spots(plan))
    peak = plan.predicted.peak
    (top,) = [band for band in bands if band.words.startswith(f"{plan_text.in_words(plan.predicted.peak_bytes)} at ")][
        :1
    ]
    assert f"kept {plan_text.in_words(peak.kept)}" in top.words
    assert all(before.right == after.left for before, after in itertools.pairwise(bands))
    assert [dot.words.partition("\n")[0] for dot in pareto.spots(plan)][-1] == "this plan"
    titles = [item.all("title")[0].text for item in read(page(plan)).all("rect") if item.all("title")]
    assert titles == [band.words for band in bands]


def test_spots_lie_where_the_picture_has_what_they_tell() -> None:
    """A spot of a point is in the middle of the mark that matplotlib draws for this point."""
    text = page(TWELVE)
    places = {
        tuple(map(float, item)) for item in re.findall(r'<use xlink:href="#[^"]+" x="([0-9.]+)" y="([0-9.]+)"', text)
    }
    dots = [tuple(map(float, item)) for item in re.findall(r'<circle cx="([0-9.]+)" cy="([0-9.]+)"', text)]
    assert len(dots) == len(TWELVE.frontier) + len(TWELVE.policies) + 1
    for x, y in dots:
        assert min(abs(x - left) + abs(y - top) for left, top in places) < 0.02


if BROWSER:
    LOOK = """<!doctype html><meta charset="utf-8"><title>look</title><body>
    <iframe style="border:0;width:1200px;height:3000px" srcdoc="%s"></iframe>
    <script>
    onload = async () => {
      const frame = document.querySelector("iframe"), inner = frame.contentDocument, view = frame.contentWindow;
      const found = {copied: []}, hover = inner.getElementById("hover");
      Object.defineProperty(view.navigator, "clipboard", {value: {writeText: async text => found.copied.push(text)}});
      const point = (kind, item) =>
        item.dispatchEvent(new view.PointerEvent(kind, {bubbles: true, clientX: 40, clientY: 40}));
      found.before = hover.hidden;
      const band = inner.querySelector(".spots rect");
      found.title = band.querySelector("title").textContent;
      point("pointermove", band);
      found.shown = hover.textContent, found.titles = band.querySelectorAll("title").length;
      point("pointermove", inner.querySelector("h1"));
      found.after = hover.hidden;
      inner.querySelector("button[data-copy]").click();
      await new Promise(done => setTimeout(done, 50));
      found.told = hover.textContent;
      document.body.textContent = JSON.stringify(found);
    };
    </script>"""

    def test_the_script_shows_words_and_copies_calls(plan: Plan, tmp_path: Path) -> None:
        path = tmp_path / "look.html"
        path.write_text(LOOK % html.escape(page(plan)), encoding="utf-8")
        found = json.loads(opened(path).all("body")[0].text)
        assert found["before"] and found["after"]
        assert found["shown"] == found["title"] and found["titles"] == 0
        assert found["copied"] == [read(page(plan)).all("button")[0].attributes["data-copy"]]
        assert found["told"] == f"copied: {found['copied'][0]}"
