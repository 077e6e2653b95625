"""`reactivate verify`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

import reactivate
from reactivate.cli.options import POLICY, REPORTING, TARGET, policy_of
from reactivate.cli.outcome import Code, answer
from reactivate.cli.target import Request, subject_of
from reactivate.cli.where import device_here


@click.command()
@TARGET
@POLICY
@click.option("--device", metavar="DEVICE", help="Of torch: where it runs.")
@REPORTING
def verify(
    target: str,
    plan_file: str | None,
    policy_text: str | None,
    device: str | None,
    as_json: bool,
    settings: dict[str, Any],
    **sizes: Any,
) -> int:
    """Run TARGET plain and checkpointed, and compare every bit.

    Without --plan or --policy its own regions are verified; if it has none, it is made one. Exits with 1 if the two are
    not the same.
    """
    policy = policy_of(plan_file, policy_text)
    subject = subject_of(Request(target, settings, **sizes, device=device_here(device)))
    verdict = reactivate.verify(subject.model, subject.args, subject.kwargs, policy=policy)
    answer(as_json, dataclasses.asdict(verdict), verdict)
    return Code.YES if verdict else Code.NO
