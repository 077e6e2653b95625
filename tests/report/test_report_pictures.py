"""Pictures of a plan: lines, areas and labels are where its numbers say, and no words overlap or are cut."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from report_cases import EVIL, MIB, PLANS, TWELVE, every_plan
from several import each

from reactivate import Plan, report
from reactivate.errors import UsageError
from reactivate.planner import text as plan_text
from reactivate.report import figure, pareto, timeline


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
