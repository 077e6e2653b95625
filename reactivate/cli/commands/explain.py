"""`reactivate explain`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import click
import torch
from torch.nn import Module

import reactivate
from reactivate.cli.options import POLICY, REPORTING, TARGET, policy_of
from reactivate.cli.outcome import Code, answer
from reactivate.cli.target import Request, subject_of
from reactivate.cli.where import device_here
from reactivate.errors import UsageError
from reactivate.report import Comparison, Explanation


@click.command()
@TARGET
@POLICY
@click.option("--device", metavar="DEVICE", help="Of torch: where it runs.")
@click.option("--fake", "is_fake", is_flag=True, help="Without memory and without compute; no times then.")
@click.option("--compare", is_flag=True, help="Beside the plain model: needs --plan or --policy.")
@REPORTING
def explain(
    target: str,
    plan_file: str | None,
    policy_text: str | None,
    device: str | None,
    is_fake: bool,
    compare: bool,
    as_json: bool,
    settings: dict[str, Any],
    **sizes: Any,
) -> int:
    """Show what a step of TARGET keeps for its backward, by module and line, and what it recomputes."""
    policy = policy_of(plan_file, policy_text)
    where = device_here(device)
    subject = subject_of(Request(target, settings, **sizes, device=where, on_meta=is_fake and where is None))
    if isinstance(subject.model, Module) and any(item.is_meta for item in subject.model.parameters()):
        subject = subject.to(torch.device("meta"))  # the inputs too
    call, fake = (subject.model, subject.args, subject.kwargs), is_fake or None
    found: Explanation | Comparison
    if compare:
        if policy is None:
            raise UsageError("--compare needs the policy to compare the plain model with: --plan or --policy.")
        found = reactivate.compare(*call, policy=policy, fake=fake)
    else:
        if policy is not None and not isinstance(subject.model, Module):
            raise UsageError("--plan and --policy are applied to a module, and TARGET made a function.")
        with nullcontext() if policy is None else reactivate.apply(subject.model, policy):
            found = reactivate.explain(*call, fake=fake)
    answer(as_json, found.to_json(), found)
    return Code.YES
