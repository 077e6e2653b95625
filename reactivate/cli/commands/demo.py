"""`reactivate demo`."""

from __future__ import annotations

from pathlib import Path

import click

from reactivate.cli import demo as job
from reactivate.cli.options import REPORTING


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="demo",
    show_default=True,
    help="The folder of its files.",
)
@REPORTING
def demo(out: Path, as_json: bool) -> int:
    """Train a small GPT plain and planned, and show that the two are the same; it takes less than a minute.

    Exits with 1 if they are not.
    """
    return job.run(out, as_json)
