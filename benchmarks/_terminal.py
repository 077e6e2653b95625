"""Progress and tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from _measure import Tick
from _results import Results, Track
from _tables import named, tables
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


def show(results: Results) -> None:
    """All tables."""
    console = Console()
    for table in tables(results):
        shown = RichTable(title=table.title.replace("`", ""), box=box.SIMPLE_HEAD, title_style="bold")
        for index, name in enumerate(table.header):
            shown.add_column(name, justify="right" if index else "left")
        for cells in table.rows:
            shown.add_row(*(f"[{COLORS[cell]}]{cell}[/]" if cell in COLORS else cell for cell in cells))
        console.print(shown)
    console.print("One step of the ten-module block, bit for bit against plain:", style="bold")
    for name, what in results.differences.items():
        console.print(f"  {named(name, results)}: {'differs in ' + ', '.join(what) if what else 'the same'}")
