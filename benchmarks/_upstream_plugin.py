"""A pytest plugin for `upstream.py`: puts the drop-in in place, and writes down what became of each test.

It runs in the process of the tests, which is told the engine and the file to write to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

import reactivate
from reactivate._engine.record import Record, observed_by

TORCH, REACTIVATE = "torch", "reactivate"


@dataclass
class Outcome:
    """The outcome of one test.

    Attributes:
        result: "passed", "failed", "skipped" or "xfailed".
        message: why, in one line, if it did not pass.
        regions, recomputations: how many of ours ran on the thread of the test.
    """

    result: str = "passed"
    message: str = ""
    regions: int = 0
    recomputations: int = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which engine, and where to write."""
    group = parser.getgroup("upstream")
    group.addoption("--engine", choices=(TORCH, REACTIVATE), required=True)
    group.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Install the drop-in before a test file is imported, as a program would."""
    recorder = Recorder(config.getoption("--outcomes"))
    config.pluginmanager.register(recorder)
    if config.getoption("--engine") == REACTIVATE:
        stack = ExitStack()
        stack.enter_context(reactivate.dropin.install())
        stack.enter_context(observed_by(recorder))
        config.add_cleanup(stack.close)


class Recorder:
    """Collects the outcomes; an observer of regions as well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, Outcome] = {}
        self._running = Outcome()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._running = self._outcomes[item.nodeid] = Outcome()
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of a test, or one of its subtests: what failed once has failed."""
        outcome = self._outcomes[report.nodeid]
        if outcome.result == "failed" or report.outcome == "passed":
            return
        if report.outcome == "skipped" and report.when == "call" and hasattr(report, "context"):
            return  # a subtest alone
        outcome.result = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        outcome.message = _message(report)

    def pytest_sessionfinish(self) -> None:
        outcomes = {name: asdict(outcome) for name, outcome in self._outcomes.items()}
        self._path.write_text(json.dumps(outcomes), encoding="utf-8")

    def forward_done(self, record: Record) -> None:
        self._running.regions += 1

    def recomputation_done(self, record: Record) -> None:
        self._running.recomputations += 1


def _message(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: (file, line, reason)
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(report.longrepr if crash is None else crash.message).splitlines()
    return lines[0] if lines else ""
