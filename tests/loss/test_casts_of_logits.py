"""Casts of logits that are read more than once, hooked or differentiated: one place in the graph, as that of a plain cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory import allocated_by
from oracle import assert_bitwise
from several import each
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate import policies

ROWS, CLASSES = 24, 37
Loss = Callable[[Tensor, Tensor], Tensor]


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets) + 0.1 * logits.logsumexp(-1).square().mean()


def z_loss_first(logits: Tensor, targets: Tensor) -> Tensor:
    squares = logits.logsumexp(-1).square().mean()
    return F.cross_entropy(logits, targets) + 0.1 * squares


def two_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets) + 0.5 * F.cross_entropy(logits, targets.flip(0))


def three_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return two_losses(logits, targets) + 0.3 * F.cross_entropy(logits, (targets + 1) % CLASSES, reduction="sum")


def shifts(logits: Tensor, targets: Tensor) -> Tensor:
    one = F.cross_entropy(logits[:-1], targets[1:])
    return one + 0.5 * F.cross_entropy(logits[:-2], targets[2:]) + 0.1 * F.cross_entropy(logits, targets)


def views(logits: Tensor, targets: Tensor) -> Tensor:
    grid = logits.view(4, -1, CLASSES)
    last = grid[:, -1].exp().mean()
    return F.cross_entropy(grid.flatten(0, 1), targets) + 0.1 * last + 0.01 * logits.square().sum()


def view_first(logits: Tensor, targets: Tensor) -> Tensor:
    part = logits[:5].tanh().sum()
    return F.cross_entropy(logits, targets) + 0.1 * part


def hooked_afterwards(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits, targets)
    logits.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return loss


def hooked_after_reading(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits, targets) + logits.exp().mean()
    logits.register_hook(lambda gradient: gradient * 2)
    return loss


LOSSES: list[Loss] = [
    *(with_z_loss, z_loss_first, two_losses, three_losses, shifts, views, view_first, hooked_afterwards),
    hooked_after_reading,
]


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def both(dtype: torch.dtype, results: Callable[[nn.Module, Tensor, Tensor], list[Tensor]]) -> None:
    """Compare the results of the plain model with those of one whose loss is computed by rows."""
    found = []
    for policy in (None, policies.loss_by_rows("2")):
        model = model_of(dtype)
        if policy is not None:
            reactivate.apply(model, policy)
        torch.manual_seed(1)
        x, targets = torch.randn(ROWS, 8).to(dtype), torch.randint(CLASSES, (ROWS,))
        found.append(
            [*results(model, x, targets), *(item.grad for item in model.parameters() if item.grad is not None)]
        )
    assert len(found[0]) == len(found[1])
    for number, (plain, ours) in enumerate(zip(*found, strict=True)):
        assert_bitwise(plain, ours, f"result {number}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@each("loss", LOSSES, ids=[loss.__name__ for loss in LOSSES])
def test_gradients_are_added_before_they_are_cast_back(loss: Loss, dtype: torch.dtype) -> None:
    def results(model: nn.Module, x: Tensor, targets: Tensor) -> list[Tensor]:
        value = loss(model(x).float(), targets)
        value.backward()
        return [value.detach()]

    both(dtype, results)


@pytest.mark.parametrize("shape", [(ROWS, CLASSES), (4, -1, CLASSES)], ids=str)
def test_a_gradient_with_respect_to_a_cast(shape: Any) -> None:
    def results(model: nn.Module, x: Tensor, targets: Tensor) -> list[Tensor]:
        logits = model(x).float().view(shape)
        loss = F.cross_entropy(logits.view(-1, CLASSES), targets)
        (gradient,) = torch.autograd.grad(loss, logits)
        logits.backward(gradient)
        return [gradient]

    both(torch.bfloat16, results)


def test_a_gradient_that_is_retained() -> None:
    for is_late in (False, True):

        def results(model: nn.Module, x: Tensor, targets: Tensor, is_late: bool = is_late) -> list[Any]:
            logits = model(x).float()
            if not is_late:
                logits.retain_grad()
            loss = F.cross_entropy(logits, targets)
            if is_late:
                logits.retain_grad()
            loss.backward()
            return [logits.grad]

        both(torch.bfloat16, results)


def test_a_gradient_of_a_gradient() -> None:
    def results(model: nn.Module, x: Tensor, targets: Tensor) -> list[Tensor]:
        x = x.requires_grad_()
        loss = F.cross_entropy(model(x).float(), targets)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
        return [gradient.detach()]

    both(torch.bfloat16, results)


def test_of_a_cast_that_is_read_once_nothing_is_made() -> None:
    rows, classes = 512, 1000
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, classes)).bfloat16()
    x, targets = torch.randn(rows, 8).bfloat16(), torch.randint(classes, (rows,))

    def step() -> None:
        F.cross_entropy(model(x).float(), targets).backward()

    step()
    plain = allocated_by(step).peak_bytes
    with reactivate.apply(model, policies.loss_by_rows("1")):
        step()
        assert allocated_by(step).peak_bytes < plain - 6 * rows * classes
