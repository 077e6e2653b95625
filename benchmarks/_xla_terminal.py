"""Tables on the terminal."""

from __future__ import annotations

from _terminal import COLORS
from _xla_results import Results
from _xla_tables import early_table, model_tables, target_table
from rich import box
from rich.console import Console
from rich.table import Table as RichTable


def show(results: Results) -> None:
    """All tables."""
    console = Console()
    for table in (target_table(results), *model_tables(results), early_table(results)):
        shown = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_style="bold")
        for index, name in enumerate(table.header):
            shown.add_column(name, justify="right" if index else "left")
        for cells in table.rows:
            shown.add_row(*(f"[{COLORS[cell]}]{cell}[/]" if cell in COLORS else cell for cell in cells))
        console.print(shown)
