"""Files of plans, explanations and comparisons: JSON, text, pages, pictures.

What draws them is an extra: rich, matplotlib, jinja2.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reactivate._inspect.comparison import Comparison
from reactivate._inspect.explanation import Explanation
from reactivate._inspect.verify import Verdict
from reactivate._text.table import WIDTH
from reactivate._text.words import described
from reactivate.errors import UsageError
from reactivate.planner import text as plan_text
from reactivate.planner.contents import PlanContents
from reactivate.report import comparison_page, figure, html, pareto, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "Explanation", "Verdict", "write"]


def write(subject: PlanContents | Explanation | Comparison, path: str | os.PathLike[str]) -> None:
    """Write a plan, an explanation or a comparison to a file, in the form that its suffix says: what their `save` does.

    Args:
        subject: what `reactivate.plan`, `Plan.load`, `reactivate.explain` or `reactivate.compare` returned.
        path: `.json`, all of it, to be loaded again; `.txt`, the tables; `.html`, one page, which needs nothing else; of a
            plan also `.png` or `.svg`, the pictures: memory over time, and the choice between memory and time.

    Raises:
        UsageError: `subject` is none of these, the suffix neither, or what draws it is not installed.

    Examples:
        >>> import torch, reactivate
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> plan = reactivate.plan(model, torch.randn(4, 8), budget="100%")
        >>> plan.save("plan.pdf")
        Traceback (most recent call last):
            ...
        reactivate.errors.UsageError: Plan.save takes .html, .json, .png, .svg, .txt; 'plan.pdf' ends in '.pdf'.
    """
    suffix = Path(path).suffix
    forms = next((forms for kind, forms in _FORMS if isinstance(subject, kind)), None)
    if forms is None:
        raise UsageError(
            f"report.write takes what plan, explain or compare returned, and a path; got {described(subject)}."
        )
    if suffix.lower() not in forms:
        asked = f"{type(subject).__name__}.save"
        raise UsageError(f"{asked} takes {', '.join(forms)}; {os.fspath(path)!r} ends in {suffix!r}.")
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


def _write_json(subject: Any, path: str | os.PathLike[str]) -> None:
    Path(path).write_text(json.dumps(subject.to_json(), indent=1) + "\n", encoding="utf-8")


# (class, {suffix: what writes it})
_FORMS: tuple[tuple[type, Mapping[str, Callable[[Any, str | os.PathLike[str]], None]]], ...] = (
    (Comparison, {".html": comparison_page.write, ".json": _write_json, ".txt": _write_text}),
    (Explanation, {".html": _write_explanation, ".json": _write_json, ".txt": _write_text}),
    (
        PlanContents,
        {
            ".html": html.write,
            ".json": _write_json,
            ".png": _write_pictures,
            ".svg": _write_pictures,
            ".txt": _write_tables,
        },
    ),
)
