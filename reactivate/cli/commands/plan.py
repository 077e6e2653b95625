"""`reactivate plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
import torch
from torch.nn import Module
from torch.optim import Optimizer

import reactivate
from reactivate.cli.options import REPORTING, TARGET
from reactivate.cli.outcome import Code, answer
from reactivate.cli.output import OUT, files_of, write
from reactivate.cli.ranks import among, mesh_sizes
from reactivate.cli.target import Request, subject_of
from reactivate.cli.where import where_of
from reactivate.errors import UsageError
from reactivate.integrations.recipe._text import parse_storage
from reactivate.planner.head import HEADS, Head

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


@click.command()
@TARGET
@click.option(
    "--budget",
    help='The most that may be allocated, all included: "8GiB", bytes, or "50%" of the plain step\'s '
    "activations. By default what is free on the accelerator, less 5 %.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Of torch (cuda), or by name (H100-SXM, see `reactivate devices`), or a "
    ".json file that describes one. A device that is not here is simulated.",
)
@click.option("--meta", "on_meta", is_flag=True, help="Build the model on the meta device and simulate the step.")
@click.option(
    "--world", type=click.IntRange(1), help="Ranks of the job; this process is the first, the others are not needed."
)
@click.option(
    "--mesh",
    metavar="NAME=SIZE,...",
    callback=mesh_sizes,
    help="The device mesh of these ranks, dp=8,tp=8: given to the factory, which shards the model over it.",
)
@click.option(
    "--optimizer", type=click.Choice([*OPTIMIZERS], case_sensitive=False), help="Optimizer whose memory counts."
)
@click.option("--maximize", metavar="batch|NAME=DIM", help="Look for the largest batch that fits, or other dimension.")
@click.option(
    "--storage",
    "storages",
    metavar="STORAGE",
    multiple=True,
    help='A storage that the plan may use: "host", or as in Python, "Host(limit=\'32GiB\')", "Disk(\'/scratch\')". May be '
    "repeated: the plan uses the one with which it is fastest.",
)
@click.option(
    "--head",
    type=click.Choice(HEADS),
    help="Whether the loss may be computed by rows, or is kept as it is. By default it may on a CPU.",
)
@OUT
@REPORTING
def plan(
    target: str,
    budget: str | None,
    device: str | None,
    on_meta: bool,
    world: int | None,
    mesh: dict[str, int] | None,
    optimizer: str | None,
    maximize: str | None,
    storages: Sequence[str],
    head: Head | None,
    outs: Sequence[str],
    as_json: bool,
    settings: dict[str, Any],
    **sizes: Any,
) -> int:
    """Plan the fastest training step of TARGET that fits a budget.

    Exits with 1 if none does; --json then prints {"feasible": false, "least_bytes": ...}.
    """
    files = files_of(outs)
    where = where_of(device, on_meta)
    with among(world, mesh) as ranks:
        places = {"device": where.device, "on_meta": where.on_meta, "factory_on_meta": on_meta, "mesh": ranks}
        subject = subject_of(Request(target, settings, **sizes, **places))
        found = reactivate.plan(
            subject.model,
            subject.args,
            subject.kwargs,
            budget=_bytes_or_text(budget),
            optimizer=_optimizer_of(optimizer, subject.model),
            device=where.spec,
            maximize=_dimension(maximize),
            storage=[parse_storage(text, "--storage") for text in storages],
            head=head,
        )
    answer(as_json, {"feasible": True, **found.to_json()}, found)
    write(found, files)
    return Code.YES


def _bytes_or_text(budget: str | None) -> int | str | None:
    return int(budget) if budget is not None and budget.strip().isdecimal() else budget


def _optimizer_of(name: str | None, model: Any) -> Optimizer | None:
    if name is None or not isinstance(model, Module):
        return None
    return OPTIMIZERS[name](model.parameters())


def _dimension(maximize: str | None) -> str | dict[str, int] | None:
    if maximize is None or "=" not in maximize:
        return maximize
    name, _, dimension = maximize.partition("=")
    if not dimension.isdecimal():
        raise UsageError(
            f"--maximize {maximize}: it takes `batch`, or NAME=DIM with the number of a dimension: length=1."
        )
    return {name: int(dimension)}
