"""Options that several commands have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.integrations.recipe._text import parse_policy
from reactivate.planner.plan import Plan

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_WORDS = {"True": True, "False": False, "None": None}


def _settings(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, each: a value is a number, true or false, null, a JSON list or object, or else a text."""
    settings = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name.isidentifier():
            raise click.BadParameter(f"{value!r} is not NAME=VALUE.", ctx, param)
        settings[name] = _value_of(text)
    return settings


def _value_of(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _dtype(ctx: click.Context, param: click.Parameter, name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def _together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


TARGET = _together(
    click.argument("target"),
    click.option(
        "--set",
        "settings",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_settings,
        help="A field of the config, or a keyword argument of the factory. May be repeated.",
    ),
    click.option("--batch", type=click.IntRange(1), help="Samples in a batch. For configs: 1."),
    click.option(
        "--length",
        type=click.IntRange(1),
        help="Tokens in a sample. For configs: 512, or as many as there are positions.",
    ),
    click.option(
        "--dtype",
        type=click.Choice([*DTYPES]),
        callback=_dtype,
        help="Of parameters and floating-point inputs.",
    ),
)
"""What names a model, and how it is to be made."""

POLICY = _together(
    click.option("--plan", "plan_file", metavar="PLAN.json", help="Apply a plan that was saved."),
    click.option(
        "--policy",
        "policy_text",
        metavar="POLICY",
        help='Apply a policy, as in Python: "full()", "first_match(save_ops(\'linear\'), full())".',
    ),
)
"""What is to be applied to it."""

REPORTING = _together(
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document, and nothing else."),
    # Where a command fails its options may not have been parsed, so that `Commands.main` looks for these itself.
    click.option("--traceback", is_flag=True, expose_value=False, help="Show the traceback of an error."),
)
"""How it is answered."""


def policy_of(plan_file: str | None, policy_text: str | None) -> Policy | None:
    """The policy that is asked for; None if none is.

    Raises:
        UsageError: two are, or it cannot be understood.
    """
    if plan_file is not None and policy_text is not None:
        raise UsageError("--plan and --policy: one of the two; a plan is a policy.")
    if plan_file is not None:
        return Plan.load(Path(plan_file))
    return None if policy_text is None else parse_policy(policy_text)
