"""`python -m reactivate`, and the command `reactivate`."""

from __future__ import annotations

import os
import sys

MISSING_EXTRA = 3


def main() -> int:
    """Run the command line, whose exit codes `reactivate.cli` explains; 3 if click is not installed."""
    try:
        import click  # noqa: F401
    except ImportError:
        print(
            "error: the command needs click, which is not installed: pip install 'reactivate[cli]'",
            file=sys.stderr,
        )
        return MISSING_EXTRA
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's log
    from reactivate.cli import command

    return int(command(prog_name="reactivate", standalone_mode=False) or 0)


if __name__ == "__main__":
    sys.exit(main())
