"""Every module in torch's own table, train and eval: checkpointed against plain, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Case, assert_same, run, seed_everything, skip_unless_repeatable, tensors_in
from torch.testing._internal.common_modules import module_db

import reactivate
from reactivate.errors import MutationError

pytestmark = pytest.mark.table

EXCLUDED_ON_DEVICES = {
    "AdaptiveMaxPool3d": "backward adds up overlapping windows in any order, and torch does not say so"
}
"""Modules that may differ from themselves there, too rarely for two plain runs to tell."""


def inputs_of(info: Any, training: bool, device: str) -> list[Any]:
    # Fractional pooling's table has random samples in double precision.
    dtype = torch.float64 if "Fractional" in info.name else torch.float32
    return info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=training)


def cases_of(info: Any, training: bool, samples: slice, device: str) -> list[Case]:
    """The samples of the table. The same ones again, if it is called again."""
    seed_everything(0)
    cases = []
    for given in inputs_of(info, training, device)[samples]:
        build, forward = given.constructor_input, given.forward_input
        module = info.module_cls(*build.args, **build.kwargs).to(device).train(training)
        cases.append(Case(module, forward.args if forward else (), forward.kwargs if forward else {}))
    return cases


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module(info: Any, training: bool, samples: slice, device: str) -> None:
    if device != "cpu" and info.module_cls.__name__ in EXCLUDED_ON_DEVICES:
        pytest.skip(EXCLUDED_ON_DEVICES[info.module_cls.__name__])
    recomputations = 0
    cases = [cases_of(info, training, samples, device) for _ in range(2 if device == "cpu" else 4)]
    for first, second, *others in zip(*cases, strict=True):
        if not first.inputs():
            continue
        if device != "cpu":
            again = iter(others)
            skip_unless_repeatable(lambda again=again: run(lambda: next(again)))
        plain = run(lambda case=first: case)
        try:
            ours = run(lambda case=second: case, reactivate.checkpoint)
        except MutationError:
            assert any(tensor._version > 0 for tensor in tensors_in(second.args)) or "inplace" in str(second.fn)
            continue
        assert_same(plain, ours)
        assert ours.regions == 1 and ours.recomputations <= 1
        recomputations += ours.recomputations
