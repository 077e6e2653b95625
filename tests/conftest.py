"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator

import oracle
import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    oracle.seed_everything()
    flags = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    yield
    assert flags == (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ), "the test left a flag of torch's changed"
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
