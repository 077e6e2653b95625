"""The command `python -m fuzz`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from fuzz.campaign import Limits, campaign
from fuzz.failures import Failures
from fuzz.generate import generate
from fuzz.judge import judge
from fuzz.page import page
from fuzz.report import Summary, failure_text
from fuzz.source import source_of

PROGRESS = 5.0
"""Seconds from one progress line to the next."""


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign and return 1 if it found a failure."""
    options = _parser().parse_args(arguments)
    limits = Limits(
        options.count, None if options.count is not None and options.seconds is None else options.seconds or 60
    )
    first = int(time.time()) % 1_000_000 * 1_000_000 if options.seed is None else options.seed
    _say(f"seeds from {first}")
    if options.show:
        print(source_of(generate(first)))
    summary = _campaign(first, limits, options.workers, Failures(options.shrink))
    print(summary.as_json() if options.json else summary.text())
    if options.page:
        options.page.write_text(page(summary, first, options.workers), encoding="utf-8")
    return int(summary.failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fuzz", description="Run random training programs plain and checkpointed."
    )
    parser.add_argument("--seconds", type=float, help="time to run; by default 60, without a count")
    parser.add_argument("--count", type=int, help="number of programs")
    parser.add_argument(
        "--seed", type=int, help="seed of the first program; the others follow. By default from the clock"
    )
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--shrink", type=int, default=20, help="number of failures to shrink and print")
    parser.add_argument("--show", action="store_true", help="print the first program")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the counts as a page of the documentation, too"
    )
    return parser


def _campaign(first: int, limits: Limits, workers: int, failures: Failures) -> Summary:
    summary = Summary()
    start = shown = time.monotonic()
    for seed, verdict in campaign(first, limits, workers):
        summary.add(seed, verdict)
        now = time.monotonic()
        summary.seconds = now - start
        if now - shown >= PROGRESS:
            shown = now
            _say(summary.line())
        program = failures.add(seed, verdict)
        if program is not None:
            _say(failure_text(seed, judge(program, failures.arm), program))
    return summary


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
