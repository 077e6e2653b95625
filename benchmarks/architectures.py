"""Plan forty architectures for three budgets each, run the plans, and compare the models with themselves before planning.

python benchmarks/architectures.py                     on the terminal, some minutes
python benchmarks/architectures.py llama,mixtral       some of them
python benchmarks/architectures.py --out DIRECTORY     JSON and Markdown as well; rows that are there are not run again
python benchmarks/architectures.py --out DIRECTORY --again llama    but these

An architecture runs in a process of its own, with a limit of time. The list, by class and configuration, is in
`_architectures_list.py`. Budgets are shares of the plain step's activation peak. Where none fits, the plan is made for the
least that has one. Peaks are the running sum of the profiler's memory events over a whole step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import torch
from _architectures_list import ARCHITECTURES
from _architectures_row import Found, Row, measure_row
from _presentation import Record, Table, describe_machine, names_of_models, read, show, write

LIMIT = 300  # seconds for an architecture


@dataclass(frozen=True)
class Results(Record):
    """All of them.

    Attributes:
        rows: one for each architecture, in the order of the list.
    """

    benchmark: ClassVar[str] = "architectures"
    rows: tuple[Row, ...]

    def tables(self) -> list[Table | str]:
        """Return a sentence, the table, and what was other than it should be."""
        header = (
            "architecture",
            "kind",
            "proved",
            "seconds",
            "80 %",
            "50 %",
            "30 %",
            "worst promise",
            "bitwise",
            "left alone",
        )
        table = Table("Plans of forty architectures", header, [_cells(row) for row in self.rows])
        return [self.sentence(), table, *self.failures()]

    def sentence(self) -> str:
        """Say how many are right."""
        right = sum(row.is_right for row in self.rows)
        budgets = [item for row in self.rows for item in row.found]
        counts = Counter(item.verdict for item in budgets)
        above = sum(not item.holds for item in budgets)
        return (
            f"{right} of {len(self.rows)} architectures are right in everything. Of {len(budgets)} plans, "
            f"{counts['planned']} are for the budget that was asked for and {counts['infeasible']} for the least with one; "
            f"{above} took more than their budget. {self.machine['cpu']}, torch {self.machine['torch']}, one thread."
        )

    def failures(self) -> list[str]:
        """List what is wrong, an architecture a line."""
        return [f"- {row.name}: {'; '.join(_wrong(row))}" for row in self.rows if not row.is_right]


def _wrong(row: Row) -> list[str]:
    said = [row.error] if row.error else []
    said += [
        f"{item.budget}: {item.verdict}, {item.measured_bytes / item.budget_bytes:.2f} of the budget"
        for item in row.found
        if not item.holds
    ]
    said += [f"{item.budget}: {', '.join(item.differences)} differ" for item in row.found if item.differences]
    said += [f"changed: {', '.join(row.changed)}"] if row.changed else []
    return said + ([f"its forward afterwards: {', '.join(row.forward)}"] if row.forward else [])


def _cells(row: Row) -> tuple[str, ...]:
    by_budget = {item.budget: item for item in row.found}
    cells = [_cell(by_budget.get(budget) or by_budget.get("least")) for budget in ("80%", "50%", "30%")]
    promise = max((item.measured_bytes / item.promised_bytes - 1 for item in row.found), key=abs, default=0.0)
    exact = "yes" if row.found and not any(item.differences for item in row.found) else "no"
    alone = "no" if row.changed or row.forward or not row.found else "yes"
    return (
        row.name,
        row.family,
        row.method or "error",
        f"{row.planning_seconds:.1f}",
        *cells,
        f"{promise:+.2%}",
        exact,
        alone,
    )


def _cell(found: Found | None) -> str:
    if found is None:
        return "error"
    share = f"{found.measured_bytes / found.budget_bytes:.3f}"
    return share if found.verdict == "planned" else f"least: {share}"


def measured_apart(name: str, seconds: int = LIMIT) -> Row:
    """Measure an architecture in a process of its own.

    Args:
        name: of the list.
        seconds: the most that it may take.
    """
    item = ARCHITECTURES[name]
    command = [sys.executable, __file__, "--one", name]
    try:
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Row(name, item.family, item.source, error=f"no answer in {seconds} s")
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or ["no word"]
        return Row(name, item.family, item.source, error=f"ended with {run.returncode}: {last[0][:300]}")
    return row_of(json.loads(run.stdout.splitlines()[-1]))


def row_of(value: dict[str, object]) -> Row:
    """Return a row from JSON."""
    found: list[dict[str, object]] = value["found"]  # type: ignore[assignment]
    texts = {key: tuple(value[key]) for key in ("changed", "forward", "warnings")}  # type: ignore[arg-type]
    return Row(**{**value, **texts, "found": tuple(Found(**item) for item in found)})  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="?", default="", help="architectures, with commas between them (default: all)")
    parser.add_argument("--one", metavar="NAME", help="in this process, as JSON")
    parser.add_argument("--again", default="", metavar="NAMES", help="run these though they are in the results")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(asdict(measure_row(options.one))))
        return
    wanted = names_of_models(ARCHITECTURES, options.names) or list(ARCHITECTURES)
    again = list(ARCHITECTURES) if options.again == "all" else names_of_models(ARCHITECTURES, options.again)
    machine = describe_machine(torch.device("cpu"))
    known = _known(options.out, machine)
    for name in wanted:
        missing = [package for package in ARCHITECTURES[name].needs if find_spec(package) is None]
        if missing:
            print(f"{name}: needs {', '.join(missing)}", file=sys.stderr)
        elif name not in known or name in again:
            known[name] = measured_apart(name)
            print(
                f"{name}: {'right' if known[name].is_right else '; '.join(_wrong(known[name]))}",
                file=sys.stderr,
                flush=True,
            )
            if options.out:
                _write(_results(machine, known), options.out)
    show(_results(machine, {name: known[name] for name in wanted if name in known}).tables())


def _results(machine: dict[str, str | int | None], known: dict[str, Row]) -> Results:
    return Results(machine, tuple(known[name] for name in ARCHITECTURES if name in known))


def _known(directory: Path | None, machine: dict[str, str | int | None]) -> dict[str, Row]:
    path = None if directory is None else directory / f"{Results(machine, ()).name}.json"
    return {row.name: row for row in read(Results, path).rows} if path is not None and path.exists() else {}


def _write(results: Results, directory: Path) -> None:
    text = "\n\n".join(item if isinstance(item, str) else item.to_markdown() for item in results.tables())
    write(directory, results.name, json=results.to_json(), md=f"{text}\n")


if __name__ == "__main__":
    main()
