"""Every mode of every system: the memory of a step against its time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from _selective_results import Experiment, Point, Results
from _selective_tables import named
from _selective_ways import SAC
from _subjects import OURS, PLAIN, REMAT, TORCH
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

COLORS = {OURS: "#d1495b", TORCH: "#8d99ae", SAC: "#2e6f95", REMAT: "#4f5d75", PLAIN: "black"}
SIDES = (
    (1, 0),
    (-1, 0),
    (0, -1),
    (0, 1),
    (1, 1),
    (1, -1),
    (-1, -3),
    (-1, 3),
    (1, -7),
    (1, 7),
    (-1, -7),
    (1, -12),
    (1, -1),
)
GAP = 8
"""Pixels around the middle of a point that stay free."""

MARKERS = {OURS: "o", TORCH: "s", SAC: "D", REMAT: "^", PLAIN: "X"}


def plot(results: Results, experiment: Experiment, path: Path) -> None:
    """Peak bytes of a step against its time, at one batch."""
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    points = experiment.at_equal_batch
    for system, color in COLORS.items():
        mine = [point for point in points if point.system == system]
        if mine:
            _draw(mine, axes, color, MARKERS[system], named(system, results))
    axes.set_xlabel("peak of activations in a step, MB")
    axes.set_ylabel("time of a step, ms")
    axes.margins(x=0.12, y=0.12)
    axes.set_xlim(left=0)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(frameon=False, fontsize=9)
    settings, machine = results.settings, results.machine
    figure.suptitle(
        f"{settings.layers} blocks of width {settings.dim}, {points[0].batch} x {settings.context} tokens; medians with 95 % "
        f"intervals.\n{machine['device name']}, torch {machine['torch']}, one thread.",
        fontsize=8,
        color="gray",
        x=0.01,
        ha="left",
    )
    figure.draw_without_rendering()  # from here on, points have places on the page
    _label(points, axes, legend.get_window_extent())
    figure.savefig(path)


def _draw(points: Sequence[Point], axes: Axes, color: str, marker: str, label: str) -> None:
    x, y = zip(*map(_place, points), strict=True)
    errors = [
        [(point.seconds.value - point.seconds.low) * 1e3 for point in points],
        [(point.seconds.high - point.seconds.value) * 1e3 for point in points],
    ]
    axes.errorbar(x, y, errors, fmt=marker, color=color, ecolor=color, elinewidth=1, capsize=2, ms=7, label=label)


def _label(points: Sequence[Point], axes: Axes, legend: Bbox) -> None:
    """The mode beside each point, in the color of its system, where it covers nothing."""
    taken = [_bar(point, axes) for point in points] + [legend]
    for point in points:
        for side in SIDES:
            text = _write(point, side, axes)
            box = text.get_window_extent()
            if side == SIDES[-1] or not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _bar(point: Point, axes: Axes) -> Bbox:
    (x, low), (_, high) = (
        axes.transData.transform((point.peak_bytes / 1e6, seconds * 1e3))
        for seconds in (point.seconds.low, point.seconds.high)
    )
    middle = axes.transData.transform(_place(point))[1]
    return Bbox.from_extents(x - GAP, min(low, middle - GAP), x + GAP, max(high, middle + GAP))


def _write(point: Point, side: tuple[int, int], axes: Axes) -> Annotation:
    x, y = side
    return axes.annotate(
        point.mode,
        _place(point),
        (x * 7, y * 7),
        textcoords="offset points",
        ha={-1: "right", 0: "center", 1: "left"}[x],
        va="center" if y == 0 else "top" if y < 0 else "bottom",
        size=9,
        color=COLORS[point.system],
    )


def _place(point: Point) -> tuple[float, float]:
    return point.peak_bytes / 1e6, point.seconds.value * 1e3
