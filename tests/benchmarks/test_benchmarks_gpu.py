"""`make gpu`: parts in order, each outcome written at once, and a second run goes on."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reactivate.errors import PlanInfeasible

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script, on a device that is not here, with parts that take no time."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    return gpu


def outcomes(folder: Path) -> dict[str, str]:
    (file,) = folder.glob("gpu-Some-GPU-torch*.json")
    return {item["part"]: item["ended"] for item in json.loads(file.read_text())}


def test_a_run_goes_on_where_the_last_one_stopped(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    switch = tmp_path / "switch"
    parts = (
        gpu.Part("right", 60, ["-c", "print('3 passed')"]),
        gpu.Part("wrong at first", 60, ["-c", f"import os, sys; sys.exit(not os.path.exists({str(switch)!r}))"]),
        gpu.Part("too long", 2, ["-c", "import time; print('begun', flush=True); time.sleep(60)"]),
        gpu.Part("figures of a day", 86400, ["-c", "raise AssertionError"]),
    )
    monkeypatch.setattr(gpu, "PARTS", parts)
    assert gpu.main([]) == 1
    assert outcomes(tmp_path) == {"right": "passed", "wrong at first": "failed", "too long": "stopped"}
    said = capsys.readouterr().out
    assert re.search(r"right: passed in \d+ s\. 3 passed", said)
    assert "figures of a day: not begun" in said and "begun" in said

    switch.touch()
    monkeypatch.setattr(gpu, "PARTS", parts[:2])
    assert gpu.main([]) == 0
    assert outcomes(tmp_path)["wrong at first"] == "passed"
    assert "right: passed before" in capsys.readouterr().out


def test_its_commands_are_there(gpu: Any) -> None:
    """Every script and file of tests that a part names exists, and takes the options that it is given."""
    for part in gpu.PARTS:
        for word in part.command:
            if word.startswith(("tests/", "benchmarks/")):
                assert (ROOT / word).exists(), word
        if part.command[0].startswith("benchmarks/"):
            script = (ROOT / part.command[0]).read_text("utf-8")
            for word in part.command:
                assert not word.startswith("--") or word in script or word == "--out", (part.name, word)


def test_without_a_gpu_it_says_so(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert sys.modules["gpu"] is gpu


def test_rows_of_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget is planned offline, and for as many bytes on the device; without a plan there it has one row."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import promises
    from _training import Size

    budgets = []

    def planned(case: Any, budget: int | str, device: str, name: str) -> Any:
        budgets.append(budget)
        if device == "cuda" and len(budgets) > 2:
            raise PlanInfeasible("no plan", budget_bytes=1, least_bytes=2)
        return make(case, budget, "meta", name)

    make = promises.planned
    monkeypatch.setattr(promises, "planned", planned)
    monkeypatch.setattr(promises, "trained", lambda case, plan: (plan.predicted.peak_bytes + 2**20, 3 * 2**20, 0.5))
    case = promises.Case("GPT", promises.subject("gpt", Size(2, 32, 2, 16)), ("80%", "70%"))
    rows = [*promises.rows_of(case, "H200")]
    assert [row.planned for row in rows] == ["offline", "on the device", "offline"]
    assert budgets == ["80%", rows[0].budget_bytes, "70%", rows[2].budget_bytes]
    assert all(row.measured_bytes - row.predicted_bytes == 2**20 for row in rows)
    table = promises.to_table(rows, "H200").to_markdown()
    assert table.count("| GPT |") == 3 and "500 ms" in table
