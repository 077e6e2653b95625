"""`python -m reactivate`, and the command `reactivate`."""

from __future__ import annotations

import os
import sys

MISSING_EXTRA = 3
_HELP = """Usage: reactivate COMMAND [OPTIONS]

Activation checkpointing for PyTorch, planned to fit and verified bit for bit.

Without further packages:
  doctor    show versions, devices and missing names of torch, for bug reports (--json)

With click and rich, pip install click rich:
  plan, show, verify, explain, demo, devices
"""


def main() -> int:
    """Run the command line, whose exit codes `reactivate.cli` explains; 3 if a command needs click and there is none."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's log
    try:
        import click  # noqa: F401
    except ImportError:
        return _without_click(sys.argv[1:])
    from reactivate.cli import command

    return int(command(prog_name="reactivate", standalone_mode=False) or 0)


def _without_click(arguments: list[str]) -> int:
    if arguments[:1] == ["doctor"]:
        from reactivate._doctor import main as doctor

        return doctor(arguments[1:])
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    print("error: the command needs click, which is not installed: pip install click rich", file=sys.stderr)
    return MISSING_EXTRA


if __name__ == "__main__":
    sys.exit(main())
