"""Tables: text for a terminal, drawn by rich where that is installed, Markdown, or HTML for a notebook."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

from reactivate._setting import Rewound

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
        depth: how deep in the tree of the first column it stands.
        is_total: whether a rule stands before it.
    """

    cells: Sequence[str]
    depth: int = 0
    is_total: bool = False


@dataclass(frozen=True)
class Table:
    """A table: a tree in the first column, figures in the others.

    Attributes:
        columns, rows: what is in it.
        title: what stands above it.

    Examples:
        >>> from reactivate._text.table import Column, Row, Table
        >>> table = Table([Column("site"), Column("kept", True)], [Row(["layers.0", "4 KiB"]), Row(["linear"], depth=1)])
        >>> table.text().split()[-4:]
        ['layers.0', '4', 'KiB', 'linear']
        >>> print(table.markdown())
        | site | kept |
        |---|---:|
        | layers.0 | 4 KiB |
        | linear | |
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""

    def text(self, *, width: int | None = None, plain: bool = False) -> str:
        """Return the table as text, without colours.

        Args:
            width: in characters; that of the terminal if None, 120 where there is none.
            plain: without rich, as wide as it gets; so it is where rich is not installed.
        """
        rich = None if plain else classes_of_rich()
        lines = self._plain_lines() if rich is None else self._drawn_lines(rich, width or _width())
        return "\n".join([self.title, *lines] if self.title else lines)

    def markdown(self) -> str:
        """Return the table as Markdown has it, without its title."""
        rule = "|".join("---:" if column.is_figure else "---" for column in self.columns)
        head, *lines = map(_markdown_line, ([column.title for column in self.columns], *self._cells()))
        return "\n".join([head, f"|{rule}|", *lines])

    def html(self) -> str:
        """Return the table as a part of a page, such as a notebook: its title, and a `table` with the styles that it needs.

        Examples:
            >>> from reactivate._text.table import Column, Row, Table
            >>> print(Table([Column("site")], [Row(["a<b"])], "All").html())
            <p>All</p><table><thead><tr><th style="text-align: left">site</th></tr></thead>
            <tbody>
            <tr><td style="text-align: left">a&lt;b</td></tr>
            </tbody></table>
        """
        head = "".join(_cell_of_html("th", column, column.title) for column in self.columns)
        rows = "\n".join(self._html_rows())
        title = f"<p>{escape(self.title)}</p>" if self.title else ""
        return f"{title}<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"

    def _html_rows(self) -> Iterator[str]:
        for row, cells in zip(self.rows, self._cells()):
            rule = ' style="border-top: 1px solid"' if row.is_total else ""
            depths = [row.depth, *[0] * (len(cells) - 1)]
            inside = "".join(map(_cell_of_html, ["td"] * len(cells), self.columns, cells, depths))
            yield f"<tr{rule}>{inside}</tr>"

    def _cells(self) -> Iterator[list[str]]:
        for row in self.rows:
            yield [*row.cells, *[""] * (len(self.columns) - len(row.cells))]

    def _indented(self) -> Iterator[list[str]]:
        for row, cells in zip(self.rows, self._cells()):
            yield ["  " * row.depth + cells[0], *cells[1:]]

    def _plain_lines(self) -> list[str]:
        """Return columns as wide as what is in them, separated by two spaces."""
        lines = [[column.title for column in self.columns], *self._indented()]
        widths = [max(map(len, cells)) for cells in zip(*lines)]
        return [
            "  ".join(
                cell.rjust(width) if column.is_figure else cell.ljust(width)
                for column, cell, width in zip(self.columns, line, widths)
            ).rstrip()
            for line in lines
        ]

    def _drawn_lines(self, rich: tuple[Any, Any, Any, Any], width: int) -> list[str]:
        console, table_class, text_class, box = rich
        table = table_class(box=box)
        for column in self.columns:
            justify = "right" if column.is_figure else "left"
            table.add_column(column.title, justify=justify, no_wrap=column.is_figure, overflow="fold")
        for row, cells in zip(self.rows, self._indented()):
            if row.is_total:
                table.add_section()
            table.add_row(*map(text_class, cells))
        file = StringIO()
        # In a notebook rich would draw on the page, and leave the file empty.
        console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
        return [line.rstrip() for line in file.getvalue().splitlines()]


def _markdown_line(cells: Sequence[str]) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def _cell_of_html(tag: str, column: Column, text: str, depth: int = 0) -> str:
    style = "text-align: right; white-space: nowrap" if column.is_figure else "text-align: left"
    indent = f"; padding-left: {1 + depth}em" if depth else ""
    return f'<{tag} style="{style}{indent}">{escape(text)}</{tag}>'


def _width() -> int:
    return shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH


def classes_of_rich() -> tuple[Any, Any, Any, Any] | None:
    """Return rich's (Console, Table, Text, box of a table); None without rich."""
    try:
        with Rewound(random.getstate, random.setstate, random.getstate()):  # its import draws random numbers
            from rich import box
            from rich.console import Console
            from rich.table import Table as RichTable
            from rich.text import Text
    except ImportError:
        return None
    return Console, RichTable, Text, box.SIMPLE
