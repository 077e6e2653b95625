"""The page about the life of a plan names the functions that a plan goes through, in their order; and how many there are."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reactivate
from reactivate.planner import api as api  # so that no module is imported while functions are counted

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^\d+\. \*\*[^*]+\*\* `(reactivate/planner/[\w/]+\.py)`, `([\w.]+)`\.", re.MULTILINE)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def entered() -> list[tuple[str, str]]:
    """The functions of the planner that a plan of six layers enters, with their files, in the order of their first calls."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        place = code.co_filename.rpartition("/reactivate/planner/")
        if event == "call" and place[1] and not code.co_name.startswith("<"):
            owner = next((type(item) for item in list(frame.f_locals.values())[:1]), object)
            is_method = code.co_varnames[:1] == ("self",)
            name = f"{owner.__name__}.{code.co_name}" if is_method else code.co_name
            found.setdefault((f"reactivate/planner/{place[2]}", name))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        plan = reactivate.plan(model, torch.randn(64, 8), budget="60%")
    finally:
        sys.setprofile(before)
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes
    return list(found)


def test_the_page_follows_a_plan(entered: list[tuple[str, str]]) -> None:
    steps = STEP.findall((ROOT / "docs" / "life-of-a-plan.md").read_text(encoding="utf-8"))
    assert len(steps) == 10
    assert not [step for step in steps if step not in entered]
    numbers = [entered.index(step) for step in steps]
    assert numbers == sorted(numbers)


def test_a_plan_goes_through_few_functions_and_files(entered: list[tuple[str, str]]) -> None:
    assert len(entered) <= 400
    assert len({file for file, _ in entered}) <= 60
