"""The table of architectures: some of its rows, and that it would notice a model that was changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import architectures
from _architectures_list import ARCHITECTURES
from _architectures_row import measure_row
from _model_facts import changes, facts_of

pytestmark = pytest.mark.slow

ROWS = ["boxes", "graph attention", "lstm", "u-net"]
WITH_TRANSFORMERS = ["opt", "mixtral"]


@pytest.mark.parametrize("name", ROWS + WITH_TRANSFORMERS)
def test_every_plan_holds_and_the_model_is_left_alone(name: str) -> None:
    for package in ARCHITECTURES[name].needs:
        pytest.importorskip(package)
    row = measure_row(name)
    assert row.is_right, architectures._wrong(row)
    assert any(item.budget_bytes < 0.9 * row.plain_bytes for item in row.found)


def test_forty_are_listed() -> None:
    assert len(ARCHITECTURES) == 40
    assert len({item.family for item in ARCHITECTURES.values()}) == 12


def test_changes_of_a_model_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for change, name in (
        (lambda: model[0].register_forward_hook(print), "0._forward_hooks"),
        (lambda: setattr(model[0], "seen", 1), "0.seen"),
        (lambda: model[1].running_mean.add_(1), "1._buffers"),
        (lambda: setattr(model[0].weight, "grad", torch.ones(2, 2)), "gradient of 0.weight"),
        (lambda: torch.rand(1), "random numbers of torch"),
    ):
        before = facts_of(model)
        assert not changes(before, facts_of(model))
        change()
        assert name in changes(before, facts_of(model))


def test_a_row_is_written_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second time it is there
        architectures.main(["boxes", "--out", str(tmp_path)])
    assert capsys.readouterr().err.count("boxes: right") == 1
    (path,) = tmp_path.glob("architectures-*.md")
    assert "1 of 1 architectures are right in everything" in path.read_text()
