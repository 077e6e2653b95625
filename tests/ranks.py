"""Cases that run on several processes of gloo.

A module of cases has a table `CASES`: {name: Case}. `errors_of` starts the processes that they need, once for each number of
ranks; each case has a process group of its own, and a report of its own in a directory.

    python ranks.py RANKS DIRECTORY MODULE PROCESSES
"""

from __future__ import annotations

import functools
import importlib
import json
import os
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
from process_groups import fork_ranks, output_of, run_ranks, wait_for

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
        wait_for(done.exists)
    else:
        run_ranks(__file__, wanted.ranks, directory, module, wanted.processes)
        done.touch()
    found = []
    for rank in range(1 if wanted.is_killed else wanted.ranks):
        report = directory / f"{name}-{rank}"
        error = json.loads(report.read_text()) if report.exists() else "no report\n" + output_of(directory, rank)
        if error:
            found.append(f"rank {rank}:\n{error}")
    return found


@contextmanager
def _process_group(one: Case, rank: int, store: Path) -> Iterator[None]:
    files = dist.FileStore(str(store), one.ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=one.ranks, timeout=one.timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _main(ranks: int, directory: Path, module: str, processes: str) -> None:
    cases = importlib.import_module(module).CASES
    fork_ranks(ranks, directory, functools.partial(_run_cases, cases, processes, directory))


def _run_cases(cases: Cases, processes: str, directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    for name, one in cases.items():
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
    _main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
