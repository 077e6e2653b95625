"""`reactivate doctor`."""

from __future__ import annotations

import click

from reactivate import _doctor
from reactivate.cli.options import REPORTING
from reactivate.cli.outcome import answer


@click.command()
@REPORTING
def doctor(as_json: bool) -> int:
    """Show versions, devices and missing names of torch, for bug reports; needs no extra package."""
    found = _doctor.examine()
    answer(as_json, found, _doctor.text(found))
    return 0
