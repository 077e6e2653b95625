"""`reactivate run`."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

import click

from reactivate._text.words import counted
from reactivate.dropin import install

_WHY_NONE = (
    " The script never called torch.utils.checkpoint in this process, or only without gradients. Turn on its checkpointing, "
    "or call reactivate.apply in it."
)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: Path, arguments: tuple[str, ...]) -> int:
    """Run SCRIPT with its ARGUMENTS, with reactivate in the place of torch.utils.checkpoint.

    The script is not edited, and neither are the libraries that it imports. A line on stderr says at the end how many
    checkpointed regions ran.
    """
    installation = install()
    before = sys.argv[:], sys.path[:]
    sys.argv[:], sys.path[:0] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        with installation:
            runpy.run_path(str(script), run_name="__main__")
    except Exception:  # as Python itself says it
        traceback.print_exc()
        return 1
    finally:
        sys.argv[:], sys.path[:] = before
        why = "" if installation.regions else _WHY_NONE
        click.echo(f"reactivate: {counted(installation.regions, 'checkpointed region')} ran.{why}", err=True)
    return 0
