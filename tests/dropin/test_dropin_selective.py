"""torch's selective checkpointing through the drop-in, around functions that write to parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as upstream
from oracle import Watched, assert_bitwise, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from reactivate._passes.observing import observed_by
from reactivate.dropin import torch as ours

Call = Callable[..., Tensor]


def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = functools.partial(create_selective_checkpoint_contexts, choose)


def embedding_that_renormalises(call: Call) -> Any:
    embedding, linear, found = nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 4), []
    optimizer = torch.optim.SGD([*embedding.parameters(), *linear.parameters()], 0.5)
    for _ in range(4):
        optimizer.zero_grad()
        call(lambda index: linear(embedding(index)).sin(), torch.randint(0, 10, (5,))).sum().backward()
        found += [embedding.weight.grad, linear.weight.grad]
        optimizer.step()
    return found


def temperature_that_is_clamped(call: Call) -> Any:
    linear, scale, found = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.0)), []

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale.clamp_(0, 4.6)
        h = nn.functional.normalize(linear(x), dim=-1)
        return scale.exp() * h @ h.T

    for _ in range(3):
        linear.zero_grad()
        scale.grad = None
        call(forward, torch.randn(3, 4)).square().sum().backward()
        found += [linear.weight.grad, scale.grad]
    return found


@pytest.mark.parametrize("program", [embedding_that_renormalises, temperature_that_is_clamped])
def test_a_function_that_writes_to_a_parameter(program: Callable[[Call], list[Tensor]]) -> None:
    """The proof that the write does not matter is not computed in torch's contexts, which would look for it."""
    seed_everything()
    plain = program(lambda fn, *args: fn(*args))
    for engine in (upstream, ours):
        seed_everything()
        watched = Watched()
        call = functools.partial(engine.checkpoint, use_reentrant=False, context_fn=CONTEXTS)  # type: ignore[attr-defined]
        with observed_by(watched):
            found = program(call)
        for number, (one, other) in enumerate(zip(plain, found, strict=True)):
            assert_bitwise(one, other, f"gradient {number} of {engine.__name__}")
        assert engine is upstream or watched.recomputations >= 3
