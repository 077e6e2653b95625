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

COLORS = {OURS: "#d1495b", TORCH: "#8d99ae", SAC: "#2e6f95", REMAT: "#4f5d75", PLAIN: "black"}
MARKERS = {OURS: "o", TORCH: "s", SAC: "D", REMAT: "^", PLAIN: "X"}


def plot(results: Results, experiment: Experiment, path: Path) -> None:
    """Peak bytes of a step against its time, at one batch."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    points = experiment.at_equal_batch
    for system, color in COLORS.items():
        mine = [point for point in points if point.system == system]
        if mine:
            _draw(mine, axes, color, MARKERS[system], named(system, results))
    _label(points, axes)
    axes.set_xlabel("peak of activations in a step, MB")
    axes.set_ylabel("time of a step, ms")
    axes.margins(x=0.12, y=0.12)
    axes.set_xlim(left=0)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    settings, machine = results.settings, results.machine
    figure.suptitle(
        f"{settings.layers} blocks of width {settings.dim}, {points[0].batch} x {settings.context} tokens; medians with 95 % "
        f"intervals.\n{machine['device name']}, torch {machine['torch']}, one thread.",
        fontsize=8,
        color="gray",
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=150)


def _draw(points: Sequence[Point], axes: Axes, color: str, marker: str, label: str) -> None:
    x = [point.peak_bytes / 1e6 for point in points]
    y = [point.seconds.value * 1e3 for point in points]
    errors = [
        [(point.seconds.value - point.seconds.low) * 1e3 for point in points],
        [(point.seconds.high - point.seconds.value) * 1e3 for point in points],
    ]
    axes.errorbar(x, y, errors, fmt=marker, color=color, ecolor=color, elinewidth=1, capsize=2, ms=7, label=label)


def _label(points: Sequence[Point], axes: Axes) -> None:
    """One label a mode, below its lowest point: the systems of a mode are neighbours."""
    for mode in dict.fromkeys(point.mode for point in points):
        lowest = min((point for point in points if point.mode == mode), key=lambda point: point.seconds.low)
        place = (lowest.peak_bytes / 1e6, lowest.seconds.low * 1e3)
        axes.annotate(mode, place, (0, -6), textcoords="offset points", ha="center", va="top", size=8.5)
