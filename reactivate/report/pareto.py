"""The choice between memory and time, as a picture."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from reactivate._engine.accounts import in_words
from reactivate.planner.cost.prediction import Point
from reactivate.planner.plan_table import chosen_of, seconds_in_words, slowdown, together
from reactivate.planner.planned import Planned
from reactivate.report.figure import (
    BUDGET,
    INK,
    PLAIN,
    SIZE,
    byte_unit,
    drawn,
    legend,
    save as _save,
    second_unit,
    title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

LINE, CHOSEN = "#5f7ea8", "#e07a3f"
_RIGHT = 0.6  # of the axis: a budget beyond is named on its left
_AROUND = 2.0  # pixels around a label that stay free: other fonts are wider
_NEAR = 15.0  # points: a label that is farther from its point is led to by a line
_MARK = 5.0  # points: half of the widest mark
_Place = tuple[float, float]


def draw(axes: Axes, plan: Planned) -> None:
    """Every plan as a line, this one as a dot on it, fixed policies as squares, what is over the budget in red.

    Args:
        axes: where to. What else is on the figure should be there already, as labels are placed where there is room.
        plan: the plan.
    """
    chosen = chosen_of(plan)
    everything = [chosen, *plan.frontier, *plan.policies]
    unit, scale = byte_unit(max(point.peak_bytes for point in everything))
    clock, tick = second_unit(max(point.seconds for point in everything))
    policies = together(plan.policies)
    _draw_points(axes, plan, policies, scale, tick)
    axes.set(xlabel=f"peak memory ({unit})", ylabel=f"step ({clock})")
    _set_limits(axes, everything, scale, tick)
    _draw_budget(axes, plan, scale)
    title(axes, f"Step {seconds_in_words(chosen.seconds)}, plain {seconds_in_words(plan.plain.seconds)}")
    legend(axes)
    _label(axes, [chosen, *policies], plan, scale, tick)


def figure_of(plan: Planned, size: tuple[float, float] = SIZE) -> Figure:
    """The picture alone, of a width and a height in inches."""
    return drawn(lambda figure: draw(figure.add_subplot(), plan), size)


def save(plan: Planned, path: str | os.PathLike[str]) -> None:
    """Write the picture as PNG or SVG, by the suffix.

    Raises:
        UsageError: it is neither, or matplotlib is not installed.
    """
    _save(figure_of(plan), path)


def described(plan: Planned) -> str:
    """The picture in words, for those who do not see it."""
    chosen = chosen_of(plan)
    points = [*plan.frontier, chosen]
    least, most = min(points, key=lambda point: point.peak_bytes), max(points, key=lambda point: point.peak_bytes)
    policies = "; ".join(
        f"{point.label}, {in_words(point.peak_bytes)} and {seconds_in_words(point.seconds)}"
        for point in together(plan.policies)
    )
    return (
        f"Step time over peak memory. The plans lead from {in_words(least.peak_bytes)} and {seconds_in_words(least.seconds)} "
        f"to {in_words(most.peak_bytes)} and {seconds_in_words(most.seconds)}. This one takes "
        f"{in_words(chosen.peak_bytes)} and {seconds_in_words(chosen.seconds)}; the budget is a line at "
        f"{in_words(plan.budget_bytes)}. Fixed policies: {policies or 'none'}."
    )


def _draw_points(axes: Axes, plan: Planned, policies: Iterable[Point], scale: int, tick: float) -> None:
    def drawn_as(points: Iterable[Point], style: str, **options: object) -> None:
        pairs = [(point.peak_bytes / scale, point.seconds / tick) for point in points]
        if pairs:
            axes.plot(*zip(*pairs), style, **options)  # type: ignore[arg-type]

    drawn_as(plan.frontier, ".-", drawstyle="steps-post", color=LINE, linewidth=1.4, markersize=5, label="plans")
    drawn_as(policies, "s", color=PLAIN, fillstyle="none", markersize=6, markeredgewidth=1.4, label="fixed policies")
    drawn_as([chosen_of(plan)], "o", color=CHOSEN, markersize=9, label="this plan")


def _set_limits(axes: Axes, points: Iterable[Point], scale: int, tick: float) -> None:
    """Some room around the points, in which labels find a place; the budget does not count."""
    for set_limits, values in (
        (axes.set_xlim, [point.peak_bytes / scale for point in points]),
        (axes.set_ylim, [point.seconds / tick for point in points]),
    ):
        low, high = min(values), max(values)
        room = 0.14 * (high - low) or 0.1 * high or 1.0
        set_limits(max(0.0, low - room), high + 1.6 * room)


def _draw_budget(axes: Axes, plan: Planned, scale: int) -> None:
    budget, (low, high) = plan.budget_bytes / scale, axes.get_xlim()
    axes.axvline(budget, color=BUDGET, linewidth=1.4)
    if budget < high:
        axes.axvspan(budget, high, color=BUDGET, alpha=0.08, linewidth=0)
        axes.set_xlim(low, high)
    is_right = budget > low + _RIGHT * (high - low)
    axes.annotate(
        f"budget {in_words(plan.budget_bytes)}{' →' if budget >= high else ''}",
        (min(budget, high), 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if is_right else 4, -2),
        textcoords="offset points",
        color=BUDGET,
        fontsize=9,
        horizontalalignment="right" if is_right else "left",
        verticalalignment="top",
    )


# -- labels -----------------------------------------------------------------------------------------------------------


def _label(axes: Axes, points: list[Point], plan: Planned, scale: int, tick: float) -> None:
    """Name each point, next to it where there is room."""
    axes.figure.canvas.figure.draw_without_rendering()  # for the layout, and so for what is next to what
    marks = [(point.peak_bytes / scale, point.seconds / tick) for point in points]
    taken = [_box(axes, mark, mark, _MARK) for mark in marks]
    taken += [_box(axes, *ends, 1.0) for ends in _lines(axes, plan, scale, tick)]
    taken += [text.get_window_extent() for text in axes.texts]
    for index, point in enumerate(points):
        words = point.label.replace(", ", "\n") if index else f"this plan{_after_comma(slowdown(plan, point.seconds))}"
        label = axes.annotate(
            words,
            marks[index],
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=9,
            color=INK,
            fontweight="normal" if index else "bold",
            parse_math=False,
        )
        label.set_in_layout(False)
        taken.append(_put(axes, label, taken))


def _put(axes: Axes, label: Annotation, taken: list[Bbox]) -> Bbox:
    """Move a label to the nearest place that is free, and say where it is; to the first where none is."""
    best, inside = None, axes.get_window_extent()
    for offset, horizontal, vertical in _places():
        label.set(position=offset, horizontalalignment=horizontal, verticalalignment=vertical)
        box = label.get_window_extent().padded(_AROUND)
        hidden = sum(_common(box, other) for other in taken) + box.width * box.height - _common(box, inside)
        if best is None or hidden < best[0] - 1e-6:
            best = (hidden, offset, horizontal, vertical)
        if hidden <= 1e-6:
            break
    assert best is not None
    label.set(position=best[1], horizontalalignment=best[2], verticalalignment=best[3])
    if max(map(abs, best[1])) > _NEAR:
        _lead(axes, label, best[1])
    return label.get_window_extent().padded(_AROUND)


def _lead(axes: Axes, label: Annotation, offset: _Place) -> None:
    """A thin line from a point to its label, which is not next to it."""
    axes.annotate(
        "",
        label.xy,
        xytext=offset,
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": PLAIN, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3},
    ).set_in_layout(False)


def _places() -> Iterator[tuple[tuple[float, float], str, str]]:
    """Offsets in points, with the alignments that go with them, near ones first."""
    sides = ((1, 1), (1, 0), (-1, -1), (1, -1), (-1, 1), (-1, 0), (0, 1), (0, -1))
    for distance, (right, up) in itertools.product((7, 12, 20, 32, 48), sides):
        horizontal = {1: "left", 0: "center", -1: "right"}[right]
        vertical = {1: "bottom", 0: "center", -1: "top"}[up]
        yield (distance * right, distance * up), horizontal, vertical


def _lines(axes: Axes, plan: Planned, scale: int, tick: float) -> Iterator[tuple[_Place, _Place]]:
    """The ends of each piece of the frontier and of the budget."""
    corners = [(point.peak_bytes / scale, point.seconds / tick) for point in plan.frontier]
    for (x, y), (next_x, next_y) in itertools.pairwise(corners):
        yield (x, y), (next_x, y)
        yield (next_x, y), (next_x, next_y)
    budget = plan.budget_bytes / scale
    low, high = axes.get_ylim()
    yield (budget, low), (budget, high)


def _box(axes: Axes, start: _Place, end: _Place, around: float) -> Bbox:
    """Return the box around a line between two places of the data, in pixels; `around` is in points."""
    from matplotlib.transforms import Bbox

    (x0, y0), (x1, y1) = axes.transData.transform([start, end])
    margin = around * axes.figure.dpi / 72
    return Bbox([[min(x0, x1) - margin, min(y0, y1) - margin], [max(x0, x1) + margin, max(y0, y1) + margin]])


def _common(box: Bbox, other: Bbox) -> float:
    """Return the area that two boxes share, in square pixels."""
    width = min(box.x1, other.x1) - max(box.x0, other.x0)
    height = min(box.y1, other.y1) - max(box.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))


def _after_comma(words: str) -> str:
    return f", {words}" if words else ""
