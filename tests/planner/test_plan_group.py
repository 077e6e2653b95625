"""Ranks that plan one step together."""

from __future__ import annotations

import pytest
from plan_group_cases import CASES
from ranks import errors_of, listed


@pytest.mark.slow
@pytest.mark.parametrize("name", listed(CASES))
def test_ranks_that_plan_together(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("plan_group_cases", name, tmp_path_factory)
