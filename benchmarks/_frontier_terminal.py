"""Tables on the terminal."""

from __future__ import annotations

from _frontier_results import Frontier
from _frontier_tables import BAD, GOOD, TEXTS, different, in_short, optimum_in_words, tables
from _terminal import drawn
from rich.console import Console

COLORS = dict.fromkeys(GOOD, "green") | dict.fromkeys(BAD, "bold red")


def show(found: Frontier) -> None:
    """All that was found of a model."""
    console = Console()
    console.rule(found.model)
    for table in tables(found):
        console.print(drawn(table, TEXTS, COLORS))
    console.print(in_short(found), style="bold")
    console.print(optimum_in_words(found))
    console.print(
        f"Planned in {found.planning_seconds:.1f} s, for each further budget {found.replanning_seconds:.2f} s."
    )
    for what in found.sac_ilp:
        console.print(f"No sac_ilp: {what}", markup=False)
    for name, what in different(found):
        console.print(f"Different from plain, bit for bit: {name}: {what}")
