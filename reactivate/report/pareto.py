"""The choice between memory and time, as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from reactivate._region.accounts import in_words
from reactivate.planner.contents import PlanContents, Point
from reactivate.planner.text import plan_point, planning_call, second_unit, seconds_in_words, slowdown, together
from reactivate.report.figure import BUDGET, PLAIN, byte_unit, legend, note, title
from reactivate.report.hover import Dot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE, CHOSEN = "#5f7ea8", "#e07a3f"
_RIGHT = 0.6  # of the axis: a budget beyond is named on its left
_MARKS = "sD^v<>ph"  # of fixed policies, one each


def draw(axes: Axes, plan: PlanContents) -> None:
    """Every plan as a line, this one as a dot on it, each fixed policy as a mark, what is over the budget in red."""
    chosen = plan_point(plan)
    everything = [chosen, *plan.frontier, *plan.policies]
    (unit, scale), (clock, tick) = _units_of(everything)
    _draw_points(axes, plan, scale, tick)
    axes.set(xlabel=f"peak memory ({unit})", ylabel=f"step ({clock})")
    _set_limits(axes, everything, scale, tick)
    _draw_budget(axes, plan, scale)
    title(axes, f"Step {_time_of(plan, chosen)}; plain {seconds_in_words(plan.plain.seconds)}")
    legend(axes, columns=2)


def described(plan: PlanContents) -> str:
    """The picture in words, for those who do not see it."""
    chosen = plan_point(plan)
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


def spots(plan: PlanContents) -> Iterator[Dot]:
    """Yield every choice, to be shown on hover; a click on one that was planned copies the call that plans it."""
    everything = [*plan.policies, *plan.frontier, plan_point(plan)]
    (_, scale), (_, tick) = _units_of(everything)
    for point in everything:
        words = [point.label, in_words(point.peak_bytes), _time_of(plan, point)]
        call = planning_call(plan, point)
        yield Dot(
            point.peak_bytes / scale,
            point.seconds / tick,
            "\n".join([*words, *([f"click: {call}"] if call else [])]),
            call,
        )


def _units_of(points: Sequence[Point]) -> tuple[tuple[str, int], tuple[str, float]]:
    """Return the unit of each axis, in words and in bytes or seconds."""
    return byte_unit(max(point.peak_bytes for point in points)), second_unit(max(point.seconds for point in points))


def _time_of(plan: PlanContents, point: Point) -> str:
    return ", ".join(filter(None, [seconds_in_words(point.seconds), slowdown(plan, point.seconds)]))


def _draw_points(axes: Axes, plan: PlanContents, scale: int, tick: float) -> None:
    def drawn_as(points: Iterable[Point], style: str, **options: object) -> None:
        pairs = [(point.peak_bytes / scale, point.seconds / tick) for point in points]
        if pairs:
            axes.plot(*zip(*pairs), style, **options)  # type: ignore[arg-type]

    drawn_as(plan.frontier, ".-", drawstyle="steps-post", color=LINE, linewidth=1.4, markersize=5, label="plans")
    for point, mark in zip(together(plan.policies), itertools.cycle(_MARKS)):
        drawn_as([point], mark, color=PLAIN, fillstyle="none", markersize=6, markeredgewidth=1.4, label=point.label)
    drawn_as([plan_point(plan)], "o", color=CHOSEN, markersize=9, label="this plan")


def _set_limits(axes: Axes, points: Iterable[Point], scale: int, tick: float) -> None:
    """Leave some room around the points; the budget does not count."""
    for set_limits, values in (
        (axes.set_xlim, [point.peak_bytes / scale for point in points]),
        (axes.set_ylim, [point.seconds / tick for point in points]),
    ):
        low, high = min(values), max(values)
        room = 0.14 * (high - low) or 0.1 * high or 1.0
        set_limits(max(0.0, low - room), high + room)


def _draw_budget(axes: Axes, plan: PlanContents, scale: int) -> None:
    budget, (low, high) = plan.budget_bytes / scale, axes.get_xlim()
    axes.axvline(budget, color=BUDGET, linewidth=1.4)
    if budget < high:
        axes.axvspan(budget, high, color=BUDGET, alpha=0.08, linewidth=0)
        axes.set_xlim(low, high)
    is_right = budget > low + _RIGHT * (high - low)
    words = f"budget {in_words(plan.budget_bytes)}{' →' if budget >= high else ''}"
    note(axes, words, min(budget, high), -4 if is_right else 4, BUDGET)
