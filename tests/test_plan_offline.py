"""Plans of sharded models that one process makes, without the other ranks and without their devices."""

from __future__ import annotations

import plan_offline_cases
import pytest
from ranks import errors_of, listed


@pytest.mark.parametrize("name", listed(plan_offline_cases.CASES))
def test_the_plan_of_a_rank_is_equal_to_the_rank(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("plan_offline_cases", name, tmp_path_factory)
