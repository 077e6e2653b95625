"""Rule 21 on 2 and 4 processes: units of `fully_shard` around and inside of regions, tensor, sequence, context and expert
parallelism, and pipelines, bitwise; collectives counted beside torch's checkpoint; and processes that fail or disagree.

`process_group_programs` and `pipeline_programs` say what runs; each set of processes runs all its programs, once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import process_group_worker
import pytest
from process_group_programs import PATCHED, TIMEOUT_SECONDS, ways_of
from process_group_worker import FAILURES, PROGRAMS
from process_groups import output_of, run_ranks, wait_for

WORKER = process_group_worker.__file__
ON_FOUR = ("fsdp, parts", "sequence parallel", "context parallel", "experts", "pipeline, zero bubble", PATCHED)
PROGRAMS_OF = {2: [*PROGRAMS], 4: [name for name in ON_FOUR if name in PROGRAMS]}
GATHERS = ("allgather", "allgather_base", "all_gather_into_tensor")


def reports_of(processes: int, name: str, base: Path) -> list[dict[str, Any]]:
    """Return the reports of all ranks about a program, after running all programs of that many processes once."""
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"process-groups-{processes}"
    done = directory / "done"
    try:
        directory.mkdir()
    except FileExistsError:  # they run already, or have run
        wait_for(done.exists)
    else:
        run_ranks(WORKER, processes, directory, *PROGRAMS_OF[processes])
        done.touch()
    reports = []
    for rank in range(processes):
        file = directory / f"report-{rank}-{PROGRAMS_OF[processes].index(name)}"
        assert file.exists(), f"process {rank} did not come to the end:\n{output_of(directory, rank)}"
        reports.append(json.loads(file.read_text()))
    return reports


MARKS = {2: [], 4: [pytest.mark.slow]}
EACH = [
    pytest.param(processes, name, marks=MARKS[processes]) for processes, names in PROGRAMS_OF.items() for name in names
]
QUICK_FAILURES = {"other shape"}


@pytest.mark.parametrize(("processes", "name"), EACH)
def test_bitwise(processes: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Losses, gradients, parameters and random numbers over two steps, on each process."""
    for rank, report in enumerate(reports_of(processes, name, tmp_path_factory.getbasetemp())):
        assert report["error"] is None, f"process {rank}:\n{report['error']}"
        for way in {"ours", "saving"} & {*ways_of(name)}:
            found = report[way]
            assert found["regions"] == found["recomputations"] > 0
            assert found.get("sharded again", True), "parameters are gathered still, after the backward"


@pytest.mark.parametrize(("processes", "name"), EACH)
def test_no_more_collectives_than_with_torchs_checkpoint(
    processes: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reports = reports_of(processes, name, tmp_path_factory.getbasetemp())
    if not name.startswith("pipeline"):  # of which each process has another part
        assert all(report["ours"]["collectives"] == reports[0]["ours"]["collectives"] for report in reports)
    for report in reports:
        ours, theirs = report["ours"]["collectives"], report.get("torch", {}).get("collectives")
        assert sum(ours.values()) > 0
        if theirs is None:
            assert name.startswith(
                "context parallel"
            )  # where torch's checkpoint fails: it loses the choice of a kernel
        else:
            assert {key: ours[key] for key in ours if key != "recomputed"} == theirs
            assert any(ours.get(key, 0) for key in GATHERS) or name.startswith(("experts", "pipeline"))


@pytest.mark.parametrize(("processes", "name"), [item for item in EACH if item.values[1].startswith("pipeline")])
def test_blocks_of_a_pipeline_run_twice(processes: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Once forward, once for both halves of the backward; and more often with torch's checkpoint, if there are halves."""
    for report in reports_of(processes, name, tmp_path_factory.getbasetemp()):
        assert report["ours"]["calls"] == 2 * report["plain"]["calls"] > 0
        if "zero bubble" in name:
            assert report["torch"]["calls"] > 3 * report["plain"]["calls"]
        else:
            assert report["torch"]["calls"] == report["ours"]["calls"]


@pytest.mark.parametrize(("processes", "name"), [item for item in EACH if "saving" in ways_of(item.values[1])])
def test_saved_collectives_run_once(processes: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for report in reports_of(processes, name, tmp_path_factory.getbasetemp()):
        assert "recomputed" not in report["saving"]["collectives"]
        assert report["saving"]["collectives"] == report["plain"]["collectives"]
        assert report["ours"]["collectives"]["recomputed"] > 0


@pytest.mark.parametrize(
    ("processes", "name"), [item for item in EACH if item.values[1].startswith("context parallel")]
)
def test_the_choice_of_a_kernel_holds_in_a_recomputation(
    processes: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for report in reports_of(processes, name, tmp_path_factory.getbasetemp()):
        assert report["ours"]["flash"] == [[False, False], [True, False]]
        assert report["plain"]["flash"] == [[False, False]]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK_FAILURES else [pytest.mark.slow]) for name in FAILURES]
)
def test_every_process_ends_with_an_error(name: str, tmp_path: Path) -> None:
    """A process that dies, and ones that disagree: nobody waits longer than the process group's timeout."""
    statuses = run_ranks(WORKER, 2, tmp_path, name)
    for rank, status in enumerate(statuses):
        output = output_of(tmp_path, rank)
        assert status is not None, f"process {rank} hangs:\n{output}"
        if status == 0:
            report = json.loads((tmp_path / f"report-{rank}-0").read_text())
            assert report["error"] is not None, f"process {rank} has noticed nothing"
            assert report["seconds"] < 6 * TIMEOUT_SECONDS
    if name.startswith("killed"):
        assert statuses[1] == 3
