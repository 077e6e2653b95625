"""A comparison of explanations as one page: a bar for each layer, what it keeps without and with the policy."""

from __future__ import annotations

from reactivate._inspect.comparison import Comparison, LayerChange
from reactivate.report.rendering import rendered


def page(comparison: Comparison) -> str:
    """The page.

    Raises:
        UsageError: jinja2 is not installed.
    """
    runs = comparison.runs
    most = max((_bytes(run, name) for run in runs for name in ("before_bytes", "after_bytes")), default=0) or 1
    bars = [tuple(100 * _bytes(run, name) / most for name in ("before_bytes", "after_bytes")) for run in runs]
    paths = [[change.path for change in run] if len(run) > 1 else [] for run in runs]
    return rendered("comparison.html.j2", title=comparison.title, table=comparison.table(), bars=bars, paths=paths)


def _bytes(run: tuple[LayerChange, ...], name: str) -> int:
    return sum(getattr(change, name) for change in run)
