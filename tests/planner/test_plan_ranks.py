"""Plans of models that span processes: wrapped, sharded, tensor-parallel."""

from __future__ import annotations

import pytest
from plan_cases import CASES
from ranks import errors_of, listed


@pytest.mark.slow
@pytest.mark.parametrize("name", listed(CASES))
def test_plans_of_models_that_span_processes(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert not errors_of("plan_cases", name, tmp_path_factory)
