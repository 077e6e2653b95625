"""Ranks as forks of one process: what all of them import is imported once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 600.0  # after which what has no report is a failure


def run_ranks(script: str, ranks: int, directory: Path, *arguments: str) -> list[int | None]:
    """Run a script that calls `fork_ranks`, as `python SCRIPT RANKS DIRECTORY ARGUMENT...`.

    Each rank writes to `output-RANK` in the directory. Returns its exit code, or None for one that came to no end.
    """
    command = [sys.executable, script, str(ranks), str(directory), *arguments]
    with (directory / "output").open("w") as output:
        started = subprocess.Popen(
            command, env=environment_of_ranks(), stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_for(lambda: started.poll() is not None)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)  # with the ranks
        started.wait()
    codes = [directory / f"exit-code-{rank}" for rank in range(ranks)]
    return [int(code.read_text()) if code.exists() else None for code in codes]


def environment_of_ranks() -> dict[str, str]:
    """Return the variables of processes that talk to each other on this machine."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def fork_ranks(ranks: int, directory: Path, run: Callable[[int], None]) -> None:
    """Call `run` with the number of each rank, in a fork, and write down how these end."""
    started: dict[int, int] = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            output = os.open(directory / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            run(rank)
            return
        started[child] = rank
    while started:
        child, status = os.wait()
        (directory / f"exit-code-{started.pop(child)}").write_text(str(os.waitstatus_to_exitcode(status)))


def output_of(directory: Path, rank: int) -> str:
    """Return what a rank has written, and what was written before there were ranks."""
    files = [directory / "output", directory / f"output-{rank}"]
    return "".join(file.read_text() for file in files if file.exists())


def wait_for(is_over: Callable[[], bool], patience: float = PATIENCE_SECONDS) -> None:
    end = time.monotonic() + patience
    while not is_over() and time.monotonic() < end:
        time.sleep(0.05)
