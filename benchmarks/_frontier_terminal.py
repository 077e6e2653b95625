"""Tables on the terminal."""

from __future__ import annotations

from _frontier_results import Frontier
from _frontier_tables import BAD, GOOD, TEXTS, different, in_short, optimum_in_words, tables
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

COLORS = dict.fromkeys(GOOD, "green") | dict.fromkeys(BAD, "bold red")


def show(found: Frontier) -> None:
    """All that was found of a model."""
    console = Console()
    console.rule(found.model)
    for table in tables(found):
        shown = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_style="bold")
        for name in table.header:
            shown.add_column(name, justify="left" if name in TEXTS else "right")
        for cells in table.rows:
            shown.add_row(*(f"[{COLORS[cell]}]{cell}[/]" if cell in COLORS else cell for cell in cells))
        console.print(shown)
    console.print(in_short(found), style="bold")
    console.print(optimum_in_words(found))
    console.print(
        f"Planned in {found.planning_seconds:.1f} s, for each further budget {found.replanning_seconds:.2f} s."
    )
    for what in found.sac_ilp:
        console.print(f"No sac_ilp: {what}", markup=False)
    for name, what in different(found):
        console.print(f"Different from plain, bit for bit: {name}: {what}")
