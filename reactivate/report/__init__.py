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
    made = forms[suffix.lower()](subject)
    Path(path).write_bytes(made if isinstance(made, bytes) else made.encode())


def _pictures(plan: PlanContents) -> Figure:
    width, height = figure.SIZE
    return figure.drawn(plan, timeline.draw, pareto.draw, size=(1.6 * width, height))


def _png(plan: PlanContents) -> bytes:
    return figure.png_of(_pictures(plan))


def _svg(plan: PlanContents) -> str:
    return figure.svg_of(_pictures(plan))


def _tables(plan: PlanContents) -> str:
    return plan_text.text(plan, width=WIDTH) + "\n"


def _text(subject: Explanation | Comparison) -> str:
    return subject.text(width=WIDTH) + "\n"


def _explanation_page(explanation: Explanation) -> str:
    head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Kept for the backward</title>\n'
    return f"{head}{explanation._repr_html_()}\n</html>\n"


def _json(subject: Any) -> str:
    return json.dumps(subject.to_json(), indent=1) + "\n"


# (class, {suffix: what makes the contents of the file})
_FORMS: tuple[tuple[type, Mapping[str, Callable[[Any], str | bytes]]], ...] = (
    (Comparison, {".html": comparison_page.page, ".json": _json, ".txt": _text}),
    (Explanation, {".html": _explanation_page, ".json": _json, ".txt": _text}),
    (PlanContents, {".html": html.page, ".json": _json, ".png": _png, ".svg": _svg, ".txt": _tables}),
)
