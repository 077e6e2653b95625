"""`reactivate show`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from reactivate.cli.options import REPORTING
from reactivate.cli.outcome import Code, answer
from reactivate.cli.output import OUT, files_of, write
from reactivate.planner.plan import Plan


@click.command()
@click.argument("plan_file", metavar="PLAN.json")
@OUT
@REPORTING
def show(plan_file: str, outs: Sequence[str], as_json: bool) -> int:
    """Print or draw a plan that was saved."""
    files = files_of(outs)
    plan = Plan.load(plan_file)
    answer(as_json, plan.to_json(), plan)
    write(plan, files)
    return Code.YES
