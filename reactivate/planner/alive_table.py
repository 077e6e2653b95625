"""The tensors that are alive at the peak of a plan, as a table whose bytes add up to the promised peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from reactivate._region.accounts import in_words
from reactivate._text.table import Column, Row, Table
from reactivate._text.words import alike, counted
from reactivate.planner.cost.prediction import Fixed, LiveTensors
from reactivate.planner.planned import Planned

ALL_THE_TIME = tuple(item.name for item in fields(Fixed))
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


def alive_table(plan: Planned, most: int = MOST) -> Table:
    """Return a row for each kind of tensor that is alive at the peak, the largest first.

    Args:
        plan: the plan.
        most: how many rows are told apart.
    """
    found = sorted([*_all_the_time(plan), *_of_step(plan)], key=lambda item: -item[0])
    shown, rest = (found, []) if len(found) <= most + 1 else (found[:most], found[most:])
    rows = [row for _, row in shown]
    if rest:
        rows.append(_row(counted(len(rest), "other kind"), sum(size for size, _ in rest)))
    peak_bytes = sum(size for size, _ in found)
    return Table(_COLUMNS, [*rows, _row("the peak", peak_bytes, is_total=True)])


def has_tensors(plan: Planned) -> bool:
    """Return whether the plan says which tensors are alive; older files do not."""
    return bool(plan.predicted.alive)


def _row(name: str, size_bytes: int, *, held_by: str = "", is_total: bool = False) -> Row:
    return Row([name, "", "", "", in_words(size_bytes), "", held_by], is_total=is_total)


def _all_the_time(plan: Planned) -> list[tuple[int, Row]]:
    sizes = [(name, getattr(plan.fixed, name)) for name in ALL_THE_TIME]
    return [(size, _row(name, size, held_by="all the time")) for name, size in sizes if size]


def _of_step(plan: Planned) -> list[tuple[int, Row]]:
    return [(item.nbytes, Row(_cells(item))) for item in plan.predicted.alive]


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
