"""Tables on the terminal."""

from __future__ import annotations

from _terminal import drawn
from _xla_results import Results
from _xla_tables import early_table, model_tables, target_table
from rich.console import Console


def show(results: Results) -> None:
    """All tables."""
    console = Console()
    for table in (target_table(results), *model_tables(results), early_table(results)):
        console.print(drawn(table))
