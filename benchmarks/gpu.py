"""Run what waits for a GPU, in the order of what matters, in nine minutes: tests, random programs, figures.

python benchmarks/gpu.py                 go on where the last run on this device stopped
python benchmarks/gpu.py --again         from the beginning
python benchmarks/gpu.py --minutes 30    with more time

Tests and random programs run side by side, figures after them and one by one. Each part writes its outcome to
benchmarks/results/gpu-DEVICE-torchVERSION.json as soon as it ends, and a figure its own result files, so that a run can
be stopped at any time. Of what failed the end of the output is printed. `make gpu` is this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
SHOWN = 3000
"""Of the output of a part that failed, so many last letters are printed."""


@dataclass(frozen=True)
class Part:
    """A command.

    Attributes:
        name: of the part.
        seconds: that it may take, at most; a figure that does not fit is not begun.
        command: for this Python, in the root of the checkout; OUT stands for the folder of results.
    """

    name: str
    seconds: int
    command: Sequence[str]

    @property
    def is_figure(self) -> bool:
        return self.name.startswith("figures")


def _tests(name: str, seconds: int, *words: str) -> Part:
    return Part(name, seconds, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--wide", *words])


def _figures(script: str, seconds: int, *options: str) -> Part:
    command = [f"benchmarks/{script}.py", *options, "--device", "cuda", "--clock", "wall", "--out", "OUT"]
    return Part(f"figures of {script}", seconds, command)


GPU = ("-m", "gpu")
PARTS = (
    _tests("storages", 150, *GPU, "tests/gpu/test_gpu_offload.py"),
    _tests("loss by rows", 60, *GPU, "tests/loss/test_loss_by_rows.py"),
    _tests(
        "budgets, generators, streams, kernels",
        240,
        *GPU,
        "tests/gpu/test_gpu.py",
        "tests/region/test_limits_of_torch.py",
    ),
    _tests("trainings", 150, *GPU, "tests/gpu/test_gpu_training.py"),
    _tests(
        "torch's tables", 200, "--device=cuda", "-n8", "tests/region/test_ops.py", "tests/region/test_module_table.py"
    ),
    Part("random programs", 90, ["-m", "fuzz", "--device", "cuda", "--seconds", "60", "--workers", "4"]),
    _figures("frontier", 240, "--models", "gpt", "--seconds", "120"),
    _figures("selective", 150, "--quick"),
    _figures("promises", 150),
    _figures("overhead", 300, "--quick"),
    _figures("offload", 150),
)


@dataclass
class Outcome:
    """The end of a part: "passed", "failed", or "stopped" when its time was up; what it printed, and the last line."""

    part: str
    ended: str
    seconds: float
    says: str
    text: str = field(repr=False)

    def __str__(self) -> str:
        said = f"{self.part}: {self.ended} in {self.seconds:.0f} s. {self.says}"
        return said if self.ended == "passed" else f"{self.text[-SHOWN:]}\n{said}"


def run(part: Part, seconds: float) -> Outcome:
    """Run a part for so many seconds at most."""
    command = [sys.executable, *(str(RESULTS) if word == "OUT" else word for word in part.command)]
    root = Path(__file__).parent.parent
    paths = os.pathsep.join(filter(None, (str(root), str(root / "tests"), os.environ.get("PYTHONPATH"))))
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths},
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        ended, said = "passed" if done.returncode == 0 else "failed", done.stdout
    except subprocess.TimeoutExpired as stopped:
        ended, said = "stopped", (stopped.stdout or b"").decode(errors="replace")
    lines = said.strip().splitlines() or [""]
    return Outcome(part.name, ended, round(time.monotonic() - began, 1), lines[-1][:200], said)


def outcomes_of(parts: Sequence[Part], end: float) -> Iterator[Outcome]:
    """Run parts until `end`: those that are no figures side by side, then the figures, of which one may not fit any more."""
    side_by_side = [part for part in parts if not part.is_figure]
    for part in side_by_side:
        print(f"{part.name}: ...", flush=True)
    with ThreadPoolExecutor(max(len(side_by_side), 1)) as pool:
        begun = [pool.submit(run, part, min(end - time.monotonic(), part.seconds)) for part in side_by_side]
        yield from (future.result() for future in as_completed(begun))
    for part in parts:
        left = end - time.monotonic()
        if part.is_figure and left < part.seconds:
            print(f"{part.name}: not begun, {max(left, 0):.0f} s are left. Run this again to go on.")
        elif part.is_figure:
            print(f"{part.name}: ...", flush=True)
            yield run(part, part.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that have not passed yet, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="also the parts that have passed on this device")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default: 9)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("There is no CUDA device here. `make test` runs the tests that need none.", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name().replace(" ", "-")
    file = RESULTS / f"gpu-{device}-torch{torch.__version__.partition('+')[0]}.json"
    ended = {} if options.again or not file.exists() else {item["part"]: item for item in json.loads(file.read_text())}
    passed = [name for name, item in ended.items() if item["ended"] == "passed"]
    for name in passed:
        print(f"{name}: passed before")
    end = time.monotonic() + 60 * options.minutes
    for outcome in outcomes_of([part for part in PARTS if part.name not in passed], end):
        print(outcome, flush=True)
        ended[outcome.part] = {key: value for key, value in asdict(outcome).items() if key != "text"}
        file.write_text(json.dumps([*ended.values()], indent=1) + "\n")
    return int(any(ended.get(part.name, {}).get("ended") != "passed" for part in PARTS))


if __name__ == "__main__":
    sys.exit(main())
