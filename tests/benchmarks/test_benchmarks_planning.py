"""The benchmark of planning, on small parts of its models and chains."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import planning

pytestmark = pytest.mark.slow


def test_every_part_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "llama-8b,solve,frontier"
    planning.main(["--only", only, "--layers", "12", "--blocks", "20", "--json", "--out", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)["found"]
    assert [row["blocks"] for row in found.values()] == [12, 20, 20, 20]
    assert all(row["seconds"] > 0 for row in found.values())
    assert all("recompute" in row["plan"] for row in found.values() if "plan" in row)
    files = {path.suffix: path.read_text() for path in tmp_path.iterdir()}
    assert json.loads(files[".json"])["found"] == found
    assert "| llama-8b | 12 |" in files[".md"] and "| frontier(24) | 20 |" in files[".md"]


def test_plans_of_small_models_are_given_in_plain_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planning.main(["--only", "packed lstm", "--json", "--out", str(tmp_path)])
    row = json.loads(capsys.readouterr().out)["found"]["packed lstm"]
    assert row["blocks"] == 4 and row["seconds"] > row["plain step"] > 0 and "recompute" in row["plan"]
    (table,) = (path.read_text() for path in tmp_path.glob("planning-small-*.md"))
    steps = round(row["seconds"] / row["plain step"])
    assert table.splitlines()[0].endswith("| in plain steps | target |") and table.endswith(f"| {steps} | 60 |\n")
