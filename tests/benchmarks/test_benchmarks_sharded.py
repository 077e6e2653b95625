"""The benchmark of sharded inputs, on one rank."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sharded


def test_what_a_rank_keeps() -> None:
    rows = sharded.on_ranks(1)
    assert [row["kept"] for row in rows] == [row["whole"] for row in rows] == [6 * 8 * 128 * 64 * 4, 6 * 3 * 7 * 33 * 2]
    assert all(row["is_same"] for row in rows)
    assert "| 1,572,864 | 1,572,864 | 0 | yes |" in sharded.to_markdown(rows)
