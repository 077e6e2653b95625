"""Values on hover: invisible spots over a picture of a page, each with the words of what is there.

A spot carries its words as the `title` of an SVG element, which browsers show by themselves; the script of the page shows
the same words at once, and copies the call that a spot stands for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS_PER_INCH = 72  # of SVG, as matplotlib writes it
_RADIUS = 6  # points


@dataclass(frozen=True)
class Band:
    """A spot as high as the picture.

    Attributes:
        left, right: in the numbers of the horizontal axis.
        words: what is there.
    """

    left: float
    right: float
    words: str


@dataclass(frozen=True)
class Dot:
    """A round spot.

    Attributes:
        x, y: its middle, in the numbers of the axes.
        words: what is there.
        call: what a click copies; empty for nothing.
    """

    x: float
    y: float
    words: str
    call: str = ""


def with_spots(svg: str, figure: Figure, spots: Iterable[Band | Dot]) -> str:
    """Return a picture with spots over it.

    Args:
        svg: the picture.
        figure: from which it was drawn, with one pair of axes.
        spots: what to put over it, the last on top.
    """
    (axes,) = figure.axes
    drawn = "".join(_element(axes, spot) for spot in spots)
    head, end, rest = svg.rpartition("</svg>")
    return f'{head}<g class="spots">{drawn}</g>{end}{rest}'


def _element(axes: Axes, spot: Band | Dot) -> str:
    title = f"<title>{escape(spot.words)}</title>"
    if isinstance(spot, Band):
        low, high = axes.get_ylim()
        (left, top), (right, bottom) = _place(axes, spot.left, high), _place(axes, spot.right, low)
        shape = f'x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" height="{bottom - top:.2f}"'
        return f"<rect {shape}>{title}</rect>"
    x, y = _place(axes, spot.x, spot.y)
    copied = f' data-copy="{escape(spot.call)}"' if spot.call else ""
    return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{_RADIUS}"{copied}>{title}</circle>'


def _place(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Return a place in the numbers of the axes as one in the picture, whose top is zero."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    right, up = axes.transData.transform((x, y)) * (_POINTS_PER_INCH / figure.dpi)
    return float(right), float(figure.get_figheight() * _POINTS_PER_INCH - up)
