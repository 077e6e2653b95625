"""A byte-level GPT that learns the source of Python's standard library, trained plain and with a plan for half the memory.

What it shows: the step stays within the budget, and every loss, parameter and random number is the same, bit for bit.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import click
import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import Tensor, nn

import reactivate
from reactivate._engine.accounts import in_words
from reactivate._table import Column, Row, Table
from reactivate.errors import UsageError
from reactivate.planner.plan import Plan

BUDGET = "50%"
STEPS, BATCH, CONTEXT = 6, 8, 128
LAYERS, DIM, HEADS, DROPOUT = 6, 128, 4, 0.1
_ENOUGH = 2**20  # bytes of source


class Block(nn.Module):
    """Attention and MLP, each with its norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, DIM) to the same."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attention = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + cast(Tensor, self.mlp(x))


class GPT(nn.Module):
    """Bytes in, the loss of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time + 1) to a scalar."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library() -> Tensor:
    """The beginning of the source of Python's standard library, as bytes.

    Raises:
        UsageError: this Python has none.
    """
    source = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source += path.read_bytes()
        if len(source) > _ENOUGH:
            break
    if len(source) <= CONTEXT:
        raise UsageError("demo: this Python has no source of its standard library, which the model is to learn.")
    return torch.frombuffer(source, dtype=torch.uint8)


@dataclass(frozen=True)
class Run:
    """A training run: its losses, the seconds of its steps, and all that it leaves behind, by name."""

    losses: list[float]
    seconds: list[float]
    left: dict[str, Tensor]


def train(source: Tensor, prepare: Callable[[nn.Module, Tensor], object]) -> Run:
    """Train a model from one seed.

    Args:
        source: what it learns.
        prepare: called with the model and a batch before the first step.
    """
    torch.manual_seed(0)
    model = GPT()
    prepare(model, _batch(source))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for _ in range(STEPS):
        tokens = _batch(source)
        began = perf_counter()
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        seconds.append(perf_counter() - began)
    left = {f"the loss of step {number}": loss for number, loss in enumerate(losses, start=1)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        left |= {f"the last gradient of {name}": parameter.grad, f"the parameter {name}": parameter.detach()}
    left["the state of torch's random numbers"] = torch.get_rng_state()
    return Run([loss.item() for loss in losses], seconds, left)


def _batch(source: Tensor) -> Tensor:
    starts = torch.randint(len(source) - CONTEXT, (BATCH,)).tolist()
    return torch.stack([source[start : start + CONTEXT + 1] for start in starts]).long()


def run(out: Path, as_json: bool) -> int:
    """Plan, train both, show.

    Args:
        out: the folder of plan.json and results.json.
        as_json: print the results as JSON, in place of a table.

    Returns:
        0; 1 if the two runs differ.
    """
    with torch.random.fork_rng():
        source = standard_library()
        plans: list[Plan] = []

        def planned(model: nn.Module, tokens: Tensor) -> None:
            plans.append(reactivate.plan(model, tokens, budget=BUDGET))
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


def _results(plan: Plan, plain: Run, planned: Run) -> dict[str, Any]:
    difference = next((name for name, one in plain.left.items() if not torch.equal(one, planned.left[name])), None)
    return {
        "identical": difference is None,
        "first_difference": difference,
        "budget_bytes": plan.budget_bytes,
        "plain": _figures(plain, plan.plain.peak_bytes),
        "planned": _figures(planned, plan.predicted.peak_bytes),
    }


def _figures(run: Run, peak_bytes: int) -> dict[str, Any]:
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
    title = f"A GPT of {LAYERS} layers in {in_words(results['budget_bytes'])} ({BUDGET} of its activations)."
    columns = (Column(""), Column("plain", True), Column("planned", True))
    return f"{Table(columns, rows, title).text()}\n{said}"
