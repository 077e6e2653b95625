"""Tables on the terminal."""

from __future__ import annotations

from _selective_results import PARTS, Results
from _selective_tables import TITLES, different, tables
from _terminal import COLORS
from rich import box
from rich.console import Console
from rich.table import Table as RichTable


def show(results: Results) -> None:
    """All tables."""
    console = Console()
    for part in PARTS:
        found = tables(results, part)
        if found:
            console.rule(TITLES[part])
        for table in found:
            shown = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_style="bold")
            for name in table.header:
                shown.add_column(name, justify="left" if name in ("way", "keeps", "mode") else "right")
            for cells in table.rows:
                shown.add_row(*(f"[{COLORS[cell]}]{cell}[/]" if cell in COLORS else cell for cell in cells))
            console.print(shown)
        for name, what in different(results, part):
            console.print(f"  Different from plain, bit for bit: {name}: {what}", style="bold red")
