"""The dropout benchmark, as short as can be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import dropout


def test_ways_and_their_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dropout.main(["--rounds", "2", "--rows", "16", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("dropout-*.json")
    rows = {row["way"]: row["kept_bytes"] for row in json.loads(path.read_text())["rows"]}
    hidden = 16 * dropout.WIDTH * 4
    states = rows[dropout.RECOMPUTED] - 16 * dropout.WIDTH * 4  # of the generator, beside the input
    assert rows[dropout.BITS] - rows[dropout.RECOMPUTED] == (hidden + hidden // 4) // 8 + 2 * states
    assert rows[dropout.WHOLE] - rows[dropout.BITS] > 2 * 4 * hidden  # noise and results
    assert rows[dropout.WHOLE] < rows[dropout.PLAIN]
    assert dropout.BITS in capsys.readouterr().out and path.with_suffix(".md").exists()
