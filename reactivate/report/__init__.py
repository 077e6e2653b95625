"""Reports, to be read. What draws them is an extra: rich, matplotlib, jinja2."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reactivate._inspect.comparison import Comparison
from reactivate._inspect.explanation import Explanation
from reactivate._text.table import WIDTH
from reactivate._text.words import described
from reactivate.errors import UsageError
from reactivate.planner import text as plan_text
from reactivate.planner.contents import PlanContents
from reactivate.report import comparison_page, figure, html, pareto, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write"]


def write(subject: PlanContents | Explanation | Comparison, path: str | os.PathLike[str]) -> None:
    """Write the report of a plan, of an explanation or of a comparison to a file, in the form that its suffix says.

    Args:
        subject: what `reactivate.plan` or `Plan.load` returned, or `reactivate.explain`.
        path: `.html`, one page with all of it, which needs nothing else; `.txt`, the tables; of a plan also `.png` or
            `.svg`, the pictures: memory over time, and the choice between memory and time. JSON, to be loaded again, is
            `plan.save`.

    Raises:
        UsageError: `subject` is none of these, the suffix neither, or what draws it is not installed.

    Examples:
        >>> import torch, reactivate
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> plan = reactivate.plan(model, torch.randn(4, 8), budget="100%")
        >>> reactivate.report.write(plan, "plan.pdf")
        Traceback (most recent call last):
            ...
        reactivate.errors.UsageError: report.write takes .html, .png, .svg, .txt; 'plan.pdf' ends in '.pdf'.
    """
    suffix = Path(path).suffix
    known = next(((of, forms) for kind, of, forms in _FORMS if isinstance(subject, kind)), None)
    if known is None:
        raise UsageError(
            f"report.write takes what reactivate.plan or reactivate.explain returned, and a path; got {described(subject)}."
        )
    of, forms = known
    if suffix.lower() not in forms:
        raise UsageError(f"report.write takes {', '.join(forms)}{of}; {os.fspath(path)!r} ends in {suffix!r}.")
    forms[suffix.lower()](subject, path)


def _write_pictures(plan: PlanContents, path: str | os.PathLike[str]) -> None:
    def draw(both: Figure) -> None:
        left, right = both.subplots(1, 2)
        timeline.draw(left, plan)
        pareto.draw(right, plan)

    width, height = figure.SIZE
    figure.save(figure.drawn(draw, (1.6 * width, height)), path)


def _write_tables(plan: PlanContents, path: str | os.PathLike[str]) -> None:
    Path(path).write_text(plan_text.text(plan, width=WIDTH) + "\n", encoding="utf-8")


def _write_text(subject: Explanation | Comparison, path: str | os.PathLike[str]) -> None:
    Path(path).write_text(subject.text(width=WIDTH) + "\n", encoding="utf-8")


def _write_explanation(explanation: Explanation, path: str | os.PathLike[str]) -> None:
    head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Kept for the backward</title>\n'
    Path(path).write_text(f"{head}{explanation._repr_html_()}\n</html>\n", encoding="utf-8")


# (class, in words, {suffix: what writes it})
_FORMS: tuple[tuple[type, str, Mapping[str, Callable[[Any, str | os.PathLike[str]], None]]], ...] = (
    (Comparison, " of a comparison", {".html": comparison_page.write, ".txt": _write_text}),
    (Explanation, " of an explanation", {".html": _write_explanation, ".txt": _write_text}),
    (
        PlanContents,
        "",
        {".html": html.write, ".png": _write_pictures, ".svg": _write_pictures, ".txt": _write_tables},
    ),
)
