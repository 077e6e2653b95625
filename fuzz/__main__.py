"""The command `python -m fuzz`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from fuzz.campaign import Limits, campaign, place_on
from fuzz.failures import Failures
from fuzz.generate import generate
from fuzz.judge import judge
from fuzz.page import page
from fuzz.report import Summary, failure_text
from fuzz.sittings import LEG, Record, load
from fuzz.source import source_of

PROGRESS = 5.0
"""Seconds from one progress line to the next."""


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign and return 1 if it found a failure."""
    options = _parser().parse_args(arguments)
    place_on(options.device)
    seconds = 60.0 if options.seconds is None and options.count is None else options.seconds
    limits = Limits(options.count, seconds)
    failures = Failures(options.shrink)
    if options.record:
        record = load(options.record, options.seed)
        first, summary = record.first, record.summary
        _say(f"seeds from {record.next}")
        _sittings(record, limits, options.workers, failures, options.record)
    else:
        first = int(time.time()) % 1_000_000 * 1_000_000 if options.seed is None else options.seed
        _say(f"seeds from {first}")
        if options.show:
            print(source_of(generate(first)))
        summary = Summary()
        _campaign(summary, first, limits, options.workers, failures)
    print(json.dumps(summary.to_json()) if options.json else summary.text())
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
    parser.add_argument("--device", default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument("--shrink", type=int, default=20, help="number of failures to shrink and print")
    parser.add_argument("--show", action="store_true", help="print the first program")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the counts as a page of the documentation, too"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="keep the counts there, and go on from them next time, as long as the code is the same",
    )
    return parser


def _sittings(record: Record, limits: Limits, workers: int, failures: Failures, path: Path) -> None:
    """Go on with a campaign, leg by leg, until it has its count or the sitting its seconds; a leg is never cut short."""
    start = time.monotonic()
    while limits.seconds is None or time.monotonic() - start < limits.seconds:
        left = LEG if limits.count is None else min(LEG, limits.count - record.summary.programs)
        if left <= 0:
            return
        _campaign(record.summary, record.next, Limits(left), workers, failures)
        record.save(path)


def _campaign(summary: Summary, first: int, limits: Limits, workers: int, failures: Failures) -> None:
    start, before = time.monotonic(), summary.seconds
    shown = start
    for seed, verdict in campaign(first, limits, workers):
        summary.add(seed, verdict)
        now = time.monotonic()
        summary.seconds = before + now - start
        if now - shown >= PROGRESS:
            shown = now
            _say(summary.line())
        program = failures.add(seed, verdict)
        if program is not None:
            _say(failure_text(seed, judge(program, failures.arm), program))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
