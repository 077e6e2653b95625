"""Reports, to be read. What draws them is an extra: rich, matplotlib, jinja2."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from reactivate._text.table import WIDTH
from reactivate.errors import UsageError
from reactivate.planner import plan_table
from reactivate.planner.planned import Planned
from reactivate.report import figure, html, pareto, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write"]


def write(plan: Planned, path: str | os.PathLike[str]) -> None:
    """Write the report of a plan to a file, in the form that its suffix says.

    Args:
        plan: what `reactivate.plan` returned, or `Plan.load`.
        path: `.html`, one page with all of it, which needs nothing else; `.png` or `.svg`, the pictures: memory over time,
            and the choice between memory and time; `.txt`, the tables. JSON, to be loaded again, is `plan.save`.

    Raises:
        UsageError: the suffix is none of these, or what draws it is not installed.

    Example:
        >>> import torch, reactivate
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> plan = reactivate.plan(model, torch.randn(4, 8), budget="100%")
        >>> reactivate.report.write(plan, "plan.pdf")
        Traceback (most recent call last):
            ...
        reactivate.errors.UsageError: report.write takes .html, .png, .svg, .txt; 'plan.pdf' ends in '.pdf'.
    """
    write_as = _FORMS.get(Path(path).suffix.lower())
    if write_as is None:
        raise UsageError(f"report.write takes {', '.join(_FORMS)}; {os.fspath(path)!r} ends in {Path(path).suffix!r}.")
    write_as(plan, path)


def _write_pictures(plan: Planned, path: str | os.PathLike[str]) -> None:
    def draw(both: Figure) -> None:
        left, right = both.subplots(1, 2)
        timeline.draw(left, plan)
        pareto.draw(right, plan)

    width, height = figure.SIZE
    figure.save(figure.drawn(draw, (1.6 * width, height)), path)


def _write_text(plan: Planned, path: str | os.PathLike[str]) -> None:
    Path(path).write_text(plan_table.text(plan, width=WIDTH) + "\n", encoding="utf-8")


_FORMS: dict[str, Callable[[Planned, str | os.PathLike[str]], None]] = {
    ".html": html.write,
    ".png": _write_pictures,
    ".svg": _write_pictures,
    ".txt": _write_text,
}
