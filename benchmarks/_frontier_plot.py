"""The plans of a model as a line of peak against time, and its peers as points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from _frontier_compiled import BLOCKS, WHOLE
from _frontier_results import Frontier, Peer, Planned
from _selective_ways import SAC
from _subjects import OURS, PLAIN, TORCH
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

LOOKS = {
    PLAIN: ("black", "X"),
    TORCH: ("#5c677d", "s"),
    SAC: ("#2e6f95", "D"),
    WHOLE: ("#b08900", "^"),
    BLOCKS: ("#6a994e", "v"),
}
OURS_COLOR = "#d1495b"
OUR_LOOKS = {f"{OURS} in {WHOLE}": "^--", f"{OURS} in {BLOCKS}": "v:"}
GAP = 7
"""Pixels around the middle of a point that stay free."""

Place = tuple[float, float]


def plot(found: Frontier, path: Path) -> None:
    """Peak bytes of a step against its time."""
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for system in dict.fromkeys(item.system for item in found.planned):
        mine = [item for item in found.planned if item.system == system]
        _draw(mine, axes, OURS_COLOR, OUR_LOOKS.get(system, "o-"), system.replace(OURS, f"{OURS}, planned", 1))
    for system, (color, marker) in LOOKS.items():
        mine = [peer for peer in found.peers if peer.system == system]
        if mine:
            _draw(mine, axes, color, marker, system)
    axes.set_xlabel("peak of a step over parameters, gradients and inputs, MB")
    axes.set_ylabel("time of a step, ms")
    axes.margins(x=0.1, y=0.15)
    axes.set_xlim(left=0)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(frameon=False, fontsize=9)
    machine = found.machine
    figure.suptitle(
        f"{found.title}.\nMedians of {found.rounds} rounds with 95 % intervals. {machine['device name']}, torch "
        f"{machine['torch']}, one thread.",
        fontsize=8,
        color="gray",
        x=0.01,
        ha="left",
    )
    figure.draw_without_rendering()  # from here on, points have places on the page
    _label(found, axes, legend.get_window_extent())
    figure.savefig(path)


def _draw(items: Sequence[Peer | Planned], axes: Axes, color: str, form: str, label: str) -> None:
    points = {_place(item): item for item in sorted(items, key=_place)}  # budgets with the same plan are one point
    errors = [
        [max(0.0, item.seconds.value - item.seconds.low) * 1e3 for item in points.values()],
        [max(0.0, item.seconds.high - item.seconds.value) * 1e3 for item in points.values()],
    ]
    x, y = zip(*points, strict=True)
    axes.errorbar(
        x, y, errors, fmt=form, color=color, ecolor=color, elinewidth=0.8, capsize=1.5, ms=6, lw=1.2, label=label
    )


def _label(found: Frontier, axes: Axes, legend: Bbox) -> None:
    """The mode beside each peer, in the color of its system, where it covers nothing; farther away with a line to it."""
    taken = [*_boxes(found, axes), legend]
    inside = axes.get_window_extent()
    for peer in found.peers:
        for text in _tries(peer, axes):
            text.get_window_extent()  # puts it in its place
            box = Text.get_window_extent(text)  # without the line to it
            is_inside = inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
            if is_inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _tries(peer: Peer, axes: Axes) -> Iterator[Annotation]:
    color, _ = LOOKS[peer.system]
    for distance in (7, 11, 16, 24, 34, 46, 60):
        for x, y in ((1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)):
            yield axes.annotate(
                peer.mode,
                _place(peer),
                (x * distance, y * distance),
                textcoords="offset points",
                ha={-1: "right", 0: "center", 1: "left"}[x],
                va={-1: "top", 0: "center", 1: "bottom"}[y],
                size=8,
                color=color,
                arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5} if distance > 16 else None,
            )


def _boxes(found: Frontier, axes: Axes) -> Iterator[Bbox]:
    """List what is drawn already: every point with its interval, and the line in small pieces."""
    for item in (*found.peers, *found.planned):
        x, middle = axes.transData.transform(_place(item))
        low, high = (
            axes.transData.transform((0, seconds * 1e3))[1] for seconds in (item.seconds.low, item.seconds.high)
        )
        yield Bbox.from_extents(x - GAP, min(low, middle - GAP), x + GAP, max(high, middle + GAP))
    lines: dict[str, set[Place]] = {}
    for item in found.planned:
        lines.setdefault(item.system, set()).add(_place(item))
    for start, end in (piece for line in lines.values() for piece in pairwise(sorted(line))):
        (x0, y0), (x1, y1) = axes.transData.transform([start, end])
        pieces = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / 4))
        for index in range(pieces):
            x, y = x0 + (x1 - x0) * index / pieces, y0 + (y1 - y0) * index / pieces
            yield Bbox.from_extents(x - 1, y - 1, x + 1, y + 1)


def _place(item: Peer | Planned) -> Place:
    return item.peak_bytes / 1e6, item.seconds.value * 1e3
