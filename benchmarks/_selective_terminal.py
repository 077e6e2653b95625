"""Tables on the terminal."""

from __future__ import annotations

from _selective_results import PARTS, Results
from _selective_tables import TITLES, different, tables
from _terminal import drawn
from rich.console import Console

TEXTS = ("way", "keeps", "mode")
"""Columns of words."""


def show(results: Results) -> None:
    """All tables."""
    console = Console()
    for part in PARTS:
        found = tables(results, part)
        if found:
            console.rule(TITLES[part])
        for table in found:
            console.print(drawn(table, TEXTS))
        for name, what in different(results, part):
            console.print(f"  Different from plain, bit for bit: {name}: {what}", style="bold red")
