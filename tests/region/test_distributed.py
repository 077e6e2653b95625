"""Rule 21: DistributedDataParallel, fully_shard, tensor parallelism and collectives, on two processes.

`distributed_cases` says what the cases are; one pair of processes runs all of them, once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import distributed_worker
import pytest
from distributed_cases import CASES, PROCESSES
from distributed_worker import Report, report_file

PATIENCE_SECONDS = 150.0  # after which what has no report is a failure


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the reports, when all that will come have come."""
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributed"
    done = found / "done"
    try:
        found.mkdir()
    except FileExistsError:  # another of xdist's workers has come first, and runs them for all
        wait_for(done.exists)
    else:
        run_pair(found)
        done.touch()
    return found


def run_pair(directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = []
    for rank in range(PROCESSES):
        command = [sys.executable, distributed_worker.__file__, str(rank), str(directory)]
        with (directory / f"output-{rank}").open("w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    try:
        wait_for(lambda: all(process.poll() is not None for process in processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for(is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_over() and time.monotonic() < end:
        time.sleep(0.05)


def reports_of(directory: Path, name: str) -> list[Report]:
    reports = []
    for rank in range(PROCESSES):
        file = report_file(directory, rank, [*CASES].index(name))
        output = (directory / f"output-{rank}").read_text()
        assert file.exists(), f"process {rank} did not come to the end of it:\n{output}"
        reports.append(Report(**json.loads(file.read_text())))
    return reports


@pytest.mark.parametrize("name", CASES)
def test_bitwise(name: str, directory: Path) -> None:
    """Losses, gradients, parameters, buffers and random numbers, over three steps and on both processes."""
    case = CASES[name]
    for rank, report in enumerate(reports_of(directory, name)):
        assert report.error is None, f"process {rank}:\n{report.error}"
        assert (report.regions, report.recomputations) == (case.regions, case.recomputations)
        assert report.kept_bytes < report.kept_bytes_plain


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.collectives_of_a_recomputation is not None]
)
def test_every_process_recomputations_the_same_collectives(name: str, directory: Path) -> None:
    """Collectives of the plain training in their order, and those of the recomputations between them, early stop or not."""
    first, second = reports_of(directory, name)
    assert first.collectives == second.collectives
    assert first.collectives_plain == second.collectives_plain
    assert [entry for entry in first.collectives if not entry[1]] == first.collectives_plain
    recomputed = [collective for collective, is_in_a_recomputation in first.collectives if is_in_a_recomputation]
    assert recomputed == CASES[name].collectives_of_a_recomputation * CASES[name].recomputations
