"""Time plans of large models, and the solver on long chains: the seconds of the processor, on one core.

python benchmarks/planning.py                       on the terminal, in a few minutes
python benchmarks/planning.py --out DIRECTORY       JSON and Markdown as well, named for device and torch version
python benchmarks/planning.py --only llama-8b,solve --layers 4 --blocks 50 --json    a trial, as JSON on the terminal

Models are on the meta device, in bfloat16, and planned for an H100 with 60 % of the plain step's activation peak: nothing is
measured, everything is simulated. Small models run here, for 70 %: their seconds are also given in plain steps, of which
planning may take 60. A chain has blocks with a menu of ten, of one kind or of three kinds in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import torch
from _planning_models import SHAPES, Decoder, PackedLSTM, Shape
from _presentation import Table, describe_machine, write
from _subjects import mixture
from _training import Size
from torch import Tensor

import reactivate
from reactivate.planner.solve import Chain, Option, Problem

TARGETS = {"llama-8b": 10.0, "llama-70b": 30.0, "deepseek-v3": 30.0, "solve": 2.0, "solve, three kinds": 2.0}
"""The seconds that each may take."""
SMALL = ("mixtral", "packed lstm")
PLAIN_STEPS = 60
"""The plain steps whose seconds a plan of a small model may take."""
BEST_OF = 5  # plain steps
POINTS = 24  # of a frontier
LENGTH = 4096
LSTM_LENGTH = 80
NAMES = (*SHAPES, *SMALL, "solve", "frontier")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="some of them, with commas between: " + ", ".join(NAMES))
    parser.add_argument("--layers", type=int, help="blocks of each model, in place of its own number")
    parser.add_argument("--blocks", type=int, default=1000, help="blocks of a chain (default: 1000)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = (options.only or ",".join(NAMES)).split(",")
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found |= measured(name, options.layers, options.blocks)
    facts = {"machine": describe_machine(torch.device("cpu")), "load": os.getloadavg()[1] / (os.cpu_count() or 1)}
    parts = {
        "planning": (to_table, {name: row for name, row in found.items() if name not in SMALL}),
        "planning-small": (steps_table, {name: row for name, row in found.items() if name in SMALL}),
    }
    for part, (table, rows) in parts.items():
        if not rows:
            continue
        text = json.dumps({**facts, "found": rows}, indent=1)
        print(text if options.json else table(rows).with_title())
        if options.out:
            name = f"{part}-cpu-torch{torch.__version__.partition('+')[0]}"
            write(options.out, name, json=text + "\n", md=table(rows).to_markdown() + "\n")


def measured(name: str, layers: int | None, blocks: int) -> dict[str, dict[str, Any]]:
    """Return rows by their names: what was timed, its size, and its seconds."""
    if name in SHAPES:
        shape = SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers)
        return {name: plan_of(shape)}
    if name in SMALL:
        return {name: plan_of_small(name, layers or 4)}
    if name == "solve":
        chains = {"solve": chain_of(blocks, 1), "solve, three kinds": chain_of(blocks, 3)}
        return {
            label: {"blocks": blocks, **timed(lambda chain=chain: middle_of(chain))} for label, chain in chains.items()
        }
    chain = chain_of(blocks, 1)
    return {f"frontier({POINTS})": {"blocks": blocks, **timed(lambda: Problem(chain).frontier(POINTS))}}


def plan_of(shape: Shape) -> dict[str, Any]:
    """Plan a model."""
    with torch.device("meta"):
        model = Decoder(shape).to(torch.bfloat16)
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    plans: list[reactivate.Plan] = []
    seconds = timed(lambda: plans.append(reactivate.plan(model, tokens, budget="60%", device="H100-SXM")))
    return {"blocks": shape.layers, **seconds, "plan": repr(plans[0])}


def plan_of_small(name: str, layers: int) -> dict[str, Any]:
    """Plan a model whose steps run: each step's sizes depend on its data, or it has many small ops."""
    torch.manual_seed(0)
    if name == "mixtral":
        subject = mixture(Size(layers=layers, dim=128, batch=4, length=64))
        model, args, kwargs, loss = subject.model, subject.args, subject.kwargs, subject.loss
    else:
        lengths = torch.randint(LSTM_LENGTH // 2, LSTM_LENGTH + 1, (32,))
        model, args, kwargs = PackedLSTM(layers, 64), (torch.randn(32, LSTM_LENGTH, 64), lengths), {}
        loss = Tensor.sum
    step = min(timed(lambda: loss(model(*args, **kwargs)).backward())["seconds"] for _ in range(BEST_OF))
    model.zero_grad()
    plan, plans = reactivate.plan, []  # whose import is not timed
    seconds = timed(lambda: plans.append(plan(model, args, kwargs, budget="70%", loss=loss)))
    return {"blocks": layers, **seconds, "plain step": step, "plan": repr(plans[0])}


def middle_of(chain: Chain) -> None:
    """Solve a chain for a budget halfway between the least and the most."""
    fastest = chain.solution_of([menu[0] for menu in chain.menus])
    problem = Problem(chain)
    problem.solve((problem.least_bytes + fastest.peak_bytes) // 2)


def chain_of(blocks: int, kinds: int) -> Chain:
    """Return a chain of blocks, of as many kinds in turns."""
    rng = random.Random(0)
    menus = []
    for _ in range(kinds):
        size = rng.randrange(900, 1100) << 20
        menu = [Option("keep", 0.0, size, size + (300 << 20))]
        for number in range(9):
            share = rng.random()
            seconds = rng.random() * 5e-3 * (1.2 - share)
            need = size + rng.randrange(1 << 28)
            menu.append(Option(str(number), seconds, int(size * share) + rng.randrange(1 << 20), need))
        menus.append(tuple(menu))
    return Chain(tuple(menus[index % kinds] for index in range(blocks)), (*[0] * blocks, 1 << 30))


def timed(run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of the processor that a call takes."""
    began = process_time()
    run()
    return {"seconds": process_time() - began}


def to_table(found: dict[str, dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    rows = [
        (name, str(row["blocks"]), f"{row['seconds']:.1f}", f"{TARGETS[name]:.0f}" if name in TARGETS else "")
        for name, row in found.items()
    ]
    return Table("Seconds of one core", ("", "blocks", "seconds", "target"), rows)


def steps_table(found: dict[str, dict[str, Any]]) -> Table:
    """Return the rows of small models as a table."""
    rows = [
        (
            name,
            str(row["blocks"]),
            f"{row['plain step'] * 1e3:.0f} ms",
            f"{row['seconds']:.1f}",
            f"{row['seconds'] / row['plain step']:.0f}",
            str(PLAIN_STEPS),
        )
        for name, row in found.items()
    ]
    names = ("", "blocks", "plain step", "seconds", "in plain steps", "target")
    return Table("Seconds of one core, and how many plain steps these are", names, rows)


if __name__ == "__main__":
    main()
