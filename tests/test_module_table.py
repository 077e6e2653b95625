"""Every module in torch's own table, train and eval: checkpointed against plain, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Case, assert_same, run, tensors_in
from torch.testing._internal.common_modules import module_db

import reactivate
from reactivate.errors import MutationError


def inputs_of(info: Any, training: bool) -> list[Any]:
    # Fractional pooling's table has random samples in double precision.
    dtype = torch.float64 if "Fractional" in info.name else torch.float32
    return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module(info: Any, training: bool) -> None:
    replays = 0
    for index in range(len(inputs_of(info, training))):

        def make(index: int = index) -> Case:
            torch.manual_seed(0)
            given = inputs_of(info, training)[index]
            build, forward = given.constructor_input, given.forward_input
            module = info.module_cls(*build.args, **build.kwargs).train(training)
            return Case(module, forward.args if forward else (), forward.kwargs if forward else {})

        if not any(leaf.requires_grad for leaf in [*make().inputs().values()]):
            continue
        plain = run(make)
        try:
            ours = run(make, reactivate.checkpoint)
        except MutationError:
            assert any(leaf._version > 0 for leaf in tensors_in(make().args)) or "inplace" in str(make().fn)
            continue
        assert_same(plain, ours)
        assert ours.regions == 1 and ours.replays <= 1
        replays += ours.replays
