"""Targets that tests give to the command `reactivate`, and what runs it and reads its answers."""

from __future__ import annotations

import json
import sys
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("click", reason="the extra `cli`")

from click.testing import CliRunner, Result

from reactivate.cli import command

# -- targets ----------------------------------------------------------------------------------------------------------


def blocks(layers: int = 3, batch: int = 64, dim: int = 16) -> tuple[nn.Module, Tensor]:
    made = (nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers))
    return nn.Sequential(*made), torch.randn(batch, dim)


def sharded(mesh: Any, layers: int = 3) -> tuple[nn.Module, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model, x = blocks(layers)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), x


def sharded_by_name(mesh: Any) -> tuple[nn.Module, Tensor]:
    return sharded(mesh["dp"])


def sharded_alone() -> tuple[nn.Module, Tensor]:
    return sharded(None)


class Classifier(nn.Sequential):
    """Most of its step is its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x), torch.zeros(len(x), dtype=torch.long))


def classifier() -> tuple[nn.Module, Tensor]:
    return Classifier(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)), nn.Linear(8, 2000)), torch.randn(
        64, 8
    )


def with_keywords() -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    return nn.Linear(4, 4), (), {"input": torch.randn(2, 4)}


def with_a_dict() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Linear(4, 4), {"input": torch.randn(2, 4)}


def with_a_list() -> tuple[nn.Module, list[Tensor]]:
    return nn.Linear(4, 4), [torch.randn(2, 4)]


def model_alone() -> nn.Module:
    return nn.Linear(4, 4)


def a_number() -> int:
    return 7


CALLS: SimpleQueue[None] = SimpleQueue()  # which nothing rewinds


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.put(None)
        return super().forward(x) * float(CALLS.qsize())


def never_the_same() -> tuple[nn.Module, Tensor]:
    return Counting(4, 4), torch.randn(2, 4)


def function() -> tuple[Any, Tensor]:
    return torch.sin, torch.randn(4, requires_grad=True)


def failing() -> None:
    raise ValueError("no\n  luck")


def leaving() -> None:
    sys.exit(0)


def interrupted() -> None:
    raise KeyboardInterrupt


ready = nn.Linear(4, 4)
NUMBER = 7

# -- running ----------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def answer(*arguments: object, code: int = 0) -> Any:
    """The one JSON document on stdout."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def line(*arguments: object, code: int) -> str:
    """The one line of an error; the same is in the JSON document."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (only,) = result.stderr.splitlines()
    assert only.startswith("error: ")
    return only


def sets(fields: dict[str, Any]) -> list[str]:
    return [text for name, value in fields.items() for text in ("--set", f"{name}={value}")]
