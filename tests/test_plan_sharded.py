"""Plans of models that `fully_shard` has sharded already."""

from __future__ import annotations

import pytest
from plan_sharded_cases import CASES
from ranks import errors_of, listed


@pytest.mark.parametrize("name", listed(CASES))
def test_plans_of_sharded_models(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("plan_sharded_cases", name, tmp_path_factory)
