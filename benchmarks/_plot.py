"""The figures as bars, with their intervals and targets."""

from __future__ import annotations

from pathlib import Path

from _figures import METHODS
from _results import Results, Row
from _sections import BEYOND_FORWARD, OVER_PLAIN
from _subjects import OURS, REENTRANT, REMAT, TORCH
from _tables import named
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GROUPS = {
    "a region": ("fixed", OVER_PLAIN),
    "each saved\ntensor": ("slope", "each saved tensor"),
    "ten modules,\nbeyond a forward": ("block", BEYOND_FORWARD),
    "transformer block,\nbeyond a forward": ("transformer", BEYOND_FORWARD),
    "under no_grad": ("no_grad", OVER_PLAIN),
}
COLORS = {OURS: "#d1495b", REENTRANT: "#8d99ae", REMAT: "#4f5d75"}
WIDTH = 0.27


def plot(results: Results, path: Path) -> None:
    """Time over plain as a part of torch non-reentrant's, one panel a method."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(len(METHODS), 1, sharex=True)
    for axes, method in zip(panels, METHODS, strict=True):
        _draw([row for row in results.rows if row.method == method.name], results, axes)
        axes.set_title(method.name, loc="left", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, ncols=5, loc="outside upper left", fontsize=9)
    machine = results.machine
    caption = (
        "Time over plain, as a part of torch non-reentrant's, with 95 % intervals. "
        f"{machine['device name']}, torch {machine['torch']}, one thread."
    )
    figure.supxlabel(caption, fontsize=8, color="gray", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _draw(rows: list[Row], results: Results, axes: Axes) -> None:
    found = {(row.section, row.quantity, row.subject): row for row in rows}
    axes.axhline(1, color="black", linewidth=1, linestyle=":", label=TORCH, zorder=0)
    for offset, (subject, color) in enumerate(COLORS.items()):
        places = {group + (offset - 1) * WIDTH: (*key, subject) for group, key in enumerate(GROUPS.values())}
        bars = {place: found[key] for place, key in places.items() if key in found}
        if bars:
            _draw_bars(bars, axes, color, named(subject, results))
    axes.set_xticks(range(len(GROUPS)), list(GROUPS))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(bars: dict[float, Row], axes: Axes, color: str, label: str) -> None:
    parts = {place: row.of_torch for place, row in bars.items() if row.of_torch is not None}
    values = [part.value for part in parts.values()]
    # An interval need not contain its value: halves of the rounds may all miss the minimum.
    below = [max(0.0, part.value - part.low) for part in parts.values()]
    above = [max(0.0, part.high - part.value) for part in parts.values()]
    axes.bar([*parts], values, WIDTH * 0.92, color=color, label=label)
    axes.errorbar([*parts], values, [below, above], fmt="none", ecolor="black", elinewidth=1, capsize=2)
    targets = {place: row.target for place, row in bars.items() if row.target is not None}
    if targets:
        starts, ends = [place - WIDTH / 2 for place in targets], [place + WIDTH / 2 for place in targets]
        axes.hlines([*targets.values()], starts, ends, color="black", linewidth=2, label="target: at most")
    for place, part in parts.items():
        top = max(part.value, part.high, targets.get(place, 0.0))
        axes.annotate(f"{part.value:.2f}", (place, top), (0, 3), textcoords="offset points", ha="center", size=8)
