"""torch's checkpoint tests: their source, and a run of one file on one engine, in a process with this module as a plugin.

The plugin puts the drop-in in place, and writes down what became of each test.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

import reactivate
from reactivate._passes.observing import observed_by
from reactivate._region.region import Region as Record

TORCH, REACTIVATE = "torch", "reactivate"

# Neither the settings of this project nor those of torch, whose plugins are for its CI; and no file in the checkout.
PYTEST_ALONE = ("-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider", "--tb=short")


@dataclass(frozen=True)
class Section:
    """Tests of one file.

    Attributes:
        file: below `test/`.
        select: pytest's `-k`, for files with other tests too.
        limit_seconds: for one run of them.
    """

    file: str
    select: str = ""
    limit_seconds: float = 600


SECTIONS = (
    Section("test_autograd.py", "checkpoint"),
    Section("test_utils.py", "TestCheckpoint"),
    Section("test_module_tracker.py", "confused_hierarchy"),
    Section("test_nestedtensor.py", "activation_checkpoint"),
    Section("functorch/test_vmap.py", "test_checkpoint"),
    Section("distributed/_composable/test_checkpoint.py"),
    Section("distributed/_tools/test_mod_tracker.py", "test_ac"),
    Section("distributed/fsdp/test_checkpoint_wrapper.py"),
    Section("dynamo/test_activation_checkpointing.py"),
    Section("dynamo/test_aot_autograd_cache.py", "sac_ or checkpoint_with_dropout or changing_cache_hash"),
    Section("dynamo/test_aot_compile.py", "with_checkpoint"),
    Section("dynamo/test_repros.py", "recompile_with_ac"),
    Section("higher_order_ops/test_local_map.py", "sac or fx_annotations"),
    Section("inductor/test_compiled_autograd.py", "TestCompiledAutograd and checkpointing"),
)


@dataclass(frozen=True)
class Source:
    """The source of the tests.

    Attributes:
        version: what is in its `version.txt`.
        commit: None if it is not a git checkout.
        archive: {name: sha256} of the file that it was unpacked from, if that was given.
        files: {test file: sha256}.
    """

    version: str
    commit: str | None
    archive: dict[str, str]
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """One sha256 for all test files, which tells whether two results are of the same tests."""
        lines = [f"{digest}  {file}\n" for file, digest in sorted(self.files.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


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


def run(section: Section, checkout: Path, engine: str) -> dict[str, Outcome]:
    """{test: outcome} of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "outcomes.json", Path(folder) / "log"
        run_pytest(section, checkout / "test", ["--engine", engine, "--outcomes", str(file)], log)
        if not file.is_file() or not (outcomes := json.loads(file.read_text(encoding="utf-8"))):
            end = log.read_text(encoding="utf-8", errors="replace")[-4000:]
            sys.exit(f"{end}\nNo test of {section.file} ran to its end on {engine}.")
    for outcome in outcomes.values():
        outcome["message"] = outcome["message"].replace(f"{checkout}{os.sep}", "")
    return {test: Outcome(**outcome) for test, outcome in outcomes.items()}


def run_pytest(section: Section, tests: Path, options: Sequence[str], log: Path) -> None:
    """Run a section with the plugin, which takes `options`.

    What it prints goes to a file: a pipe would be held open by the processes that the compiler leaves behind.
    """
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTORCH_TEST_WITH_SLOW": "1"}
    command = [sys.executable, "-m", "pytest", *PYTEST_ALONE, "-p", Path(__file__).stem, *options]
    with log.open("wb") as output:
        try:
            subprocess.run(
                [*command, "-k", section.select, section.file],
                cwd=tests,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=section.limit_seconds,
            )
        except subprocess.TimeoutExpired:
            sys.exit(f"{section.file} ran longer than {section.limit_seconds:.0f} s.")


def describe_source(checkout: Path, archive: Path | None, files: Sequence[str]) -> Source:
    """Return the source of the tests."""
    commit = None
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return Source(
        (checkout / "version.txt").read_text(encoding="utf-8").strip(),
        commit,
        {} if archive is None else {archive.name: sha256(archive)},
        {file: sha256(checkout / "test" / file) for file in files},
    )


def sha256(path: Path) -> str:
    """Of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- the plugin -------------------------------------------------------------------------------------------------------


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
