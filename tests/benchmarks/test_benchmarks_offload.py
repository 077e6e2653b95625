"""The offload benchmark, as short as can be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import offload

pytestmark = pytest.mark.slow


def test_a_run_on_a_disk(tmp_path: Path) -> None:
    found = offload.on_disk(str(tmp_path), rounds=1, layers=2)
    assert set(found["seconds"]) == {"plain", "inputs in memory", "disk", "disk, nothing read ahead"}
    assert all(len(values) == 1 and values[0] > 0 for values in found["seconds"].values())
    assert set(found["bytes taken in by a step"].values()) == {2 * 16 * 256 * 256 * 4}
    rows = [{"part": 0.5, "hidden": 0.99, "ideal": 1.0}]
    ways = [
        {"way": "regions, inputs on the device", "resident": 3000, "peak": 4000, "seconds": 10.0, "copies": 0.0},
        {"way": "regions, inputs on the host", "resident": 1000, "peak": 4000, "seconds": 11.0, "copies": 5.0},
        {"way": "another's", "why": "not installed"},
    ]
    text = offload.to_markdown({"hidden": rows, "ways": ways, "disk": found})
    assert "| regions, inputs on the host | 1,000 | 4,000 | 11 s of its clock | 15 s of its clock |" in text
    assert "| another's | not run: not installed |" in text
    assert "| 0.50 | 99 % | 100 % |" in text
    assert "| inputs in memory |" in text
    assert "On a GPU: not run (`make bench-gpu`)." in text


@pytest.mark.skipif(not hasattr(torch._C, "_acc"), reason="this torch has no device guards written in Python")
def test_copies_on_the_simulated_device_are_hidden_as_far_as_they_can_be() -> None:
    found = offload.in_a_process(layers=4)
    rows, ways = found["hidden"], {row["way"]: row for row in found["ways"]}
    assert [row["part"] for row in rows] == list(offload.PARTS)
    for row in rows:
        assert row["ideal"] - 0.01 <= row["hidden"] <= 1
    host, device = ways["regions, inputs on the host"], ways["regions, inputs on the device"]
    assert host["resident"] < device["resident"] < ways["plain"]["resident"]
    assert host["peak"] < device["peak"] and host["seconds"] < device["seconds"] + host["copies"]
    why = ways["torchtune, `OffloadActivations`"]["why"]  # in torch's words, by its build
    assert "CUDA" in why or "NVIDIA" in why or "not installed" in why


def test_ways_on_a_device_with_a_clock_of_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on the CPU as on a GPU: peers that want CUDA say so."""
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    rows = offload._offload_peers.on_gpu(torch.device("cpu"), layers=1, steps=1, width=8, batch=4)
    assert [row["way"] for row in rows if "seconds" in row][:4] == [
        *("plain", "regions, inputs on the device", "regions, inputs on the host", "regions, inputs on a disk")
    ]
    assert "| plain | 0 | 0 |" in offload.of_ways("A", rows, "s").with_title()
