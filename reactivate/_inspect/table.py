"""A table as text: a tree in the first column, figures in the others. Drawn by rich where that is installed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

WIDTH = 120  # where there is no terminal


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: what stands above it.
        is_figure: whether it is set to the right, and never broken.
    """

    title: str
    is_figure: bool = False


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        cells: a text for each column; those that are missing at the end are empty.
        depth: how deep in the tree it stands.
        is_total: whether a rule stands before it.
    """

    cells: Sequence[str]
    depth: int = 0
    is_total: bool = False


def draw(columns: Sequence[Column], rows: Iterable[Row], *, title: str = "", width: int | None = None) -> str:
    """The table as text, without colours.

    Args:
        columns, rows: what is in it.
        title: what stands above it.
        width: in characters; that of the terminal if None, 120 where there is none.

    Without rich it is as wide as it gets (`write_plainly`).

    Example:
        >>> from reactivate._inspect.table import Column, Row, draw
        >>> text = draw([Column("site"), Column("kept", True)], [Row(["layers.0", "4 KiB"]), Row(["linear"], depth=1)])
        >>> text.split()[-4:]
        ['layers.0', '4', 'KiB', 'linear']
    """
    rich = _rich()
    if rich is None:
        return write_plainly(columns, rows, title=title)
    console, table_class, text_class, box = rich
    table = table_class(box=box)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.is_figure else "left",
            no_wrap=column.is_figure,
            overflow="fold",
        )
    for row in rows:
        if row.is_total:
            table.add_section()
        table.add_row(*map(text_class, ["  " * row.depth + row.cells[0], *row.cells[1:]]))
    file = StringIO()
    console(file=file, width=width or _width(), color_system=None, force_terminal=False).print(table)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join([title, *lines] if title else lines)


def _width() -> int:
    return shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH


def _rich() -> tuple[Any, Any, Any, Any] | None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return None
    return Console, Table, Text, box.SIMPLE


def write_plainly(columns: Sequence[Column], rows: Iterable[Row], *, title: str = "") -> str:
    """Return the table as `draw` does without rich: columns as wide as what is in them, separated by two spaces."""
    lines = [[column.title for column in columns]]
    lines += [["  " * row.depth + row.cells[0], *row.cells[1:]] for row in rows]
    lines = [[*line, *[""] * (len(columns) - len(line))] for line in lines]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    texts = [
        "  ".join(
            cell.rjust(width) if column.is_figure else cell.ljust(width)
            for column, cell, width in zip(columns, line, widths)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, *texts] if title else texts)
