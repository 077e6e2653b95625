"""Cases that run on several processes of gloo.

A module of cases has a table `CASES`: {name: Case}. `outcomes` starts the processes that they need, once for each number of
ranks; each case has a process group of its own, and a report of its own in a directory.

    python ranks.py MODULE COUNT RANK DIRECTORY
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PATIENCE_SECONDS = 600.0  # after which what has no report is a failure
TIMEOUT = timedelta(seconds=30)
LATE_SECONDS = 20.0  # after which an error came too late


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        run: (directory) -> None; raises on a rank where it fails.
        ranks: how many processes there are.
        timeout: of their group.
        is_killed: whether ranks but the first end in it, so that nobody else can use these processes.
    """

    run: Callable[[Path], None]
    ranks: int
    timeout: timedelta
    is_killed: bool

    @property
    def processes(self) -> str:
        """Return which processes run it."""
        return f"{self.ranks}-{self.run.__name__}" if self.is_killed else str(self.ranks)


Cases = dict[str, Case]


def case(
    cases: Cases, *counts: int, timeout: timedelta = TIMEOUT, is_killed: bool = False
) -> Callable[..., Callable[..., None]]:
    """Put a function into a table of cases, for each of these numbers of ranks."""

    def put(run: Callable[..., None]) -> Callable[..., None]:
        takes_directory = run.__code__.co_argcount > 0
        for count in counts:
            call = run if takes_directory else functools.wraps(run)(lambda directory: run())
            cases[f"{run.__name__} on {count}"] = Case(call, count, timeout, is_killed)
        return run

    return put


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """Expect an error with these words, in time."""
    start = time.monotonic()
    with pytest.raises(kind) as found:
        yield
    assert time.monotonic() - start < LATE_SECONDS
    for word in words:
        assert word in str(found.value), f"{word!r} is not in: {found.value}"


def listed(cases: Cases) -> list[Any]:
    """Return the names of cases, as parameters of a test; those on more than two processes are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if wanted.ranks > 2 else []) for name, wanted in cases.items()]


def errors_of(module: str, name: str, factory: pytest.TempPathFactory) -> list[str]:
    """Return what went wrong in a case, by rank."""
    wanted = importlib.import_module(module).CASES[name]
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = base / f"{module}-{wanted.processes}"
    done = directory / "done"
    try:
        directory.mkdir()
    except FileExistsError:  # another test, or another of xdist's workers, has come first, and runs them for all
        _wait_for(done.exists)
    else:
        _run_all(module, wanted, directory)
        done.touch()
    found = []
    for rank in range(1 if wanted.is_killed else wanted.ranks):
        report = directory / f"{name}-{rank}"
        error = (
            json.loads(report.read_text())
            if report.exists()
            else "no report\n" + (directory / f"out-{rank}").read_text()
        )
        if error:
            found.append(f"rank {rank}:\n{error}")
    return found


def _run_all(module: str, wanted: Case, directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = []
    for rank in range(wanted.ranks):
        command = [sys.executable, __file__, module, wanted.processes, str(rank), str(directory)]
        with (directory / f"out-{rank}").open("w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    try:
        _wait_for(lambda: all(process.poll() is not None for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait_for(is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_over() and time.monotonic() < end:
        time.sleep(0.05)


@contextmanager
def _process_group(one: Case, rank: int, store: Path) -> Iterator[None]:
    files = dist.FileStore(str(store), one.ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=one.ranks, timeout=one.timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _main(module: str, processes: str, rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    for name, one in importlib.import_module(module).CASES.items():
        if one.processes != processes:
            continue
        error = ""
        try:
            with _process_group(one, rank, directory / f"store {name}"):
                one.run(directory)
        except BaseException:
            error = traceback.format_exc()
        unfinished = directory / f"unfinished-{rank}"
        unfinished.write_text(json.dumps(error))
        unfinished.rename(directory / f"{name}-{rank}")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
