"""A model of transformers with its own gradient checkpointing, under the drop-in: three steps with dropout and AdamW."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch_xla
from lazy import DEVICE, XLA
from oracle import Watched
from torch import Tensor

import reactivate
from reactivate._engine.record import observed_by

transformers: Any = pytest.importorskip("transformers")


def trained(is_checkpointed: bool) -> tuple[list[Tensor], int, Watched]:
    """Return losses, the last gradients and the parameters; the seed afterwards; the regions."""
    torch.manual_seed(0)
    size = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
    config = transformers.GPT2Config(
        **size, bos_token_id=0, eos_token_id=0, attn_implementation="eager", use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).to(DEVICE).train()
    tokens = torch.randint(0, 32, (2, 8)).to(DEVICE)
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch_xla.manual_seed(5)
    torch_xla.sync()
    found, watched = [], Watched()
    with observed_by(watched), reactivate.dropin.install() if is_checkpointed else nullcontext():
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            found.append(loss.detach())
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            torch_xla.sync()
    tensors = [*found, *gradients, *(parameter.detach() for parameter in model.parameters())]
    return [tensor.cpu() for tensor in tensors], XLA._xla_get_rng_seed(""), watched


def test_gpt2_op_by_op(op_by_op: None) -> None:
    expected, seed, _ = trained(is_checkpointed=False)
    found, seed_after, watched = trained(is_checkpointed=True)
    assert watched.recomputations == 6
    assert seed == seed_after
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
