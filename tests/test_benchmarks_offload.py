"""The offload benchmark, as short as can be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import offload


def test_a_run_on_a_disk(tmp_path: Path) -> None:
    found = offload.on_disk(str(tmp_path), rounds=1, layers=2)
    assert set(found["seconds"]) == {"plain", "inputs in memory", "disk", "disk, nothing read ahead"}
    assert all(len(values) == 1 and values[0] > 0 for values in found["seconds"].values())
    assert set(found["bytes taken in by a step"].values()) == {2 * 16 * 256 * 256 * 4}
    rows = [{"part": 0.5, "hidden": 0.99, "ideal": 1.0}]
    text = offload.to_markdown({"hidden": rows, "disk": found})
    assert "| 0.50 | 99 % | 100 % |" in text
    assert "| inputs in memory |" in text
    assert "On a GPU: not run." in text


@pytest.mark.skipif(not hasattr(torch._C, "_acc"), reason="this torch has no device guards written in Python")
def test_copies_on_the_simulated_device_are_hidden_as_far_as_they_can_be() -> None:
    rows = offload.in_a_process(layers=4)
    assert [row["part"] for row in rows] == list(offload.PARTS)
    for row in rows:
        assert row["ideal"] - 0.01 <= row["hidden"] <= 1
