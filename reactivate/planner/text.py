"""A plan in words, and as tables of text: everything that a report of it says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from html import escape

from reactivate._modules.paths import THE_MODEL
from reactivate._modules.spans import SpanPlace
from reactivate._region.accounts import in_words
from reactivate._text.table import Column, Row, Table
from reactivate._text.words import alike, counted
from reactivate.planner.budget import parse
from reactivate.planner.contents import Decision, Fixed, LiveBytes, LiveTensors, PlanContents, Point, StorageUse
from reactivate.planner.prediction import MADE_IN_STEP

ALL_THE_TIME = tuple(item.name for item in fields(Fixed))
MOST_POINTS = 8  # of the frontier, in a table
KINDS = (*ALL_THE_TIME, *MADE_IN_STEP)  # of memory, from below


def text(plan: PlanContents, *, width: int | None = None, plain: bool = False) -> str:
    """A plan as text: what it predicts, how that was proved, what is done with each block, what else there would be.

    Args:
        width: in characters; that of the terminal if None, 120 where there is none.
        plain: without rich, as wide as it gets; so it is where rich is not installed.
    """
    drawn = (table.text(width=width, plain=plain) for table in _tables(plan))
    return "\n\n".join(["\n".join(_head(plan)), *(table.strip("\n") for table in drawn)])


def html(plan: PlanContents) -> str:
    """A plan as a part of a page, such as a notebook: what `text` says."""
    return "".join([f"<p>{'<br>'.join(map(escape, _head(plan)))}</p>", *(table.html() for table in _tables(plan))])


def _head(plan: PlanContents) -> list[str]:
    return list(
        filter(None, [verdict(plan), circumstances(plan), proof(plan), memory(plan), copies(plan), collectives(plan)])
    )


def _tables(plan: PlanContents) -> list[Table]:
    return [block_table(plan), *([alive_table(plan)] if plan.predicted.alive else []), choice_table(plan)]


# -- sentences --------------------------------------------------------------------------------------------------------


def verdict(plan: PlanContents) -> str:
    """Say what fits into what, and what it costs."""
    share = f" ({plan.budget} of the plain step's activation peak)" if plan.budget.endswith("%") else ""
    largest = "" if plan.largest is None else f", at a size of {plan.largest}, the largest that does"
    slower = slowdown(plan, plan.predicted.seconds)
    while_ = " while the optimizer steps" if plan.optimizer_bytes > plan.predicted.peak_bytes else ""
    return (
        f"{plan.made_for.model} fits into {in_words(plan.budget_bytes)}{share}{largest}. "
        f"Peak: {in_words(plan.peak_bytes)}{while_}, plain {in_words(max(plan.plain.peak_bytes, plan.optimizer_bytes))}. "
        f"Step: {seconds_in_words(plan.predicted.seconds)}, plain {seconds_in_words(plan.plain.seconds)}"
        f"{f' ({slower})' if slower else ''}.{_beyond(plan)}"
    )


def circumstances(plan: PlanContents) -> str:
    """Say which step it is for: its device, the mode of the model, and what the backward begins from."""
    made_for = plan.made_for
    idle = (
        f" {made_for.idle_units} of {made_for.units} blocks did not run in it: a step in which they do takes more memory. If "
        "it draws which ones run, use reactivate.retry_on_oom, or a smaller budget."
        if made_for.idle_units
        else ""
    )
    return f"For a step on {made_for.device}, in {made_for.mode}, with backward called on {made_for.loss}.{idle}"


def _beyond(plan: PlanContents) -> str:
    """Say that the budget is more than the device has, if it is."""
    asked = parse(plan.budget).total(plan.fixed.total, plan.plain.peak_bytes - plan.fixed.total)
    if plan.budget_bytes != plan.device_bytes or asked <= plan.device_bytes:
        return ""
    return f" That is all that {plan.made_for.device} has: the budget of {in_words(asked)} is more."


def proof(plan: PlanContents) -> str:
    """Say how it was seen, and what is only predicted."""
    rounds = "the first plan tried" if plan.proof.rounds == 1 else f"the last of {plan.proof.rounds} plans tried"
    depends = (
        f" Sizes in this step depend on its data, so {in_words(plan.proof.margin_bytes)} are left free for other batches."
        if plan.proof.margin_bytes
        else ""
    )
    measured = f" A repeated measurement was {100 * plan.uncertainty:.0f} % slower." if plan.uncertainty else ""
    predicted = " Nothing ran: times are predicted." if plan.made_for.is_predicted else measured
    return (
        f"Proved by a {plan.proof.method} step that peaked at {in_words(plan.proof.peak_bytes)} ({rounds}). Planned in "
        f"{seconds_in_words(plan.planning_seconds)}.{predicted}{depends}"
    )


def memory(plan: PlanContents) -> str:
    """Say what the peak is made of."""
    parts = ", ".join(f"{name} {in_words(size)}" for name, size in at_peak(plan).items() if size)
    optimizer = "" if plan.optimizer_bytes else " No optimizer was given, so its memory is not counted: optimizer=..."
    reserved, reserves = plan.predicted.reserved_bytes, ""
    if reserved is not None:
        is_more = 0 < plan.device_bytes < reserved
        has = f", and {plan.made_for.device} has {in_words(plan.device_bytes)}: give a smaller budget, or leave it out"
        reserves = f" For that the allocator reserves about {in_words(reserved)}{has if is_more else ''}."
    return f"At the peak of forward and backward: {parts}.{reserves}{optimizer}"


def collectives(plan: PlanContents) -> str:
    """Say what the collectives of a simulated step take, and how much of it compute hides."""
    took, hidden = plan.predicted.collective_seconds, plan.predicted.hidden_seconds
    if not took:
        return ""
    return f"Collectives: {seconds_in_words(took)}, of which {seconds_in_words(hidden)} run beside compute."


def copies(plan: PlanContents) -> str:
    """Say what goes to a storage, how fast, and how long the step waits for it; empty where none was offered."""
    if not plan.storages:
        offered = " and ".join(plan.offered)
        return f"Offered and not used, since the plan without it is as fast or faster: {offered}." if offered else ""
    return " ".join(_of_storage(plan, use) for use in plan.storages)


def _of_storage(plan: PlanContents, use: StorageUse) -> str:
    if use.out_bytes_per_second is None or use.back_bytes_per_second is None:
        return f"{use.written} keeps tensors for the backward."
    ways = []
    for is_back, words, rate in ((False, "out", use.out_bytes_per_second), (True, "back", use.back_bytes_per_second)):
        sizes = [copy.nbytes for copy in plan.predicted.copies if copy.is_back == is_back]
        ways.append(f"{in_words(sum(sizes))} {words} in {counted(len(sizes), 'tensor')} at {rate / 1e9:.3g} GB/s")
    waited = seconds_in_words(plan.predicted.waited_seconds)
    return f"{use.written} keeps {in_words(use.stored_bytes)} at most: {', '.join(ways)}; the step waits {waited} for that."


def at_peak(plan: PlanContents) -> dict[str, int]:
    """The bytes of each of `KINDS` at the peak of forward and backward; of others only where there are any."""
    sizes = bytes_at(plan, plan.predicted.peak)
    return {name: size for name, size in sizes.items() if size or name != "others"}


def bytes_at(plan: PlanContents, moment: LiveBytes) -> dict[str, int]:
    """The bytes of each of `KINDS` at one moment."""
    return {name: getattr(plan.fixed if name in ALL_THE_TIME else moment, name) for name in KINDS}


def slowdown(plan: PlanContents, seconds: float) -> str:
    """A step beside the plain one: "+26 %"; empty where there is nothing to compare."""
    if not plan.plain.seconds:
        return ""
    percent = round(100 * (seconds / plan.plain.seconds - 1), 1) + 0.0  # no -0.0
    return f"{percent:+.1f}\u00a0%"


def seconds_in_words(seconds: float) -> str:
    """A number of seconds, to be read.

    Examples:
        >>> from reactivate.planner.text import seconds_in_words
        >>> seconds_in_words(75.0), seconds_in_words(4.08), seconds_in_words(0.00026)
        ('75.0 s', '4.08 s', '260 µs')
    """
    unit, size = second_unit(seconds)
    value = seconds / size
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}" if seconds else "0 s"


def second_unit(most_seconds: float) -> tuple[str, float]:
    """The unit for numbers up to this many seconds, and its size."""
    return next((item for item in (("s", 1.0), ("ms", 1e-3)) if most_seconds >= item[1]), ("µs", 1e-6))


# -- blocks -----------------------------------------------------------------------------------------------------------

_BLOCK_COLUMNS = (Column("block"), Column("class"), Column("what is done"), Column("held", True))


def block_table(plan: PlanContents) -> Table:
    """Return a row for each run of blocks that are alike, with the sums of their figures; then one for all."""
    moves = bool(plan.storages)
    rows = [
        Row([named(run), run[0].kind, run[0].candidate.name, *_figures(run, moves)]) for run in runs(plan.decisions)
    ]
    total = Row([f"all {len(plan.decisions)}", "", "", *_figures(plan.decisions, moves)], is_total=True)
    more = (Column("moved", True), Column("extra", True)) if moves else (Column("extra", True),)
    return Table((*_BLOCK_COLUMNS, *more), [*rows, total])


def runs(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """The blocks, those in one list that follow one another and of which the same was decided."""

    def shape(decision: Decision) -> tuple[object, ...]:
        is_span = SpanPlace.of(decision.path) is not None  # whose regions have other names
        candidate = decision.candidate.name if is_span else decision.candidate
        return decision.kind, decision.parameters, candidate

    return [list(group) for _, group in itertools.groupby(decisions, shape)]


def named(run: Sequence[Decision]) -> str:
    """A run by the paths of its first and last block."""
    return alike([decision.path or THE_MODEL for decision in run])


def _figures(decisions: Sequence[Decision], moves: bool) -> list[str]:
    seconds = sum(decision.seconds for decision in decisions)
    moved = sum(decision.moved_bytes for decision in decisions)
    sizes = [in_words(sum(decision.held_bytes for decision in decisions))]
    if moves:
        sizes.append(in_words(moved) if moved else "")
    return [*sizes, seconds_in_words(seconds) if seconds else ""]


# -- other choices ----------------------------------------------------------------------------------------------------

_CHOICE_COLUMNS = (
    Column(""),
    Column("choice"),
    Column("peak", True),
    Column("step", True),
    Column("slower", True),
    Column("budget"),
)


def choice_table(plan: PlanContents, most: int = MOST_POINTS) -> Table:
    """Return the plan among `most` of the frontier and the fixed policies, the smallest peak first."""
    rows = [
        Row(
            [
                "→" if is_same(point, plan_point(plan)) else "",
                point.label,
                in_words(point.peak_bytes),
                seconds_in_words(point.seconds),
                slowdown(plan, point.seconds),
                "fits" if point.peak_bytes <= plan.budget_bytes else "over",
            ]
        )
        for point in choices(plan, most)
    ]
    return Table(_CHOICE_COLUMNS, rows)


def choices(plan: PlanContents, most: int = MOST_POINTS) -> list[Point]:
    """The plan, `most` of the frontier and the fixed policies, the smallest peak first; equals are one."""
    chosen = plan_point(plan)
    frontier = [point for point in _spread(plan.frontier, most) if not is_same(point, chosen)]
    points = together([chosen, *frontier, *plan.policies])
    return sorted(points, key=lambda point: (point.peak_bytes, -point.seconds))


def plan_point(plan: PlanContents) -> Point:
    """The plan as a point among others."""
    return Point("this plan", plan.predicted.peak_bytes, plan.predicted.seconds)


def planning_call(plan: PlanContents, point: Point) -> str:
    """Return the call that plans for the peak of a point that was planned; empty for a fixed policy."""
    if is_same(point, plan_point(plan)):
        return f'plan.at("{plan.budget}")'
    return f'plan.at("{point.peak_bytes}B")' if any(is_same(point, other) for other in plan.frontier) else ""


def together(points: Sequence[Point]) -> list[Point]:
    """Choices that come to the same, as one with all of their labels."""
    found: list[Point] = []
    for point in points:
        index = next((index for index, other in enumerate(found) if is_same(point, other)), None)
        if index is None:
            found.append(point)
        elif point.label not in found[index].label.split(", "):
            found[index] = replace(found[index], label=f"{found[index].label}, {point.label}")
    return found


def is_same(point: Point, other: Point) -> bool:
    """Return whether two choices come to the same."""
    return point.peak_bytes == other.peak_bytes and abs(point.seconds - other.seconds) <= 1e-9 * abs(other.seconds)


def _spread(points: Sequence[Point], most: int) -> list[Point]:
    """Some of many, evenly, with both ends."""
    if len(points) <= most:
        return list(points)
    return [points[index * (len(points) - 1) // (most - 1)] for index in range(most)]


# -- tensors at the peak ----------------------------------------------------------------------------------------------


MOST = 10
"""Rows that are told apart; the rest is one row."""

_COLUMNS = (
    Column("alive at the peak"),
    Column("made in"),
    Column("shape"),
    Column("dtype"),
    Column("bytes", True),
    Column("for"),
    Column("held by"),
)


def alive_table(plan: PlanContents, most: int = MOST) -> Table:
    """Return a row for each kind of tensor that is alive at the peak, the largest first.

    Args:
        most: how many rows are told apart.
    """
    fixed = [(name, getattr(plan.fixed, name)) for name in ALL_THE_TIME]
    found = [(size, _row(name, size, held_by="all the time")) for name, size in fixed if size]
    found += [(item.nbytes, Row(_cells(item))) for item in plan.predicted.alive]
    found.sort(key=lambda item: -item[0])
    shown, rest = (found, []) if len(found) <= most + 1 else (found[:most], found[most:])
    rows = [row for _, row in shown]
    if rest:
        rows.append(_row(counted(len(rest), "other kind"), sum(size for size, _ in rest)))
    peak_bytes = sum(size for size, _ in found)
    return Table(_COLUMNS, [*rows, _row("the peak", peak_bytes, is_total=True)])


def _row(name: str, size_bytes: int, *, held_by: str = "", is_total: bool = False) -> Row:
    return Row([name, "", "", "", in_words(size_bytes), "", held_by], is_total=is_total)


def _cells(item: LiveTensors) -> Sequence[str]:
    shape = str(item.shape) if item.dtype else ""
    return [
        item.op,
        item.module,
        f"{item.count} x {shape}" if item.count > 1 and shape else shape,
        item.dtype,
        in_words(item.nbytes),
        item.kind,
        alike(item.held_by),
    ]
