"""Starts the processes of `process_group_worker`, and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

WORKER = Path(__file__).parent / "process_group_worker.py"
PATIENCE_SECONDS = 600.0  # after which what has no report is a failure


def start(processes: int, directory: Path, names: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    started = []
    for rank in range(processes):
        command = [sys.executable, str(WORKER), str(rank), str(processes), str(directory), *names]
        with (directory / f"output-{rank}").open("w") as output:
            started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    return started


def finish(started: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait for the end of all processes, and end those that do not come to one: their status is None."""
    wait_for(lambda: all(process.poll() is not None for process in started))
    statuses = [process.poll() for process in started]
    for process in started:
        process.kill()
        process.wait()
    return statuses


def wait_for(is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_over() and time.monotonic() < end:
        time.sleep(0.05)
