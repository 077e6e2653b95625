"""A plan as one page that needs nothing else: no network, both pictures and one short script inside.

Without the script the page says the same: it shows values sooner than a browser does by itself, and copies calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reactivate._region.accounts import in_words
from reactivate._text.table import Column, Row, Table
from reactivate.planner import text as plan_text
from reactivate.planner.contents import PlanContents
from reactivate.report import pareto, timeline
from reactivate.report.figure import BUDGET, INK, PAPER, drawn, svg_of
from reactivate.report.hover import Band, Dot, with_spots
from reactivate.report.rendering import rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (5.2, 3.9)  # of a picture, in inches: two are side by side on a screen, one is as wide as a phone

MOST_TENSORS = 40  # rows of tensors that are alive at the peak


@dataclass(frozen=True)
class HtmlTable:
    """A table on the page.

    Attributes:
        heading: what stands above it.
        table: what is in it.
        unfolded: for each row what is in it that it only sums up; empty if none does.
        marked: the number of the row that stands out, or None.
        calls: for each row the call that a button copies; an empty text for none.
        is_wide: whether it is as wide as the page: names of modules, and more than three columns, need that.
    """

    heading: str
    table: Table
    unfolded: Sequence[Sequence[str]] = ()
    marked: int | None = None
    calls: tuple[str, ...] = ()
    is_wide: bool = False


def page(plan: PlanContents) -> str:
    """The page.

    Raises:
        UsageError: jinja2 or matplotlib is not installed.
    """
    return rendered(
        "plan.html.j2",
        title=f"{plan.made_for.model} in {in_words(plan.budget_bytes)}",
        verdict=plan_text.verdict(plan),
        proof=plan_text.proof(plan),
        copies=plan_text.copies(plan),
        pictures=list(_pictures(plan)),
        blocks=_blocks(plan),
        memory=_memory(plan),
        tables=(_choices(plan), *_alive(plan)),
        circumstances=_circumstances(plan),
    )


# -- pictures ---------------------------------------------------------------------------------------------------------


def _pictures(plan: PlanContents) -> Iterator[tuple[str, str, str]]:
    """Yield of each picture what stands above it, the picture, and the same in words."""
    for heading, name, module in (("Memory of a step", "timeline", timeline), ("Memory or time", "pareto", pareto)):
        figure = drawn(plan, module.draw, size=SIZE)
        yield heading, _inline(figure, name, module.spots(plan)), module.described(plan)


def _inline(figure: Figure, name: str, spots: Iterable[Band | Dot]) -> str:
    """A picture as a part of a page: in its colours, with identifiers of its own, and with values on hover."""
    svg = svg_of(figure, name)
    svg = svg[svg.index("<svg") :]
    for color, here in ((INK, "currentColor"), (PAPER, "none"), (BUDGET, "var(--budget)")):
        svg = svg.replace(color, here)
    return with_spots(re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\1{name}-", svg), figure, spots)


# -- tables -----------------------------------------------------------------------------------------------------------


def _blocks(plan: PlanContents) -> HtmlTable:
    runs = plan_text.runs(plan.decisions)
    paths = [[decision.path for decision in alike] if len(alike) > 1 else [] for alike in runs]
    return HtmlTable("Blocks", plan_text.block_table(plan), [*paths, []], is_wide=True)


def _memory(plan: PlanContents) -> HtmlTable:
    peak = plan.predicted.peak_bytes
    rows = [Row([name, in_words(size), _share(size, peak)]) for name, size in plan_text.at_peak(plan).items()]
    rows.append(Row(["forward and backward", in_words(peak), _share(peak, peak)], is_total=True))
    if plan.optimizer_bytes:
        rows.append(Row(["the optimizer's step", in_words(plan.optimizer_bytes), _share(plan.optimizer_bytes, peak)]))
    columns = (Column("what"), Column("bytes", True), Column("share", True))
    return HtmlTable("Memory at the peak", Table(columns, rows))


def _choices(plan: PlanContents) -> HtmlTable:
    """All of the frontier, each of its points with the call that plans for it."""
    most = max(len(plan.frontier), plan_text.MOST_POINTS)
    points, plan_itself = plan_text.choices(plan, most), plan_text.plan_point(plan)
    chosen = next(index for index, point in enumerate(points) if plan_text.is_same(point, plan_itself))
    calls = tuple(plan_text.planning_call(plan, point) for point in points)
    return HtmlTable("Other choices", plan_text.choice_table(plan, most), marked=chosen, calls=calls, is_wide=True)


def _alive(plan: PlanContents) -> list[HtmlTable]:
    table = plan_text.alive_table(plan, MOST_TENSORS)
    return [HtmlTable("Tensors at the peak", table, is_wide=True)] if plan.predicted.alive else []


def _share(size: int, whole: int) -> str:
    return f"{100 * size / whole:.1f}\u00a0%" if whole else ""


def _circumstances(plan: PlanContents) -> dict[str, list[str]]:
    made_for = plan.made_for
    return {
        "model": [made_for.model],
        "inputs": [f"{name}: {dtype} of {shape}" for name, shape, dtype in made_for.inputs],
        "mode": [made_for.mode],
        "loss": [made_for.loss],
        "device": [made_for.device + (", which was not there: times are predicted" if made_for.is_predicted else "")],
        "torch": [made_for.torch],
        "budget": [f"{plan.budget}: {plan.budget_bytes:,} bytes"],
        "planned in": [plan_text.seconds_in_words(plan.planning_seconds)],
    }
