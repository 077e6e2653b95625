"""The parts that the pictures of a plan share: a figure without pyplot, units, colours, the contents of a file."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

from reactivate.errors import UsageError
from reactivate.planner.contents import PlanContents

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PAPER, BUDGET = "#1b1f24", "#fffffe", "#c8102e"  # exactly these, so that a page can put its own in their place
PLAIN = "#7d8590"
SIZE = (8.0, 4.6)  # inches

_DOTS = 150  # an inch
_STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",  # text stays text: it scales, and can be searched and copied
}


def drawn(plan: PlanContents, *draws: Callable[[Axes, PlanContents], None], size: tuple[float, float] = SIZE) -> Figure:
    """A figure with pictures of a plan, side by side.

    Args:
        draws: each draws one picture, on axes of its own.
        size: width and height in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    matplotlib, figure_class = _matplotlib()
    with matplotlib.rc_context(_STYLE):
        figure: Figure = figure_class(figsize=size, layout="constrained", facecolor=PAPER)
        for draw, axes in zip(draws, figure.subplots(1, len(draws), squeeze=False)[0]):
            draw(axes, plan)
    return figure


def png_of(figure: Figure) -> bytes:
    """Return the figure as PNG."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=_DOTS)
    return file.getvalue()


def svg_of(figure: Figure, name: str = "plan") -> str:
    """Return the figure as SVG, the same in each run; identifiers in it are made from `name`."""
    matplotlib, _ = _matplotlib()
    file = StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=nothing)
    return file.getvalue()


def byte_unit(most_bytes: int) -> tuple[str, int]:
    """The unit for an axis up to this many bytes, and its size."""
    units = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((item for item in units if most_bytes >= item[1]), ("B", 1))


def title(axes: Axes, words: str) -> None:
    """Put the title above a picture."""
    axes.set_title(words, loc="left", fontweight="bold", fontsize=11, parse_math=False)


def note(axes: Axes, words: str, place: float, shift: int, color: str = INK) -> None:
    """Write words at the top of a picture, on the right of a place on its horizontal axis; on the left if `shift` is below 0.

    Args:
        place: in the numbers of the axis.
        shift: how far from there, in points.
    """
    axes.annotate(
        words,
        (place, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(shift, -2),
        textcoords="offset points",
        color=color,
        fontsize=9,
        horizontalalignment="left" if shift > 0 else "right",
        verticalalignment="top",
    )


def legend(axes: Axes, columns: int = 4) -> None:
    """Put the legend below a picture."""
    found = axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=3.8,  # lines: below the axis and its label
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.2,
    )
    for text in found.get_texts():
        text.set_parse_math(False)  # a name may have dollar signs


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "The pictures of a plan are drawn by matplotlib, which is not installed: `pip install matplotlib jinja2`. "
            "Without it there are `plan.save(path)`, which writes JSON, and `plan.predicted.moments`."
        ) from error
    return matplotlib, Figure
