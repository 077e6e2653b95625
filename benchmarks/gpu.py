"""Run what waits for a GPU, in the order of what matters, in nine minutes: tests, random programs, figures.

python benchmarks/gpu.py                 go on where the last run on this device stopped
python benchmarks/gpu.py --again         from the beginning
python benchmarks/gpu.py --minutes 30    with more time

Each part writes its outcome to benchmarks/results/gpu-DEVICE-torchVERSION.json as soon as it ends, and a figure its own
result files, so that a run can be stopped at any time. `make gpu` is this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


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


def _tests(name: str, seconds: int, *files: str) -> Part:
    return Part(name, seconds, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--wide", "-m", "gpu", *files])


def _figures(script: str, seconds: int, *options: str) -> Part:
    command = [f"benchmarks/{script}.py", *options, "--device", "cuda", "--clock", "wall", "--out", "OUT"]
    return Part(f"figures of {script}", seconds, command)


PARTS = (
    _tests("storages", 150, "tests/gpu/test_gpu_offload.py"),
    _tests("loss by rows", 60, "tests/loss/test_loss_by_rows.py"),
    _tests("budgets, generators, streams, kernels", 240, "tests/gpu/test_gpu.py", "tests/region/test_limits.py"),
    _tests("trainings", 150, "tests/gpu/test_gpu_training.py"),
    Part("random programs", 90, ["-m", "fuzz", "--device", "cuda", "--seconds", "60", "--workers", "4"]),
    _figures("overhead", 120, "--quick"),
    _figures("offload", 240),
    _figures("selective", 240, "--quick"),
    _figures("frontier", 240, "--models", "gpt", "--seconds", "120"),
)


@dataclass
class Outcome:
    """The end of a part: "passed", "failed", or "stopped" when its time was up; and the last line that it printed."""

    part: str
    ended: str
    seconds: float
    says: str


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
    return Outcome(part.name, ended, round(time.monotonic() - began, 1), lines[-1][:200])


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
    outcomes = (
        {} if options.again or not file.exists() else {item["part"]: item for item in json.loads(file.read_text())}
    )
    end = time.monotonic() + 60 * options.minutes
    for part in PARTS:
        left = end - time.monotonic()
        if outcomes.get(part.name, {}).get("ended") == "passed":
            print(f"{part.name}: passed before")
        elif left < 5 or (part.name.startswith("figures") and left < part.seconds):
            print(f"{part.name}: not begun, {max(left, 0):.0f} s are left. Run this again to go on.")
        else:
            print(f"{part.name}: ...", flush=True)
            outcome = run(part, min(left, part.seconds))
            print(f"{part.name}: {outcome.ended} in {outcome.seconds:.0f} s. {outcome.says}")
            outcomes[part.name] = asdict(outcome)
            file.write_text(json.dumps([*outcomes.values()], indent=1) + "\n")
    return int(any(outcomes.get(part.name, {}).get("ended") != "passed" for part in PARTS))


if __name__ == "__main__":
    sys.exit(main())
