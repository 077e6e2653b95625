"""`reactivate plan --storage`: storages as texts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from several import each
from torch import Tensor, nn

from reactivate.errors import UsageError
from reactivate.integrations.recipe._text import parse_storage
from reactivate.storage import Disk, Host


class Blocks(nn.Module):
    """Eight blocks of which no two can be one region: in a `Sequential` they would need no storage."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(8))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made() -> tuple[nn.Module, Tensor]:
    return Blocks(), torch.randn(512, 16)


@each(
    ("text", "storage"),
    [
        ("host", Host()),
        (" Host ", Host()),
        ("Host(limit=1000, last=0)", Host(limit=1000, last=0)),
        ("Disk('there', limit='5 kB')", Disk("there", limit=5000)),
    ],
)
def test_a_storage_is_read(text: str, storage: Any) -> None:
    assert parse_storage(text, "--storage") == storage


@each(
    ("text", "message"),
    [
        ("disk", "Disk does not take this: missing a required argument: 'path'"),
        ("Hst()", "there is no storage 'Hst'. Did you mean 'Host'?"),
        ("full()", "there is no storage 'full'"),
        ("1 + 1", "is neither a literal nor a call"),
        ("Disk(3)", "path is a text; got 3"),
        ("Host(limit='much')", "Host(limit=...) takes a size: an int of bytes"),
        ("(", "is not an expression"),
    ],
)
def test_what_is_no_storage_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_storage(text, "--storage")
    assert str(caught.value).startswith("--storage: ") and message in str(caught.value)


def test_plan_takes_storages() -> None:
    testing = pytest.importorskip("click.testing")
    command = importlib.import_module("reactivate.cli.commands.plan").plan
    target = ["test_plan_storages_cli:made", "--device", "A100-80GB", "--budget", "1"]

    def least_bytes(*options: str) -> int:
        found = testing.CliRunner().invoke(command, [*target, *options], standalone_mode=False)
        return int(found.exception.least_bytes)

    assert least_bytes("--storage", "Host(least_bytes=0)") < least_bytes()
    refused = testing.CliRunner().invoke(command, [*target, "--storage", "hst"], standalone_mode=False)
    assert isinstance(refused.exception, UsageError) and "Did you mean 'host'?" in str(refused.exception)
