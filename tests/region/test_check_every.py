"""`check="every"`: what is in one pass only, and is no fault of the function, is not compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from journal import Journal
from oracle import leaf
from state_programs import Program, Wrap, check_program
from torch import Tensor, nn

import reactivate
from reactivate.errors import RecomputeMismatchError


def nested_tensor(wrap: Wrap) -> Any:
    """A jagged tensor is asked for its sizes and its layout, in one pass more often than in the other."""
    linear, found = nn.Linear(4, 4), []
    checkpointed = wrap(lambda nested: linear(nested).tanh() * nested, check="every")
    for _ in range(3):
        parts = [torch.randn(2, 4), torch.randn(3, 4)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        linear.zero_grad()
        checkpointed(nested).values().square().sum().backward()
        found.append(linear.weight.grad)
    return found


def spectral_norm_twice(wrap: Wrap) -> Any:
    """A discriminator of real and of generated data: of the vectors that the second call moves, the first keeps copies."""
    norm: Any = nn.utils.spectral_norm
    critic = nn.Sequential(norm(nn.Linear(4, 6)), nn.ReLU(), norm(nn.Linear(6, 1)))
    checkpointed, found = wrap(critic, check="every"), []
    for _ in range(3):
        critic.zero_grad()
        real, generated = checkpointed(torch.randn(5, 4)), checkpointed(torch.randn(5, 4))
        (real.mean() - generated.mean()).backward()
        found += [parameter.grad for parameter in critic.parameters()]
    return found


def quantized(wrap: Wrap) -> Any:
    """Of a quantized tensor, which has no bytes to look at, its integers are compared."""

    def quantizing(x: Tensor) -> Tensor:
        levels = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8)
        return linear(x) * levels.dequantize().sin()

    linear, found = nn.Linear(4, 4), []
    checkpointed = wrap(quantizing, check="every")
    for _ in range(3):
        linear.zero_grad()
        checkpointed(torch.randn(3, 4)).sum().backward()
        found.append(linear.weight.grad)
    return found


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # deprecated from torch 2.13 on
@pytest.mark.parametrize("program", [nested_tensor, spectral_norm_twice, quantized])
def test_program(program: Any) -> None:
    check_program(Program(program))


def test_what_comes_after_a_question_for_recomputations_may_be_left_out() -> None:
    """Ops that it does not leave out are compared all the same."""
    linear, means, factors = nn.Linear(4, 4), Journal(), Journal()

    def fn(x: Tensor) -> Tensor:
        y = linear(x).tanh()
        if not reactivate.is_recomputing():
            means.append(y.detach().mean().item())
        return linear(y * factors[-1]).tanh()

    factors.append(1.5)
    region = reactivate.checkpoint(fn, check="every")
    for _ in range(3):
        region(leaf(2, 4)).sum().backward()
    assert len(means) == 3
    out = region(leaf(2, 4)).sum()
    factors.append(2.5)
    with pytest.raises(RecomputeMismatchError, match="computes other values than its forward"):
        out.backward()
