"""Progress and tables on the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from _measure import Tick
from _results import Results, Track
from _tables import Table, named, tables
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

REFRESH_SECONDS = 0.5
COLORS = {"met": "green", "missed": "bold red", "within noise": "yellow"}


@contextmanager
def progress() -> Iterator[Track]:
    """A bar for each part. No thread draws it, for that would disturb the measurement: it is drawn between rounds."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, auto_refresh=False) as bars:
        drawn = 0.0

        def track(description: str, rounds: int) -> Tick:
            task = bars.add_task(description, total=rounds)

            def tick() -> None:
                nonlocal drawn
                bars.advance(task)
                if monotonic() - drawn > REFRESH_SECONDS or bars.tasks[task].finished:
                    bars.refresh()
                    drawn = monotonic()

            return tick

        yield track


def drawn(table: Table, texts: Collection[str] = (), colors: Mapping[str, str] = COLORS) -> RichTable:
    """A table for the terminal.

    Args:
        table: its cells.
        texts: the columns of words; without them the first.
        colors: of cells, by what is in them.
    """
    shown = RichTable(title=table.title.replace("`", ""), box=box.SIMPLE_HEAD, title_style="bold")
    for name in table.header:
        shown.add_column(name, justify="left" if name in (texts or table.header[:1]) else "right")
    for cells in table.rows:
        shown.add_row(*(f"[{colors[cell]}]{cell}[/]" if cell in colors else cell for cell in cells))
    return shown


def show(results: Results) -> None:
    """All tables."""
    console = Console()
    for table in tables(results):
        console.print(drawn(table))
    console.print("One step of the ten-module block, bit for bit against plain:", style="bold")
    for name, what in results.differences.items():
        console.print(f"  {named(name, results)}: {'differs in ' + ', '.join(what) if what else 'the same'}")
