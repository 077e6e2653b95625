"""The warning of a plan about other shapes: the peak that it says is that of the model that was called, byte for byte."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from memory import allocated_by
from plan_models import Block, Case
from several import each
from torch import Tensor, nn

import reactivate
from reactivate._region.accounts import in_words


def of_all(output: Tensor) -> Tensor:
    return output.sum()


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32) for _ in range(6)))


@each(
    ("instance", "budget", "length"),
    [
        (lambda model: model, "40%", 26),
        (copy.deepcopy, "40%", 26),
        (lambda model: made(), "60%", 26),
        (copy.deepcopy, "60%", 48),
        (copy.deepcopy, "100%", 26),
    ],
)
def test_the_peak_with_other_shapes(instance: Callable[[nn.Module], nn.Module], budget: str, length: int) -> None:
    """Of the planned model, of a copy, or of another one made alike: the regions of the one that was called count.

    Each step has a new batch, of which the regions take a copy if it is small.
    """
    planned = made()
    plan = reactivate.plan(planned, torch.randn(4, 32, 32), loss=of_all, budget=budget)
    model, x = instance(planned), torch.randn(4, length, 32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with reactivate.apply(model, plan):
        with pytest.warns(UserWarning, match="The peak will be") as told:
            Case(model, (x,), loss=of_all).step()
        own_bytes = allocated_by(Case(model, (x.clone(),), loss=of_all).step).peak_bytes
    total = plan.fixed.total - plan.fixed.inputs + x.nbytes + own_bytes
    verdict = "still holds" if total <= plan.budget_bytes else "does not hold: plan again"
    assert f"The peak will be {in_words(total)}; " in str(told[0].message)
    assert str(told[0].message).endswith(f" {verdict}.")
