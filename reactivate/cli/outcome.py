"""The end of a command: an exit code, one line, and a JSON document where that was asked for."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import click

from reactivate.errors import PlanInfeasible, ReactivateError, UsageError


class Code(IntEnum):
    """Exit codes."""

    YES = 0
    NO = 1
    USAGE = 2
    MISSING_EXTRA = 3
    FAILED = 4
    INTERRUPTED = 130


def answer(as_json: bool, document: Any, text: object) -> None:
    """Print a JSON document if that was asked for, or else a text."""
    click.echo(json.dumps(document, indent=1) if as_json else str(text))


def code_of(error: BaseException) -> Code:
    """The exit code for what a command raised.

    Examples:
        >>> from reactivate.cli.outcome import code_of
        >>> code_of(reactivate.errors.UsageError("no such option")).name, code_of(KeyError("x")).name
        ('USAGE', 'FAILED')
    """
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return Code.INTERRUPTED
    if isinstance(error, PlanInfeasible):
        return Code.NO
    if isinstance(error, UsageError) and isinstance(error.__cause__, ImportError):
        return Code.MISSING_EXTRA
    return Code.USAGE if isinstance(error, (UsageError, click.ClickException)) else Code.FAILED


def line_of(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return "interrupted"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{error.format_message()} See `{error.ctx.command_path} --help`."
    text = error.format_message() if isinstance(error, click.ClickException) else " ".join(str(error).split())
    if isinstance(error, (UsageError, PlanInfeasible, click.ClickException)):
        return text
    hint = "" if isinstance(error, ReactivateError) else " (--traceback shows where)"
    return f"{type(error).__name__}: {text}{hint}"


def tell(error: BaseException, *, as_json: bool, with_traceback: bool) -> Code:
    """Say on stderr what went wrong, and with `--json` on stdout as well."""
    code, line = code_of(error), line_of(error)
    if with_traceback:
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    click.echo(f"error: {line}", err=True)
    if as_json:
        kind = "infeasible" if code is Code.NO else code.name.lower()
        document: dict[str, Any] = {"error": {"kind": kind, "message": line}}
        if isinstance(error, PlanInfeasible):
            figures = {"budget_bytes": error.budget_bytes, "least_bytes": error.least_bytes}
            document = {"feasible": False, **figures, **document}
        click.echo(json.dumps(document, indent=1))
    return code


class Commands(click.Group):
    """A group whose commands return their exit codes, and whatever they raise becomes one."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; leave with its exit code, or return that if not `standalone_mode`."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
        except (Exception, KeyboardInterrupt) as error:
            # Not from the parsed options: there are none where parsing failed.
            code = tell(error, as_json="--json" in given, with_traceback="--traceback" in given)
        if standalone_mode:
            sys.exit(code or 0)
        return code or 0
