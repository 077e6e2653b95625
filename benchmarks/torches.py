"""Run the tests on several torches, and tabulate how many pass.

python benchmarks/torches.py PYTHON ...                    all tests but slow ones with each of these interpreters
python benchmarks/torches.py --public PYTHON               those of `make test-public`
python benchmarks/torches.py --failed PYTHON ...           of an earlier run only what failed, after it was mended
python benchmarks/torches.py PYTHON ... -- --ignore FILE   with options for pytest

Every interpreter has its own torch; the package is that of the current directory. Results go to `--out`, in the place of
earlier ones of the same torch, Python and kind, and all that is there makes the table of `--page`. The exit status is 1 if
a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from xml.etree import ElementTree

HERE = Path(__file__).parent
VERSIONS = "import platform, torch; print(torch.__version__.partition('+')[0], platform.python_version())"
ALL, PUBLIC = "all tests", "the engine's tests, public names of torch only"


Key = tuple[tuple[int, ...], str, str]


@dataclass(frozen=True)
class Row:
    """The outcomes of the tests on one torch.

    Attributes:
        torch, python: versions.
        tests: which of them ran.
        skipped: {reason: number}.
        failed: names.
        minutes: wall time, on whatever machine it was.
    """

    torch: str
    python: str
    tests: str
    passed: int
    skipped: dict[str, int]
    failed: tuple[str, ...]
    minutes: float

    @property
    def key(self) -> Key:
        """Return what tells two rows apart, in the order of the table."""
        return tuple(map(int, self.torch.split(".")[:3])), self.tests, self.python


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parse(arguments)
    found = {row.key: row for row in read(options.out)}
    rows = []
    for python in options.pythons:
        row = (
            again(python, found, options)
            if options.failed
            else run(python, options.public, options.jobs, options.pytest)
        )
        rows.append(row)
        found[row.key] = row
        ordered = [found[key] for key in sorted(found)]
        options.out.write_text(json.dumps([asdict(item) for item in ordered], indent=1) + "\n", encoding="utf-8")
        print(f"torch {row.torch}: {row.passed} passed, {len(row.failed)} failed", *row.failed, sep="\n  ", flush=True)
    if options.page:
        options.page.write_text(page_of(read(options.out)), encoding="utf-8")
    sys.exit(any(row.failed for row in rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pythons", nargs="*", metavar="PYTHON", help="an interpreter that has a torch; none: the page alone"
    )
    parser.add_argument("--public", action="store_true", help="the engine's tests, with public names of torch only")
    parser.add_argument("--failed", action="store_true", help="run only what failed last time, and count it anew")
    parser.add_argument("--jobs", default="2", help="processes")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "torches.json", metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="the page of the documentation")
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    options.pytest = given[split + 1 :]
    return options


def run(python: str, public: bool, jobs: str, more: Sequence[str]) -> Row:
    """Run the tests with one interpreter."""
    torch, version = versions_of(python)
    path = [os.getcwd(), *(["tests"] if public else [])]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            python,
            "-m",
            "pytest",
            "--wide",
            "-n",
            jobs,
            "--junitxml",
            str(report),
            *(["-p", "public_ways"] if public else []),
            *more,
        ]
        start = perf_counter()
        subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)})
        minutes = (perf_counter() - start) / 60
        return row_of(ElementTree.parse(report), torch, version, PUBLIC if public else ALL, minutes)


def again(python: str, found: Mapping[Key, Row], options: argparse.Namespace) -> Row:
    """Run what failed with one interpreter, and return its row with these tests counted anew."""
    torch, version = versions_of(python)
    (old,) = [row for row in found.values() if (row.torch, row.python) == (torch, version) and row.failed]
    names = [f"{name.partition('::')[0].replace('.', '/')}.py::{name.partition('::')[2]}" for name in old.failed]
    new = run(python, old.tests == PUBLIC, "0", [*options.pytest, *names])
    skipped = Counter(old.skipped) + Counter(new.skipped)
    minutes = round(old.minutes + new.minutes, 1)
    return replace(
        old, passed=old.passed + new.passed, skipped=dict(skipped.most_common()), failed=new.failed, minutes=minutes
    )


def versions_of(python: str) -> list[str]:
    """Return the versions of torch and Python of an interpreter."""
    return subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True).stdout.split()


def row_of(report: ElementTree.ElementTree, torch: str, python: str, tests: str, minutes: float) -> Row:
    """Return the outcomes that are in a JUnit report."""
    passed, skipped, failed = 0, Counter[str](), []
    for case in report.iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            skipped[skip.get("message", "")] += 1
        else:
            passed += 1
    return Row(torch, python, tests, passed, dict(skipped.most_common()), tuple(sorted(failed)), round(minutes, 1))


def read(path: Path) -> list[Row]:
    """Return the rows in a file of results, if there is one."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**{**row, "failed": tuple(row["failed"])}) for row in rows]


def page_of(rows: Sequence[Row]) -> str:
    """Return the page of the documentation."""
    lines = [
        "# Tested with",
        "",
        "All tests but slow ones, on each torch, on the CPU ([on a GPU](gpu.md)). The last rows are the engine's",
        "tests with public names of torch only (`make test-public`): the same bits, slower. `make torches` writes this page.",
        "",
        "| torch | Python | tests | passed | skipped | failed |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (row.tests != ALL, row.key)):
        counts = f"{row.passed:,} | {sum(row.skipped.values()):,} | {len(row.failed):,}"
        lines.append(f"| {row.torch} | {row.python} | {row.tests} | {counts} |")
    return "\n".join([*lines, "", *_reasons(rows), *_failures(rows)])


def _reasons(rows: Iterable[Row]) -> list[str]:
    lines = ["## Skipped, and why", "", "| torch | tests | number | reason |", "|---|---|---:|---|"]
    for row in rows:
        lines += [f"| {row.torch} | {row.tests} | {count} | {_cell(why)} |" for why, count in row.skipped.items()]
    return [*lines, ""]


def _failures(rows: Iterable[Row]) -> list[str]:
    failed = [f"- torch {row.torch}, {row.tests}: `{name}`" for row in rows for name in row.failed]
    return ["## Failed", "", *failed, ""] if failed else []


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
