"""The processes of `test_process_groups`.

    python process_group_worker.py PROCESSES DIRECTORY NAME...

Each program and each failure has a process group of its own, and a report in the directory.
"""

from __future__ import annotations

import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from oracle import Watched, assert_bitwise, random_states, seed_everything
from pipeline_programs import FAILURES as IN_PIPELINES, PIPELINES
from process_group_programs import (
    FAILURES as OTHER_FAILURES,
    PROGRAMS as OTHERS,
    TIMEOUT_SECONDS,
    WAYS,
    Found,
    Wrap,
    ways_of,
)
from process_groups import fork_ranks
from torch.utils.checkpoint import CheckpointError

from reactivate._passes.observing import observed_by

PROGRAMS: dict[str, Callable[[Wrap], Found]] = {**OTHERS, **PIPELINES}
FAILURES: dict[str, Callable[[], None]] = {**OTHER_FAILURES, **IN_PIPELINES}


def run_program(name: str, report: dict[str, Any]) -> None:
    """Run a program in each way; compare our ways with the plain one."""
    found: dict[str, dict[str, Any]] = {}
    for way in ways_of(name):
        seed_everything()
        torch.manual_seed(dist.get_rank())
        ran = Watched()
        try:
            with observed_by(ran):
                found[way] = PROGRAMS[name](WAYS[way]) | random_states()
        except CheckpointError as error:
            if way != "torch":
                raise
            report[way] = {"error": str(error)}
            continue
        collectives = found[way].pop("collectives")
        extra = {key: found[way].pop(key) for key in ("sharded again", "flash", "calls") if key in found[way]}
        report[way] = {
            "collectives": collectives,
            "regions": ran.regions,
            "recomputations": ran.recomputations,
            **extra,
        }
    for way in {"ours", "saving"} & found.keys():
        assert found["plain"].keys() == found[way].keys()
        for key, value in found["plain"].items():
            assert_bitwise(value, found[way][key], f"{way}: {key}")


def main(processes: int, directory: Path, names: list[str], rank: int) -> None:
    torch.set_num_threads(1)
    for index, name in enumerate(names):
        report: dict[str, Any] = {"error": None}
        begin = time.monotonic()
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(directory / f"store-{index}"), processes),
                rank=rank,
                world_size=processes,
                timeout=timedelta(seconds=TIMEOUT_SECONDS if name in FAILURES else 60),
            )
            begin = time.monotonic()
            if name in FAILURES:
                FAILURES[name]()
            else:
                run_program(name, report)
        except Exception as error:
            report["error"] = traceback.format_exc()
            report["kind"] = type(error).__name__
        report["seconds"] = time.monotonic() - begin
        unfinished = directory / f"unfinished-{rank}"
        unfinished.write_text(json.dumps(report))
        unfinished.rename(directory / f"report-{rank}-{names.index(name)}")
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    processes, directory, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    fork_ranks(processes, directory, functools.partial(main, processes, directory, names))
