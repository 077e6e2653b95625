"""Reports of a plan: what they say is what the plan says, and they can be read.

Where there is Chromium or Chrome (REACTIVATE_BROWSER names one that is elsewhere) the page is opened in it as well: what it
makes of the page must be what stands in the file, and nothing may stick out of it, cover another or be cut. Without one the
same page is read by Python's own parser alone, and the boxes of labels are those that matplotlib computes.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from several import each

import reactivate
from reactivate import Plan, report
from reactivate.errors import UsageError
from reactivate.planner import text as plan_text
from reactivate.planner.candidates import FULL, KEEP, Candidate
from reactivate.planner.contents import Circumstances, Decision, Fixed, LiveBytes, Point, Prediction, Proof
from reactivate.report import figure, pareto, timeline
from reactivate.report.html import page as written

MIB = 2**20
FIXED = Fixed(parameters=20 * MIB, gradients=20 * MIB, optimizer=40 * MIB, inputs=1 * MIB)
PRODUCTS = Candidate("recompute but products", ("",), ("mlp",))
HOSTILE = "<script>alert('x')</script> & \"$\\frac{1}{2}$\" <img src=https://example.org/x.png onerror=alert(1)>"


# -- plans ------------------------------------------------------------------------------------------------------------


def step(blocks: int, kept: int, recomputed: int, seconds: float) -> Prediction:
    """A forward that keeps `kept` bytes a block, a backward in which each block makes `recomputed` again."""
    moments = [LiveBytes(seconds * (k + 1) / (3 * blocks), (k + 1) * kept, 0, 2 * MIB) for k in range(blocks)]
    forward = moments[-1].seconds
    for k in range(blocks):
        now = forward + (seconds - forward) * (k + 1) / blocks
        moments.append(LiveBytes(now, (blocks - k) * kept, recomputed, 3 * MIB))
    peak = FIXED.total + max(moment.total for moment in moments)
    return Prediction(peak, seconds, forward, tuple(moments))


def made(candidates: list[Candidate], **changes: Any) -> Plan:
    """A plan as `reactivate.plan` would return it, for a chain of blocks."""
    count = len(candidates)
    plain = step(count, 40 * MIB, 0, 0.1 * count)
    recomputed = sum(candidate is not KEEP for candidate in candidates)
    predicted = plain if not recomputed else step(count, 9 * MIB, 33 * MIB, 0.1 * count + 0.03 * recomputed)
    least = predicted.peak_bytes // 2
    span = plain.peak_bytes - least
    frontier = [
        Point("planned", least + k * span // 11, plain.seconds * (1.4 - 0.4 * (k / 11) ** 0.5)) for k in range(12)
    ]
    policies = [
        Point("none()", plain.peak_bytes, plain.seconds),
        Point("full()", least, plain.seconds * 1.5),
        *(Point(f"recompute_every({k})", least + k * span // 5, plain.seconds * (1.5 - 0.1 * k)) for k in (2, 3)),
    ]
    decisions = [
        Decision(f"blocks.{k}", "Block", "0" * 16, candidate, 9 * MIB, 0.03 * (candidate is not KEEP))
        for k, candidate in enumerate(candidates)
    ]
    plan = Plan(
        budget="75%",
        budget_bytes=predicted.peak_bytes + 3 * MIB,
        made_for=Circumstances("GPT", (("args[0]", (6, 256), "int64"),), "cpu", "2.13.0", "default", False),
        decisions=tuple(decisions),
        fixed=FIXED,
        plain=plain,
        predicted=predicted,
        frontier=tuple(frontier),
        policies=tuple(policies),
        proof=Proof("simulated", predicted.peak_bytes, 2),
        optimizer_bytes=90 * MIB,
        planning_seconds=4.25,
    )
    return replace(plan, **changes)


TWELVE = made([FULL, *[PRODUCTS] * 7, KEEP, FULL, KEEP, KEEP])
SINGLE = made(
    [KEEP], policies=tuple(Point(name, 150 * MIB, 0.1) for name in ("none()", "full()", "recompute_every(2)"))
)
SINGLE = replace(SINGLE, decisions=(replace(SINGLE.decisions[0], path=""),))
EVIL = replace(
    TWELVE,
    made_for=Circumstances(HOSTILE, ((HOSTILE, (1,), HOSTILE),), HOSTILE, HOSTILE, HOSTILE, True),
    decisions=tuple(replace(item, path=f"{HOSTILE}.{k}", kind=HOSTILE) for k, item in enumerate(TWELVE.decisions)),
    policies=tuple(replace(item, label=HOSTILE) for item in TWELVE.policies),
)
LONG = replace(
    made([FULL, PRODUCTS, KEEP] * 6),
    made_for=replace(TWELVE.made_for, model="Qwen3OmniMoeThinkerForConditionalGeneration"),
)
LONG = replace(
    LONG,
    decisions=tuple(
        replace(
            item,
            path=f"thinker.model.language_model.layers.{k}",
            kind="Qwen3OmniMoeThinkerTextDecoderLayer",
            candidate=replace(item.candidate, name="recompute self_attn and mlp, inputs to host"),
            held_bytes=(1000 + k) * MIB,
        )
        for k, item in enumerate(LONG.decisions)
    ),
)
PLANS = {
    "twelve": TWELVE,
    "long": LONG,
    "all kept": made([KEEP] * 12),
    "single": SINGLE,
    "hundred": made([FULL, KEEP] * 20 + [PRODUCTS] * 60),
    "loose": replace(TWELVE, budget="80GiB", budget_bytes=80 * 2**30),
    "optimizer": replace(TWELVE, optimizer_bytes=TWELVE.budget_bytes - 1, largest=48),
    "crowded": replace(
        TWELVE,
        policies=tuple(Point(f"policy_{k}()", 200 * MIB + k * MIB // 2, 1.4 + k / 300) for k in range(6)),
    ),
    "untimed": replace(
        TWELVE,
        plain=replace(TWELVE.plain, seconds=0.0, forward_seconds=0.0),
        predicted=replace(TWELVE.predicted, seconds=0.0, forward_seconds=0.0),
        frontier=(),
        policies=(),
    ),
    "hostile": EVIL,
}
page = functools.cache(written)  # a second each
every_plan = each("plan", PLANS.values(), ids=PLANS)


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


# -- pictures ---------------------------------------------------------------------------------------------------------


def line(axes: Any, label: str) -> Line2D:
    (found,) = [item for item in axes.get_lines() if item.get_label() == label]
    return found


def words_of(axes: Any) -> list[str]:
    """List the texts of a picture."""
    return [text.get_text() for text in axes.texts]


def upright(axes: Any, color: str) -> list[Line2D]:
    return [item for item in axes.get_lines() if item.get_color() == color and len(set(item.get_xdata())) == 1]


@every_plan
def test_the_mountain_is_as_high_as_the_peak(plan: Plan) -> None:
    (axes,) = figure.drawn(plan, timeline.draw).axes
    unit, scale = figure.byte_unit(plan.plain.peak_bytes)
    assert axes.get_ylabel() == f"memory ({unit})"
    heights = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    assert max(heights) * scale == pytest.approx(plan.predicted.peak_bytes, abs=1)
    assert max(line(axes, "plain step").get_ydata()) * scale == pytest.approx(plan.plain.peak_bytes, abs=1)
    assert axes.get_ylim()[1] * scale > plan.plain.peak_bytes


def test_the_mountain_is_made_of_what_memory_is_for() -> None:
    (axes,) = figure.drawn(TWELVE, timeline.draw).axes
    peak = TWELVE.predicted.peak
    before = max(item.seconds for item in TWELVE.predicted.moments if item.seconds < peak.seconds)
    time, low = (before + peak.seconds) / 2, 0.0
    areas = {area.get_label(): area.get_paths()[0] for area in axes.collections}
    sizes = plan_text.bytes_at(TWELVE, TWELVE.predicted.peak)
    assert list(areas) == [name for name in plan_text.KINDS if sizes[name]]
    assert sum(sizes.values()) == TWELVE.predicted.peak_bytes
    for name, path in areas.items():
        high = low + sizes[name] / MIB
        inside = [path.contains_point((time, y)) for y in (low - 0.1, low + 0.1, high - 0.1, high + 0.1)]
        assert inside == [False, True, True, False], name
        low = high


@every_plan
def test_the_budget_and_the_end_of_forward_are_lines(plan: Plan) -> None:
    (axes,) = figure.drawn(plan, timeline.draw).axes
    _, scale = figure.byte_unit(plan.plain.peak_bytes)
    (budget,) = [item for item in axes.get_lines() if item.get_color() == figure.BUDGET]
    assert [y * scale for y in budget.get_ydata()] == [plan.budget_bytes] * 2
    labels = words_of(axes)
    is_visible = plan.budget_bytes / scale < axes.get_ylim()[1]
    assert ("↑" in labels[0]) is not is_visible
    assert labels[0].split()[-2:] == report.html.in_words(plan.budget_bytes).split()
    _, tick = plan_text.second_unit(max(plan.plain.seconds, plan.predicted.seconds))
    (end,) = upright(axes, figure.INK)
    assert end.get_xdata()[0] == plan.predicted.forward_seconds / tick


@every_plan
def test_every_choice_is_where_it_belongs(plan: Plan) -> None:
    (axes,) = figure.drawn(plan, pareto.draw).axes
    points = [plan_text.plan_point(plan), *plan.frontier, *plan.policies]
    _, scale = figure.byte_unit(max(point.peak_bytes for point in points))
    _, tick = plan_text.second_unit(max(point.seconds for point in points))

    def places(found: Any) -> list[tuple[float, float]]:
        return [(point.peak_bytes / scale, point.seconds / tick) for point in found]

    def shown(label: str) -> list[tuple[float, float]]:
        return list(zip(line(axes, label).get_xdata(), line(axes, label).get_ydata()))

    assert shown("this plan") == places([plan_text.plan_point(plan)])
    if plan.frontier:
        assert shown("plans") == places(plan.frontier)
    (budget,) = upright(axes, figure.BUDGET)
    assert budget.get_xdata()[0] * scale == plan.budget_bytes
    low, high = axes.get_xlim()
    assert all(low <= x <= high for x, _ in places(points))
    spans = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
    assert [(span.x0, span.x1) for span in spans] == (
        [(pytest.approx(plan.budget_bytes / scale), pytest.approx(high))] if plan.budget_bytes / scale < high else []
    )
    policies = plan_text.together(plan.policies)
    labels = [item.get_text() for item in axes.get_legend().get_texts()]
    assert labels == ["plans"] * bool(plan.frontier) + [point.label for point in policies] + ["this plan"]
    marks = [item for item in axes.get_lines() if item.get_label() in {point.label for point in policies}]
    assert [(*mark.get_xdata(), *mark.get_ydata()) for mark in marks] == places(policies)


def boxes(drawn: Figure) -> dict[str, Bbox]:
    """Of all that is written in a picture, in pixels, the numbers at its axes left out."""
    drawn.draw_without_rendering()
    texts = [text for axes in drawn.axes for text in axes.texts]
    texts += [text for axes in drawn.axes for text in axes.get_legend().get_texts()]
    texts += [axis.label for axes in drawn.axes for axis in (axes.xaxis, axes.yaxis)]
    return {f"{number}: {text.get_text()}": text.get_window_extent() for number, text in enumerate(texts)}


@each("picture", [timeline, pareto])
@each("size", [figure.SIZE, report.html.SIZE], ids=["file", "page"])
@each("name", [name for name in PLANS if name != "hostile"])
def test_no_words_overlap_or_are_cut(picture: Any, size: tuple[float, float], name: str) -> None:
    drawn = figure.drawn(PLANS[name], picture.draw, size=size)
    found = boxes(drawn)
    assert len(found) >= 4
    for words, box in found.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1, words
    if picture is pareto:
        (axes,) = drawn.axes
        inside = axes.get_window_extent()
        assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for _, box in zip(words_of(axes), found.values()))
    for (words, box), (others, beside) in itertools.combinations(found.items(), 2):
        assert not box.overlaps(beside), (words, others)


@pytest.mark.parametrize("plan", [TWELVE, EVIL], ids=["twelve", "hostile"])
def test_the_pictures_as_a_file(plan: Plan, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png"):
        report.write(plan, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    texts = {
        "".join(item.itertext()) for item in ElementTree.parse(tmp_path / "a.svg").iter() if item.tag.endswith("}text")
    }
    assert "workspace" in texts and any("this plan" in text for text in texts)
    with pytest.raises(UsageError, match=r"\.png, \.svg.*ends in '\.gif'"):
        report.write(plan, tmp_path / "a.gif")


# -- the page ---------------------------------------------------------------------------------------------------------

_VOID = {"meta", "link", "img", "br", "hr", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    def walk(self) -> Iterator[Element]:
        yield self
        for item in self.inside:
            if isinstance(item, Element):
                yield from item.walk()

    def all(self, tag: str) -> list[Element]:
        return [item for item in self.walk() if item.tag == tag]

    @property
    def text(self) -> str:
        return "".join(item if isinstance(item, str) else item.text for item in self.inside)


class Reader(HTMLParser):
    """Reads a page, and insists that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def read(text: str) -> Element:
    reader = Reader()
    reader.feed(text)
    reader.close()
    (root,) = reader.open
    return root


def rows_of(root: Element, number: int) -> list[list[Element]]:
    return [row.all("td") for row in root.all("tbody")[number].all("tr")]


def texts_of(root: Element, number: int) -> list[list[str]]:
    return [[cell.text.replace("\u00a0", " ") for cell in row] for row in rows_of(root, number)]


@every_plan
def test_the_page_is_well_formed(plan: Plan) -> None:
    text = page(plan)
    root = read(text)
    assert text.startswith("<!doctype html>")
    assert len(root.all("head")[0].all("title")) == 1
    for tag in ("html", "head", "body", "main", "h1"):
        assert len(root.all(tag)) == 1, tag
    assert len(root.all("svg")) == 2
    ids = [item.attributes["id"] for item in root.walk() if "id" in item.attributes]
    assert len(ids) == len(set(ids)) > 10
    targets = re.findall(r"(?:url\(|href=\")#([^)\"]+)", text)
    assert set(targets) <= set(ids)
    assert len(targets) > 2


@every_plan
def test_the_page_needs_nothing_from_outside(plan: Plan) -> None:
    root = read(page(plan))
    assert not {item.tag for item in root.walk()} & {
        "link",
        "img",
        "image",
        "iframe",
        "object",
        "embed",
        "base",
    }
    for item in root.walk():
        for name, value in item.attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value.startswith("#")
            assert not re.search(r"url\((?!#)", value)
    styles = "".join(item.text for item in root.all("style"))
    assert "@import" not in styles
    assert "url(" not in styles
    policies = [item.attributes["content"] for item in root.all("meta") if "http-equiv" in item.attributes]
    (script,) = root.all("script")
    assert script.attributes == {}
    assert "fetch(" not in script.text and "import" not in script.text
    hashed = b64encode(sha256(script.text.encode()).digest()).decode()  # no other script may run, whatever a name says
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"]


@every_plan
def test_the_page_has_every_block_once(plan: Plan) -> None:
    blocks = rows_of(read(page(plan)), 0)[:-1]
    found: list[str] = []
    for row in blocks:
        folded = [item.text for item in row[0].all("li")]
        assert not folded or row[0].all("summary")[0].text == f"{folded[0]}…{folded[-1]} ({len(folded)} alike)"
        found += folded or [row[0].text]
    assert found == [decision.path or "the model itself" for decision in plan.decisions]


def test_the_page_says_what_the_plan_says() -> None:
    root = read(page(TWELVE))
    assert root.all("h1")[0].text == root.all("title")[0].text == "GPT in 228 MiB"
    paragraphs = [item.text for item in root.all("p")]
    assert paragraphs == [plan_text.verdict(TWELVE), plan_text.proof(TWELVE)]
    assert texts_of(root, 0)[-1] == ["all 12", "", "", "108 MiB", "270 ms"]
    marked = [row for row in root.all("tr") if row.attributes.get("class") == "marked"]
    assert [[cell.text for cell in row.all("td")][:3] for row in marked] == [["→", "this plan", "225 MiB"]]
    assert texts_of(root, 1) == [
        ["parameters", "20.0 MiB", "8.9 %"],
        ["gradients", "20.0 MiB", "8.9 %"],
        ["optimizer", "40.0 MiB", "17.8 %"],
        ["inputs", "1.00 MiB", "0.4 %"],
        ["kept", "108 MiB", "48.0 %"],
        ["recomputed", "33.0 MiB", "14.7 %"],
        ["workspace", "3.00 MiB", "1.3 %"],
        ["forward and backward", "225 MiB", "100.0 %"],
        ["the optimizer's step", "90.0 MiB", "40.0 %"],
    ]
    facts = dict(zip((item.text for item in root.all("dt")), (item.text for item in root.all("dd"))))
    assert facts["torch"] == "2.13.0"
    assert facts["inputs"] == "args[0]: int64 of (6, 256)"
    assert facts["budget"] == f"75%: {TWELVE.budget_bytes:,} bytes"


def test_the_pictures_of_the_page_are_described() -> None:
    pictures = read(page(TWELVE)).all("figure")
    words = [item.attributes["aria-label"] for item in pictures]
    assert [item.attributes["role"] for item in pictures] == ["img", "img"]
    assert "it rises to 225 MiB" in words[0]
    assert "a line at 228 MiB" in words[0]
    assert "rises to 564 MiB" in words[0]
    assert "full(), 112 MiB and 1.80 s" in words[1]
    assert "This one takes 225 MiB and 1.47 s" in words[1]


def test_the_pictures_of_the_page_have_its_colors() -> None:
    text = page(TWELVE)
    assert "currentColor" in text
    assert figure.PAPER not in text
    assert not {figure.INK, figure.BUDGET} & set(re.findall("#[0-9a-f]{6}", text.partition("<body>")[2]))
    assert text.count("var(--budget)") > 4
    assert "prefers-color-scheme: dark" in text


def test_hostile_names_are_only_text() -> None:
    root = read(page(EVIL))
    assert root.all("h1")[0].text == f"{HOSTILE} in 228 MiB"
    assert rows_of(root, 0)[0][0].text == f"{HOSTILE}.0"
    assert HOSTILE in [text.text for text in root.all("text")]
    assert HOSTILE in root.all("figure")[1].attributes["aria-label"]


# -- the page in a browser --------------------------------------------------------------------------------------------

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("REACTIVATE_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=10000")

_LOOK = """<!doctype html><meta charset="utf-8"><title>look</title><body>%s<script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const inner = frame.contentDocument, bad = [];
    const visible = box => `${box.left|0},${box.top|0} to ${box.right|0},${box.bottom|0}`;
    for (const svg of inner.querySelectorAll("svg")) {
      const edge = svg.getBoundingClientRect();
      const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
      texts.forEach(([name, box], index) => {
        if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1 || box.bottom > edge.bottom + 1)
          bad.push(`${name} is cut: ${visible(box)} of ${visible(edge)}`);
        for (const [other, beside] of texts.slice(index + 1))
          if (Math.min(box.right, beside.right) - Math.max(box.left, beside.left) > 1
              && Math.min(box.bottom, beside.bottom) - Math.max(box.top, beside.top) > 2)
            bad.push(`${name} covers ${other}`);
      });
    }
    const page = inner.documentElement;
    const cut = [...inner.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth);
    return {cut: cut.map(box => box.getAttribute("aria-label")), asked: frame.clientWidth, width: page.scrollWidth,
            height: page.scrollHeight, bad, texts: inner.querySelectorAll("svg text").length, title: inner.title};
  });
  document.body.textContent = JSON.stringify(found);
};
</script>"""


def opened(path: Path) -> Element:
    """Return what a browser makes of a file."""
    assert BROWSER is not None
    command = [BROWSER, *_OPTIONS, f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return read(done.stdout.partition("\n")[2] if done.stdout.startswith("<!") else done.stdout)


def shape(root: Element) -> list[tuple[str, dict[str, str], str]]:
    return [
        (item.tag, item.attributes, "".join(part for part in item.inside if isinstance(part, str)).strip())
        for item in root.all("html")[0].walk()
    ]


READERS = {"parser": lambda path: read(path.read_text("utf-8")), **({"browser": opened} if BROWSER else {})}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", ["twelve", "single", "hostile"])
def test_the_page_is_read_as_it_is_written(reader: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(page(PLANS[name]), encoding="utf-8")
    root = reader(path)
    assert shape(root) == shape(read(page(PLANS[name])))
    assert Counter(item.tag for item in root.walk())["svg"] == 2


if BROWSER:

    def test_the_page_fits_on_a_phone_and_on_a_screen(tmp_path: Path) -> None:
        widths, names = (360, 1200, 1300), [name for name in PLANS if name != "hostile"]
        frames = [
            f'<iframe style="border:0;width:{width}px;height:3000px" srcdoc="{html.escape(page(PLANS[name]))}"></iframe>'
            for name in names
            for width in widths
        ]
        path = tmp_path / "look.html"
        path.write_text(_LOOK % "".join(frames), encoding="utf-8")
        found = json.loads(opened(path).all("body")[0].text)
        assert [item["asked"] for item in found] == [*widths] * len(names)
        for item, name in zip(found, [name for name in names for _ in widths]):
            assert item["width"] <= item["asked"], (name, item)
            assert item["texts"] > 20, (name, item)
            assert not item["bad"], (name, item)
            assert item["asked"] < 1000 or not item["cut"], (name, item)


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
