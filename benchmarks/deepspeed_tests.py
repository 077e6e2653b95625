"""DeepSpeed's own tests of activation checkpointing, on DeepSpeed's functions and on `dropin.deepspeed`.

python benchmarks/deepspeed_tests.py CHECKOUT                   a table of both outcomes
python benchmarks/deepspeed_tests.py CHECKOUT --out DIRECTORY   JSON and Markdown as well

CHECKOUT is the source of DeepSpeed, since the tests are not in its packages; of it only `tests/unit` is read. The installed
DeepSpeed runs. Their launcher of processes is left out: each test runs in one process with a group of one rank. They skip
most tests where the accelerator is the CPU; these lines are taken out, so that the tests run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from _presentation import Table, describe_machine, write

FOLDER = Path("unit/runtime/activation_checkpointing")
FILES = ("test_activation_checkpointing.py", "test_activation_checkpointing_non_reentrant.py")
SKIP = re.compile(
    r' +if (?:device|get_accelerator\(\).device_name\(\)) == "cpu":\n +pytest.skip\("CPU accelerator does not [^\n]*\n'
)
COMMON = """
import os
import deepspeed.comm.comm
import deepspeed.runtime.activation_checkpointing.checkpointing


class DistributedTest:
    world_size = 1


class OneRank:
    name, using_mpi = "one", False

    def is_initialized(self):
        return True

    def get_rank(self, group=None):
        return 0

    def get_world_size(self, group=None):
        return 1


deepspeed.comm.comm.cdb = OneRank()
if os.environ["ENGINE"] == "reactivate":
    import reactivate

    reactivate.dropin.deepspeed.install()
"""
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (?:\S+/)?(\S+\.py::\S+)", re.MULTILINE)


def prepare(checkout: Path, directory: Path) -> None:
    """Put the tests into a directory, without their launcher."""
    (directory / FOLDER).mkdir(parents=True)
    (directory / "unit" / "__init__.py").touch()
    (directory / "unit" / "common.py").write_text(COMMON, encoding="utf-8")
    for name in FILES:
        source = (checkout / "tests" / FOLDER / name).read_text(encoding="utf-8")
        (directory / FOLDER / name).write_text(SKIP.sub("", source), encoding="utf-8")


def run(directory: Path, engine: str) -> dict[str, str]:
    """Return the outcome of each test."""
    environment = {**os.environ, "ENGINE": engine, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    paths = [str(directory), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    files = [str(FOLDER / name) for name in FILES]
    output = subprocess.run(
        [*command, "-rA", "--tb=no", *files],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    found = {name: outcome.lower() for outcome, name in OUTCOME.findall(output)}
    if not found:
        sys.exit(f"No test ran on {engine}:\n{output}")
    return found


def to_markdown(rows: list[tuple[str, str, str]], version: str) -> str:
    """Return the table: test functions, with the outcomes of all their parameters."""
    sums: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for name, theirs, ours in rows:
        one, other = sums.setdefault(name.partition("[")[0], (Counter(), Counter()))
        one[theirs] += 1
        other[ours] += 1
    cells = [
        (f"`{name}`", *(", ".join(f"{count} {what}" for what, count in side.items()) for side in pair))
        for name, pair in sums.items()
    ]
    return Table(f"DeepSpeed {version}, its tests on a CPU", ("test", "DeepSpeed", "drop-in"), cells).with_title()


def main() -> None:
    """Run both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the source of DeepSpeed")
    parser.add_argument("--out", type=Path, help="a directory for JSON and Markdown")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prepare(given.checkout, Path(directory))
        theirs, ours = (run(Path(directory), engine) for engine in ("deepspeed", "reactivate"))
    rows = [(name, theirs.get(name, "not run"), ours.get(name, "not run")) for name in sorted({*theirs, *ours})]
    version = importlib.metadata.version("deepspeed")
    text = to_markdown(rows, version)
    print(text)
    if given.out is not None:
        record = {"machine": describe_machine(torch.device("cpu")), "deepspeed": version, "rows": rows}
        write(given.out, f"deepspeed-tests-{version}", json=json.dumps(record, indent=1) + "\n", md=text + "\n")


if __name__ == "__main__":
    main()
