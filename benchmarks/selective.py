"""Measure what saved calls inside of checkpointed regions cost and bring, against torch's SAC and torch_remat.

python benchmarks/selective.py                      all parts on the terminal, in about ten minutes
python benchmarks/selective.py --quick              the same in seconds, on less
python benchmarks/selective.py --only experiment    one part
python benchmarks/selective.py --out DIRECTORY      JSON, Markdown and a plot as well, named for device and torch version

The parts: `block`, one small transformer block, where the cost of the machinery shows; `large`, the same block so large
that only what it computes should count; `experiment`, memory against speed of every mode on a whole model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler tells of releases that it saw no beginning of

import torch

try:
    from _measure import CLOCKS
    from _results import Track, describe_machine, silent
    from _selective_block import MAKERS, MEASURES, differences, kept_by
    from _selective_experiment import measure_experiment
    from _selective_page import to_markdown
    from _selective_plot import plot
    from _selective_results import EXPERIMENT, PARTS, QUICK, Results, Settings
    from _selective_terminal import show
    from _terminal import progress
except ImportError as error:
    sys.exit(f"This needs {error.name}: pip install '.[bench]' in a clone")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    settings = replace(QUICK if options.quick else Settings(), clock=options.clock)
    device, parts = torch.device(options.device), options.only or PARTS
    if options.json:
        results = measure(parts, settings, device)
        sys.stdout.write(results.to_json())
    else:
        with progress() as track:
            results = measure(parts, settings, device, track)
        show(results)
    if options.out:
        write(results, options.out)


def measure(parts: Sequence[str], settings: Settings, device: torch.device, track: Track = silent) -> Results:
    """Each of `parts`, one after the other."""
    torch.manual_seed(0)
    results = Results(describe_machine(device), settings)
    for part, make in MAKERS.items():
        if part in parts:
            results.kept.extend(kept_by(part, make(settings), device))
            results.differences[part] = differences(make(settings), device)
            results.rows.extend(MEASURES[part](settings, device, track))
    if EXPERIMENT in parts:
        results = replace(results, experiment=measure_experiment(settings, device, track))
    return results


def write(results: Results, directory: Path) -> None:
    """JSON and Markdown of what was measured, and the plot if the experiment was."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / results.name
    path.with_name(path.name + ".json").write_text(results.to_json(), encoding="utf-8")
    path.with_name(path.name + ".md").write_text(to_markdown(results), encoding="utf-8")
    if results.experiment is not None:
        plot(results, results.experiment, path.with_name(path.name + ".png"))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="smaller models and few rounds")
    parser.add_argument("--device", default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="time of the processor (default) or of the wall")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results of these parts")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
