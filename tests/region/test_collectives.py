"""Regions with collectives inside: whatever a rank decides about one, all ranks do, however late each of them is."""

from __future__ import annotations

import pytest
from collective_cases import CASES
from ranks import errors_of, listed


@pytest.mark.parametrize("name", listed(CASES))
def test_on_several_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bitwise, without an error, and to the end."""
    assert not errors_of("collective_cases", name, tmp_path_factory)
