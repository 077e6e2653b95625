"""Files that a plan is written to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from reactivate.errors import UsageError
from reactivate.planner.plan import Plan

DRAWN = (".html", ".png", ".svg", ".txt")
_IN_A_FOLDER = ("plan.json", "plan.html", "plan.png")

OUT = click.option(
    "--out",
    "outs",
    multiple=True,
    metavar="PATH",
    help="Write the plan to a .json file, a report of it to .html, its pictures to .png or .svg, its tables to .txt; a "
    "folder gets plan.json, plan.html and plan.png. May be repeated.",
)


def files_of(outs: Sequence[str]) -> list[Path]:
    """The files that `--out` asks for, looked at before there is anything to write.

    Raises:
        UsageError: a file is of another kind.
    """
    files: list[Path] = []
    for out in outs:
        path = Path(out)
        if path.is_dir() or not path.suffix:
            files += (path / name for name in _IN_A_FOLDER)
        elif path.suffix in (".json", *DRAWN):
            files.append(path)
        else:
            raise UsageError(
                f"--out {out}: it takes a folder, or a file whose name ends in {', '.join(('.json', *DRAWN))}."
            )
    return files


def write(plan: Plan, files: Sequence[Path]) -> None:
    """Write the plan to each of the files, and say so on stderr.

    Raises:
        UsageError: an extra is missing that draws it, or a file cannot be written.
    """
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            plan.save(file)
        except OSError as error:
            raise UsageError(f"--out {file}: {error.strerror or error}.") from None
        click.echo(f"wrote {file}", err=True)
