"""The ranks of a job that is planned here: this process is the first of them, and the others are not there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
import torch

from reactivate._torch.ops import alone_among
from reactivate.errors import UsageError


def mesh_sizes(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[str, int] | None:
    """Return the dimensions that NAME=SIZE,NAME=SIZE names, in their order."""
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or name in sizes or not size.isdecimal() or int(size) < 1:
            raise click.BadParameter(
                f"{text!r} is not NAME=SIZE,NAME=SIZE with names of its own, as in dp=8,tp=8.", ctx, param
            )
        sizes[name] = int(size)
    return sizes


@contextmanager
def among(world: int | None, sizes: Mapping[str, int] | None) -> Iterator[Any]:
    """Inside, this process is the first of a job's ranks. Yields their device mesh; None if none is asked for.

    Args:
        world: how many ranks there are; None: as many as the mesh has, or this one alone.
        sizes: the dimensions of the mesh, by name.

    Raises:
        UsageError: the mesh has not as many ranks.
    """
    count = world or math.prod((sizes or {}).values())
    if world is None and sizes is None:
        yield None
        return
    if sizes is not None and math.prod(sizes.values()) != count:
        product = " x ".join(map(str, sizes.values()))
        found = f"{product} = {math.prod(sizes.values())}" if len(sizes) > 1 else product
        raise UsageError(
            f"--world {count}: the mesh has {found} ranks. Make its sizes multiply to {count}, or leave --world out."
        )
    with alone_among(count):
        mesh_of = torch.distributed.device_mesh.init_device_mesh
        yield None if sizes is None else mesh_of("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
