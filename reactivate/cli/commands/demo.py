"""`reactivate demo`: a byte-level GPT that learns the source of Python's standard library, trained plain and planned.

The plan is for half the memory. What it shows: the step stays within the budget, and every loss, parameter and random
number is the same, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from torch import Tensor, nn

import reactivate
from reactivate._byte_gpt import GPT, Size, batch_of, loss_of, standard_library
from reactivate._region.accounts import in_words
from reactivate._text.table import Column, Row, Table
from reactivate.cli.options import REPORTING
from reactivate.planner.plan import Plan

BUDGET = "50%"
STEPS = 6
SIZE = Size(layers=6, dim=128, heads=4, context=128, batch=8)


@dataclass(frozen=True)
class TrainingRun:
    """A training run: its losses, the seconds of its steps, and all that it leaves behind, by name."""

    losses: list[float]
    seconds: list[float]
    left: dict[str, Tensor]


def train(source: Tensor, prepare: Callable[[nn.Module, Tensor], object]) -> TrainingRun:
    """Train a model from one seed.

    Args:
        source: what it learns.
        prepare: called with the model and a batch before the first step.
    """
    torch.manual_seed(0)
    model = GPT(SIZE)
    prepare(model, batch_of(source, SIZE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for _ in range(STEPS):
        tokens = batch_of(source, SIZE)
        began = perf_counter()
        optimizer.zero_grad()
        loss = loss_of(tokens, model(tokens[:, :-1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        seconds.append(perf_counter() - began)
    left = {f"the loss of step {number}": loss for number, loss in enumerate(losses, start=1)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        left |= {f"the last gradient of {name}": parameter.grad, f"the parameter {name}": parameter.detach()}
    left["the state of torch's random numbers"] = torch.get_rng_state()
    return TrainingRun([loss.item() for loss in losses], seconds, left)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="demo",
    show_default=True,
    help="The folder of its files.",
)
@REPORTING
def demo(out: Path, as_json: bool) -> int:
    """Train a small GPT plain and planned, and show that the two are the same; it takes less than a minute.

    Exits with 1 if they are not.
    """
    with torch.random.fork_rng():
        source = standard_library()
        plans: list[Plan] = []

        def planned(model: nn.Module, tokens: Tensor) -> None:
            plans.append(reactivate.plan(model, tokens[:, :-1], budget=BUDGET, loss=partial(loss_of, tokens)))
            reactivate.apply(model, plans[0])

        runs = {"plain": train(source, lambda model, tokens: None), "planned": train(source, planned)}
    results = _results(plans[0], **runs)
    out.mkdir(parents=True, exist_ok=True)
    plans[0].save(out / "plan.json")
    text = json.dumps(results, indent=1)
    (out / "results.json").write_text(text + "\n", encoding="utf-8")
    click.echo(text if as_json else f"{plans[0]}\n\n{_table(results)}")
    click.echo(f"wrote {out / 'plan.json'}, {out / 'results.json'}", err=True)
    return 0 if results["identical"] else 1


def _results(plan: Plan, plain: TrainingRun, planned: TrainingRun) -> dict[str, Any]:
    difference = next((name for name, one in plain.left.items() if not torch.equal(one, planned.left[name])), None)
    return {
        "identical": difference is None,
        "first_difference": difference,
        "budget_bytes": plan.budget_bytes,
        "plain": _figures(plain, plan.plain.peak_bytes),
        "planned": _figures(planned, plan.predicted.peak_bytes),
    }


def _figures(run: TrainingRun, peak_bytes: int) -> dict[str, Any]:
    return {"peak_bytes": peak_bytes, "median_step_seconds": sorted(run.seconds)[STEPS // 2], "losses": run.losses}


def _table(results: dict[str, Any]) -> str:
    plain, planned = results["plain"], results["planned"]
    both = enumerate(zip(plain["losses"], planned["losses"]), start=1)
    rows = [
        *(Row([f"loss of step {number}", *(f"{loss:.6f}" for loss in losses)]) for number, losses in both),
        Row(["peak of a step", *(in_words(one["peak_bytes"]) for one in (plain, planned))], is_total=True),
        Row(["median step, ms", *(f"{1000 * one['median_step_seconds']:.1f}" for one in (plain, planned))]),
    ]
    same = "Every loss, gradient, parameter and random number is the same, bit for bit."
    said = same if results["identical"] else f"The two runs differ, first in {results['first_difference']}."
    title = f"A GPT of {SIZE.layers} layers in {in_words(results['budget_bytes'])} ({BUDGET} of its activations)."
    columns = (Column(""), Column("plain", True), Column("planned", True))
    return f"{Table(columns, rows, title).text()}\n{said}"
