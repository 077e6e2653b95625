"""The memory of a planned step over its time, as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from reactivate._region.accounts import in_words
from reactivate.planner.contents import LiveBytes, PlanContents, Prediction
from reactivate.planner.text import KINDS, bytes_at, second_unit, seconds_in_words
from reactivate.report.figure import BUDGET, INK, PLAIN, byte_unit, legend, note, title
from reactivate.report.hover import Band

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = dict(zip(KINDS, ("#3d5a80", "#5f7ea8", "#8ba6c9", "#b9cbe2", "#d5d5de", "#e07a3f", "#2a9d8f", "#e9c46a")))
COPIES = {False: ("to", "#6a4c93"), True: ("from", "#b48ead")}  # a storage: the words, and the colour
_HEADROOM = 1.16  # for words above the mountain
_LANES = 0.12  # more of it, for the copies


def draw(axes: Axes, plan: PlanContents) -> None:
    """The step as a mountain of what memory is for; the plain step behind it, the budget above it."""
    top = max(plan.predicted.peak_bytes, plan.plain.peak_bytes)
    shows_budget = plan.budget_bytes <= 2 * top  # a budget far above would press all else flat
    top = max(top, plan.budget_bytes) if shows_budget else top
    unit, scale = byte_unit(top)
    clock, tick = second_unit(max(plan.predicted.seconds, plan.plain.seconds))
    _draw_step(axes, plan, scale, tick)
    _draw_plain(axes, plan, scale, tick)
    _draw_budget(axes, plan, scale, shows_budget)
    _draw_forward_end(axes, plan, tick)
    _draw_copies(axes, plan, tick)
    headroom = _HEADROOM + _LANES * bool(plan.predicted.copies)
    axes.set(xlabel=f"time ({clock})", ylabel=f"memory ({unit})", ylim=(0, headroom * top / scale))
    axes.set_xlim(0, max(plan.predicted.seconds, plan.plain.seconds) / tick or 1)
    title(axes, f"Peak {in_words(plan.predicted.peak_bytes)}, plain {in_words(plan.plain.peak_bytes)}")
    legend(axes)


def described(plan: PlanContents) -> str:
    """The picture in words, for those who do not see it."""
    forward = f"{plan.predicted.forward_seconds / plan.predicted.seconds:.0%}" if plan.predicted.seconds else "a part"
    return (
        f"Memory over the time of a step, as stacked areas. With the plan it rises to {in_words(plan.predicted.peak_bytes)}, "
        f"of which {in_words(plan.fixed.total)} are there all the time; the budget is a line at "
        f"{in_words(plan.budget_bytes)}. The plain step, an outline behind, rises to {in_words(plan.plain.peak_bytes)}. "
        f"The forward pass takes {forward} of the step.{_copies_described(plan)}"
    )


def spots(plan: PlanContents) -> Iterator[Band]:
    """Yield the moments of the step with the planned memory, to be shown on hover."""
    _, tick = second_unit(max(plan.predicted.seconds, plan.plain.seconds))
    before = 0.0
    for moment in plan.predicted.moments:
        if moment.seconds > before:
            yield Band(before / tick, moment.seconds / tick, _at(plan, moment))
            before = moment.seconds


def _at(plan: PlanContents, moment: LiveBytes) -> str:
    """Say what memory is for at one moment, the topmost of the mountain first."""
    sizes = bytes_at(plan, moment)
    is_forward = moment.seconds <= plan.predicted.forward_seconds
    head = f"{in_words(sum(sizes.values()))} at {seconds_in_words(moment.seconds)}, {'forward' if is_forward else 'backward'}"
    return "\n".join([head, *(f"{name} {in_words(sizes[name])}" for name in reversed(KINDS) if sizes[name])])


def _copies_described(plan: PlanContents) -> str:
    found = plan.predicted.copies
    if not found:
        return ""
    sizes = [in_words(sum(copy.nbytes for copy in found if copy.is_back == is_back)) for is_back in (False, True)]
    return f" Bars above show the copies: {sizes[0]} to {_named(plan)}, {sizes[1]} back."


def _named(plan: PlanContents) -> str:
    return " and ".join(use.name for use in plan.storages)


def _draw_step(axes: Axes, plan: PlanContents, scale: int, tick: float) -> None:
    moments = _from_zero(plan.predicted)
    times = [moment.seconds / tick for moment in moments]
    sizes = [bytes_at(plan, moment) for moment in moments]
    heights = {name: [each[name] / scale for each in sizes] for name in KINDS}
    used = {name: values for name, values in heights.items() if any(values)}
    axes.stackplot(
        times,
        *used.values(),
        labels=list(used),
        colors=[COLORS[name] for name in used],
        step="pre",
        linewidth=0,
    )


def _draw_plain(axes: Axes, plan: PlanContents, scale: int, tick: float) -> None:
    moments = _from_zero(plan.plain)
    heights = [(plan.fixed.total + moment.total) / scale for moment in moments]
    times = [moment.seconds / tick for moment in moments]
    axes.step(times, heights, where="pre", color=PLAIN, linewidth=1.2, linestyle=(0, (4, 1.5)), label="plain step")


def _draw_budget(axes: Axes, plan: PlanContents, scale: int, is_shown: bool) -> None:
    axes.axhline(plan.budget_bytes / scale, color=BUDGET, linewidth=1.4)
    size = in_words(plan.budget_bytes).replace(" ", "\u00a0")
    height = plan.budget_bytes / scale if is_shown else 1.0
    axes.annotate(
        f"budget\n{size}" if is_shown else f"budget ↑\n{size}",
        (1.0, height),
        xycoords=("axes fraction", "data" if is_shown else "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        color=BUDGET,
        fontsize=9,
        verticalalignment="center" if is_shown else "top",
    )


def _draw_forward_end(axes: Axes, plan: PlanContents, tick: float) -> None:
    end = plan.predicted.forward_seconds / tick
    axes.axvline(end, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    for words, shift in (("forward", -5), ("backward", 5)):
        note(axes, words, end, shift)


def _draw_copies(axes: Axes, plan: PlanContents, tick: float) -> None:
    """A lane of bars for each direction, on the clock of the step."""
    for is_back, (words, color) in COPIES.items():
        spans = [
            (copy.begin_seconds / tick, (copy.end_seconds - copy.begin_seconds) / tick)
            for copy in plan.predicted.copies
            if copy.is_back == is_back
        ]
        if spans:
            axes.broken_barh(
                spans,
                (0.855 if is_back else 0.895, 0.03),
                transform=axes.get_xaxis_transform(),
                facecolor=color,
                edgecolor=color,
                linewidth=0.8,  # so that a short copy is seen
                label=f"{words} {_named(plan)}",
            )


def _from_zero(prediction: Prediction) -> Sequence[LiveBytes]:
    """Its moments, the first of them from the beginning on."""
    first = prediction.moments[0]
    return (LiveBytes(0.0, first.kept, first.recomputed, first.workspace), *prediction.moments)
