"""Plans of models that `fully_shard` has sharded already."""

from __future__ import annotations

import plan_sharded_cases
import plan_sharded_training_cases
import pytest
from ranks import errors_of, listed


@pytest.mark.slow
@pytest.mark.parametrize("name", listed(plan_sharded_cases.CASES))
def test_promises_for_sharded_models(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("plan_sharded_cases", name, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", listed(plan_sharded_training_cases.CASES))
def test_sharded_models_in_training(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("plan_sharded_training_cases", name, tmp_path_factory)
