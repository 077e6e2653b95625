"""Plans of sharded models that one process makes, without the other ranks and without their devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import plan_offline_cases
import pytest
from ranks import errors_of, listed


@pytest.mark.parametrize("name", listed(plan_offline_cases.CASES))
def test_the_plan_of_a_rank_is_equal_to_the_rank(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("plan_offline_cases", name, tmp_path_factory)


def test_the_example_plans_each_way_to_shard() -> None:
    script = Path(__file__).parents[2] / "examples" / "sharded_llama.py"
    command = [
        sys.executable,
        str(script),
        *plan_offline_cases.llama.WAYS,
        "--layers",
        "2",
        "--tokens",
        "512",
        "--world",
        "64",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent.parent, check=True)
    assert done.stdout.count("Llama fits into") == done.stdout.count("run beside compute") == 3
