"""Measure what the self-check costs a training run: the steps that it compares, beside those that it does not.

python benchmarks/self_check.py                    on the terminal, in about five minutes
python benchmarks/self_check.py --out DIRECTORY    JSON and Markdown as well, named for device and torch version
python benchmarks/self_check.py --runs 1 --steps 8 --layers 2    a trial

The demo's model is trained with every block checkpointed. Its regions are compared with their forwards in step 1, 2, 4, 8,
... What such a step takes beyond the median of the others is what the check costs, and in 100 steps there are seven.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time

import torch
from _presentation import write
from torch import Tensor

import reactivate

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from byte_gpt import GPT, Settings, loss_of, standard_library

TARGET = 0.01
"""The part of 100 steps that the check may take."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="training runs (default: 5)")
    parser.add_argument("--steps", type=int, default=34, help="steps of each (default: 34)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (default: 4)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings, source = Settings(layers=options.layers), standard_library()
    costs = []
    for number in range(1, options.runs + 1):
        costs.append(cost_of_check(step_seconds(settings, source, options.steps)))
        print(f"run {number} of {options.runs}: {costs[-1]:.2%} of 100 steps", file=sys.stderr)
    results = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "settings": {"layers": settings.layers, "dim": settings.dim, "batch": settings.batch, "steps": options.steps},
        "part of 100 steps, by run": costs,
        "median": statistics.median(costs),
        "target": TARGET,
    }
    print(to_markdown(results))
    if options.out:
        name = f"self-check-cpu-torch{torch.__version__.partition('+')[0]}"
        write(options.out, name, json=json.dumps(results, indent=1) + "\n", md=to_markdown(results) + "\n")


def step_seconds(settings: Settings, source: Tensor, steps: int) -> list[float]:
    """Train a new model with every block checkpointed: the seconds of each step, of the processor."""
    torch.manual_seed(settings.seed)
    model = GPT(settings)
    reactivate.apply(model, reactivate.policies.full())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(steps):
        starts = torch.randint(len(source) - settings.context, (settings.batch,)).tolist()
        tokens = torch.stack([source[start : start + settings.context + 1] for start in starts]).long()
        begin = process_time()
        loss_of(tokens, model(tokens[:, :-1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(process_time() - begin)
    return seconds


def cost_of_check(seconds: Sequence[float]) -> float:
    """The part of 100 steps that their seven comparisons take. The first two steps warm up: they stand for no other."""
    numbered = list(enumerate(seconds, start=1))[2:]
    compared = statistics.median(time for number, time in numbered if not number & (number - 1))
    others = statistics.median(time for number, time in numbered if number & (number - 1))
    return 7 / 100 * (compared / others - 1)


def to_markdown(results: dict[str, object]) -> str:
    """One sentence with its interval."""
    costs: list[float] = results["part of 100 steps, by run"]  # type: ignore[assignment]
    return (
        f"The self-check takes {results['median']:.2%} of the time of 100 steps of the demo's model "
        f"({min(costs):.2%} to {max(costs):.2%} in {len(costs)} runs; target: {TARGET:.0%} at most)."
    )


if __name__ == "__main__":
    main()
