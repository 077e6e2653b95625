"""Which tests kill which mutants of the core: the proof that the tests of `make test` are sharp.

python tests/kill_mutants.py                      the sample of mutants, each until a test kills it: hours
python tests/kill_mutants.py --only matching      those whose name has a word
python tests/kill_mutants.py --record             only which test runs what, and the table of what the tests cost

Everything happens in forks of one process, which has collected all tests. First each test runs once with code that notes
which blocks of the core it runs. Then each mutant runs the tests that run its block, those of the first
tier, and if it survives, the others. What has been done is kept in `--work`, and is not done again.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import hashlib
import importlib
import json
import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mutants
import pytest
from mutant_tables import COSTS, MUTANTS, RESULTS, costs_page, mutants_page, results
from mutants import CORE, ROOT, Loaded, Mutant

TESTS = str(ROOT / "tests")
PATIENCE = 20.0
"""Seconds after which a test that takes none is seen as one that does not end."""


@dataclass(eq=False)
class Test:
    """One test, with the blocks of the core that it runs and the time that it takes."""

    item: pytest.Item
    seconds: float = 0.0
    blocks: frozenset[tuple[str, int]] = frozenset()
    passes: bool = False

    @property
    def tier(self) -> int:
        return 2 if self.item.get_closest_marker("second") else 1


@dataclass
class Child:
    """A fork that runs tests, and says what it does line by line."""

    pid: int
    pipe: int
    limit: Callable[[str], float]
    finish: Callable[[list[Any]], None]
    text: bytes = b""
    lines: list[Any] = field(default_factory=list)
    deadline: float = 0.0

    def read(self) -> bool:
        """Read what there is; return whether the fork has more to say."""
        piece = os.read(self.pipe, 1 << 16)
        *lines, self.text = (self.text + piece).split(b"\n")
        for line in lines:
            said = json.loads(line)
            self.lines.append(said)
            if said[0] == "begin":
                self.deadline = time.monotonic() + self.limit(said[1])
        return bool(piece)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)
        self.finish(self.lines)


class Pool:
    """So many forks at a time."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.selector = selectors.DefaultSelector()

    def run(self, works: Iterable[tuple[Callable[[Callable[..., None]], None], Any, Any]]) -> None:
        """Run works, each in a fork: a function that is given `say`, a limit in seconds for each test, and an end."""
        for work, limit, finish in works:
            while len(self.selector.get_map()) >= self.jobs:
                self._wait()
            self._start(work, limit, finish)
        while self.selector.get_map():
            self._wait()

    def _start(self, work: Callable[[Callable[..., None]], None], limit: Any, finish: Any) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(reading)
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)
            try:
                work(lambda *said: _write(writing, said))
            finally:
                os._exit(0)
        os.close(writing)
        child = Child(pid, reading, limit, finish, deadline=time.monotonic() + 10 * PATIENCE)
        self.selector.register(reading, selectors.EVENT_READ, child)

    def _wait(self) -> None:
        for key, _ in self.selector.select(timeout=1.0):
            if not key.data.read():
                self.selector.unregister(key.fd)
                key.data.end()
        for key in list(self.selector.get_map().values()):
            if time.monotonic() > key.data.deadline:
                self.selector.unregister(key.fd)
                key.data.end()


def _write(pipe: int, said: Any) -> None:
    os.write(pipe, json.dumps(said).encode() + b"\n")


class Killing:
    """As a plugin of pytest, in the place of the loop that runs the tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.failed: list[str] = []
        self.ran = False
        self.suspects: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
            self.failed.append(" ".join(text.split())[-300:])
        self.ran = self.ran or (report.when == "call" and report.passed)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        session.config.option.all = False  # one sample of each row in torch's tables
        self.tests = {item.nodeid: Test(item) for item in session.items}
        for path in CORE:
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        self.loaded = Loaded()
        self.pool = Pool(self.options.jobs)
        self.pool.run(self._recordings())
        self._read_recordings()
        if self.options.record and self.options.tests == [TESTS]:
            COSTS.write_text(costs_page(self._costs()), encoding="utf-8")
        if not self.options.record:
            if self.options.together:
                self._together()
            self.pool.run(self._killings())
            MUTANTS.write_text(mutants_page(results(), len(mutants.sample(10**9))), encoding="utf-8")
        return True

    # -- which tests run what -----------------------------------------------------------------------------------------

    def _recordings(self) -> Iterator[Any]:
        files: dict[str, list[Test]] = {}
        for test in self.tests.values():
            files.setdefault(str(test.item.path), []).append(test)
        self.recorded = {name: self.options.work / f"{_mark_of(Path(name))}.json" for name in files}
        for name, tests in files.items():
            place = self.recorded[name]
            if not place.exists():
                yield self._record(name, tests, place)

    def _record(self, name: str, tests: list[Test], place: Path) -> Any:
        def work(say: Callable[..., None]) -> None:
            hit: set[tuple[str, int]] = set()
            builtins.__block__ = hit.add  # type: ignore[attr-defined]
            for path in CORE:
                self.loaded.replace(mutants.counted(path))
            for test, after in zip(tests, [*tests[1:], None]):
                hit.clear()
                self.failed, self.ran = [], False
                begun = sum(os.times()[:4])  # of the processor: the machine may be busy
                say("begin", test.item.nodeid)
                _run(test, after)
                blocks = sorted([str(Path(path).relative_to(ROOT)), number] for path, number in hit.copy())
                seconds = sum(os.times()[:4]) - begun
                say("end", _inside(test.item), round(seconds, 3), self.ran and not self.failed, blocks)

        def finish(lines: list[Any]) -> None:
            rows = [line[1:] for line in lines if line[0] == "end"]
            place.write_text(json.dumps(rows))
            print(
                f"{Path(name).name}: {len(rows)} of {len(tests)} tests, {sum(row[1] for row in rows):.0f} s of CPU",
                flush=True,
            )

        return work, lambda name: 300.0, finish

    def _read_recordings(self) -> None:
        recorded = {name: json.loads(place.read_text()) for name, place in self.recorded.items()}
        rows = {name: {row[0]: row[1:] for row in found} for name, found in recorded.items()}
        for test in self.tests.values():
            row = rows[str(test.item.path)].get(_inside(test.item))
            if row is not None:
                seconds, passes, blocks = row
                test.seconds, test.passes = seconds, passes
                test.blocks = frozenset((str(ROOT / path), number) for path, number in blocks)
        self.order = sorted(self.tests.values(), key=lambda test: test.seconds)

    def _costs(self) -> dict[Path, list[tuple[int, float]]]:
        costs: dict[Path, list[tuple[int, float]]] = {}
        for test in self.tests.values():
            costs.setdefault(test.item.path, []).append((test.tier, test.seconds))
        return costs

    # -- which tests kill what ----------------------------------------------------------------------------------------

    def _killings(self) -> Iterator[Any]:
        rows = {row["name"]: row for row in results()}
        for mutant in mutants.sample(self.options.count):
            is_alive = mutant.name in rows and rows[mutant.name]["outcome"] == "survived"
            is_due = is_alive if self.options.together else mutant.name not in rows or (is_alive and self.options.again)
            if is_due and self.options.only in mutant.name:
                chosen = self._tests_for(mutant)
                yield self._kill(mutant, chosen, [test for test in chosen if test.item.nodeid in self.suspects])

    def _together(self) -> None:
        """Find the tests that fail with all survivors at once: of the others none kills any of them."""
        alive = {row["name"] for row in results() if row["outcome"] == "survived"}
        files: dict[Path, dict[int, Mutant]] = {}
        for mutant in mutants.sample(self.options.count):
            if mutant.name in alive and self.options.only in mutant.name:
                files.setdefault(mutant.path, {}).setdefault(mutant.node, mutant)
        blocks = {(str(mutant.path), mutant.block) for found in files.values() for mutant in found.values()}
        chosen: dict[Path, list[Test]] = {}
        for test in self.tests.values():
            if test.passes and test.tier in self.options.tiers and not blocks.isdisjoint(test.blocks):
                chosen.setdefault(test.item.path, []).append(test)

        def work_on(tests: list[Test]) -> Callable[[Callable[..., None]], None]:
            def work(say: Callable[..., None]) -> None:
                for found in files.values():
                    self.loaded.replace(mutants.mutated(*found.values()))
                for test, after in zip(tests, [*tests[1:], None]):
                    self.failed = []
                    say("begin", test.item.nodeid)
                    _run(test, after)
                    say("failed" if self.failed else "passed", test.item.nodeid)

            return work

        def finish_for(tests: list[Test]) -> Callable[[list[Any]], None]:
            def finish(lines: list[Any]) -> None:
                passed = {line[1] for line in lines if line[0] == "passed"}
                begun = [line[1] for line in lines if line[0] == "begin"]
                self.suspects.update(name for name in begun if name not in passed)
                ran = len(begun) or 1
                print(f"{tests[0].item.path.name}: of {ran} tests {len(passed)} pass with all survivors", flush=True)
                if tests[ran:]:  # the process ended in a test
                    rest.append(tests[ran:])

            return finish

        rest = list(chosen.values())
        while rest:
            now, rest[:] = rest[:], []
            self.pool.run((work_on(tests), self._limit, finish_for(tests)) for tests in now)

    def _tests_for(self, mutant: Mutant) -> list[Test]:
        """List the tests that run a mutant: of each function one case before the others.

        Those come first that are about its file, by a guess: a test that runs what few others run there, and is short.
        """
        key, path = (str(mutant.path), mutant.block), str(mutant.path)
        here = {test: [block for block in test.blocks if block[0] == path] for test in self.order if test.passes}
        how_many = Counter(block for blocks in here.values() for block in blocks)
        seen: Counter[str] = Counter()
        rows = []
        for test in here:
            if key in test.blocks and test.tier in self.options.tiers:
                function = test.item.nodeid.partition("[")[0]
                seen[function] += 1
                weight = sum(1 / how_many[block] for block in here[test]) / (0.1 + test.seconds)
                rows.append((test.tier, seen[function], -weight, test.item.nodeid, test))
        return [row[-1] for row in sorted(rows, key=lambda row: row[:4])]

    def _limit(self, name: str) -> float:
        return PATIENCE + 10 * self.tests[name].seconds

    def _kill(self, mutant: Mutant, every: list[Test], suspects: list[Test]) -> Any:
        chosen = suspects if self.options.together else every
        begun = time.monotonic()

        def work(say: Callable[..., None]) -> None:
            try:
                self.loaded.replace(mutants.mutated(mutant))
            except (SyntaxError, ValueError) as error:  # other free variables
                say("not made", str(error))
                return
            end = time.monotonic() + self.options.seconds
            for test, after in zip(chosen, [*chosen[1:], None]):
                say("begin", test.item.nodeid)
                _run(test, after)
                if self.failed:
                    say("killed", test.item.nodeid, self.failed[0])
                    return
                if time.monotonic() > end:
                    break
            say("survived")

        def finish(lines: list[Any]) -> None:
            said = lines[-1] if lines else ["killed", "", "the process ended"]
            if said[0] == "begin":
                said = ["killed", said[1], "the process ended, or the test did not"]
            row = {"name": mutant.name, "line": mutant.line, "outcome": said[0], "tests": len(every)}
            ran = sum(line[0] == "begin" for line in lines)
            row["ran"] = ran + len(every) - len(chosen)
            row["seconds"] = round(time.monotonic() - begun, 1)
            if said[0] == "killed":
                row |= {"tier": self.tests[said[1]].tier if said[1] else 1, "by": said[1], "error": said[2]}
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['outcome']} {row.get('tier', '')} after {row['seconds']} s: {mutant.name}", flush=True)

        return work, self._limit, finish


def _run(test: Test, after: Test | None) -> None:
    test.item.ihook.pytest_runtest_protocol(item=test.item, nextitem=after and after.item)


def _inside(item: pytest.Item) -> str:
    """Name a test inside of its file, which may move."""
    return item.nodeid.partition("::")[2]


def _mark_of(path: Path) -> str:
    """Name the recording of a test file as it and the core are now."""
    content = b"".join(each.read_bytes() for each in (path, *CORE))
    return f"{path.stem}-{hashlib.sha1(content).hexdigest()[:10]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=400, help="how many mutants")
    parser.add_argument("--jobs", type=int, default=1, help="forks at a time")
    parser.add_argument("--again", action="store_true", help="those that have survived once more")
    parser.add_argument(
        "--together", action="store_true", help="the same, and all tests with all of them at once first"
    )
    parser.add_argument("--only", default="", help="a word of the names of mutants")
    parser.add_argument("--tiers", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for one mutant")
    parser.add_argument("--record", action="store_true", help="no mutants: only which test runs what, and its seconds")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutants", help="where recordings are kept")
    parser.add_argument("tests", nargs="*", default=[TESTS])
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    everything = ["--all"] if 2 in options.tiers else []
    arguments = ["-s", "-p", "no:cacheprovider", "-p", "no:xdist", *everything, *options.tests]
    return int(pytest.main(arguments, plugins=[Killing(options)]))


if __name__ == "__main__":
    sys.exit(main())
