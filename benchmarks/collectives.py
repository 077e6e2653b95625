"""Collectives of training steps, with this package beside torch's checkpoint, on processes of gloo.

python benchmarks/collectives.py                    on the terminal, in two minutes
python benchmarks/collectives.py --out DIRECTORY    JSON and Markdown as well, named for device and torch version

The programs are those of the tests: two steps with `fully_shard`, tensor, sequence, context and expert parallelism, and
pipelines. Each compares losses, gradients, parameters and random numbers with the plain run, bit for bit, and raises if one
differs. Collectives are counted by a dispatch mode, those in recomputations as well; of pipelines also how often blocks run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _presentation import Table, describe_machine, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import process_group_worker
from process_group_worker import PROGRAMS
from process_groups import output_of, run_ranks

PROCESSES = 2
WAYS = {"plain": "plain", "torch": "torch's checkpoint", "ours": "reactivate", "saving": "collectives saved"}


def measure(names: Sequence[str], processes: int = PROCESSES) -> list[dict[str, Any]]:
    """Return what each program ran, added up over its processes: {way: {collective: count}}, and calls of blocks.

    Raises:
        RuntimeError: a process did not come to the end, or found a difference.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        run_ranks(process_group_worker.__file__, processes, directory, *names)
        for index, name in enumerate(names):
            reports = []
            for rank in range(processes):
                file = directory / f"report-{rank}-{index}"
                if not file.exists():
                    raise RuntimeError(f"{name}: no report\n{output_of(directory, rank)}")
                reports.append(json.loads(file.read_text()))
                if reports[-1]["error"] is not None:
                    raise RuntimeError(f"{name}: {reports[-1]['error']}")
            rows.append({"program": name, "processes": processes, **_added(reports)})
    return rows


def _added(reports: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"collectives": {}, "calls": {}}
    for way in WAYS:
        counts = [report[way]["collectives"] for report in reports if "collectives" in report.get(way, {})]
        if counts:
            keys = sorted({key for count in counts for key in count})
            found["collectives"][way] = {key: sum(count.get(key, 0) for count in counts) for key in keys}
        if "calls" in reports[0].get(way, {}):
            found["calls"][way] = sum(report[way]["calls"] for report in reports)
    return found


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """Return two tables: collectives of each program, and calls of the blocks of pipelines."""
    cells = [(row["program"], *(_total(row["collectives"].get(way)) for way in WAYS)) for row in rows]
    title = f"Collectives of two steps on {PROCESSES} processes"
    found = Table(title, ("program", *WAYS.values()), cells).with_title()
    ways = [way for way in WAYS if way != "saving"]
    pipelines = [(row["program"], *(str(row["calls"][way]) for way in ways)) for row in rows if row["calls"]]
    header = ("schedule", *(WAYS[way] for way in ways))
    return found + "\n\n" + Table("Calls of the blocks, recomputations included", header, pipelines).with_title()


def _total(counts: dict[str, int] | None) -> str:
    return "" if counts is None else str(sum(count for key, count in counts.items() if key != "recomputed"))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a directory for JSON and Markdown")
    given = parser.parse_args()
    rows = measure([*PROGRAMS])
    print(to_markdown(rows))
    if given.out is not None:
        name = f"collectives-cpu-torch{torch.__version__.partition('+')[0]}"
        record = json.dumps({"machine": describe_machine(torch.device("cpu")), "rows": rows}, indent=1)
        write(given.out, name, json=record + "\n", md=to_markdown(rows) + "\n")


if __name__ == "__main__":
    main()
