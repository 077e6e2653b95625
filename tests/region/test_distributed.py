"""Rule 21: DistributedDataParallel, fully_shard, tensor parallelism and collectives, on two processes.

`distributed_cases` says what the cases are; one pair of processes runs all of them, once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest
from distributed_cases import CASES, PROCESSES
from distributed_worker import Report, report_file
from process_groups import environment_of_ranks, wait_for

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
        wait_for(done.exists, PATIENCE_SECONDS)
    else:
        run_pair(found)
        done.touch()
    return found


def run_pair(directory: Path) -> None:
    """Run two processes that share nothing, not even the seed of hashes."""
    environment = environment_of_ranks()
    processes = []
    for rank in range(PROCESSES):
        command = [sys.executable, distributed_worker.__file__, str(rank), str(directory)]
        with (directory / f"output-{rank}").open("w") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    try:
        wait_for(lambda: all(process.poll() is not None for process in processes), PATIENCE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
