"""Models for tests of recipes, the peers' recipes, and the peers themselves, which choose layers of those models."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from oracle import Case, assert_same, run
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import activations, set_activation_checkpointing

from reactivate.integrations import recipe

if importlib.util.find_spec("triton") is None:
    # torchtitan imports its Triton kernels for mixtures of experts, and a torch for CPUs comes without Triton. No model
    # here runs them.
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules.setdefault(kernels.__name__, kernels)

from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import activation_checkpoint as torchtitan_checkpoint
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 61, 32, 4, 5, 2, 8
DROPOUT = 0.2
ALL = tuple(f"layers.{number}" for number in range(LAYERS))


# -- models -----------------------------------------------------------------------------------------------------------


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def torchtune_llama() -> Case:
    model = llama2(
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS // 2,
        embed_dim=WIDTH,
        max_seq_len=LENGTH,
        attn_dropout=DROPOUT,
    )
    return Case(model.train(), (tokens(),))


def torchtitan_llama(kv_heads: int = HEADS // 2) -> Case:
    arguments = TransformerModelArgs(
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=kv_heads,
        vocab_size=VOCABULARY,
        multiple_of=8,
        max_seq_len=LENGTH,
    )
    model = Transformer(arguments)
    with torch.no_grad():
        model.init_weights()
    return Case(model, (tokens(),))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)) * self.router(x).amax(-1, keepdim=True))


class PlainLayer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.moe = Experts()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.moe(torch.sin(self.mix(self.norm(x)))))


class Plain(nn.Module):
    """Nobody's model."""

    def __init__(self, bias: bool = False, count: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(bias) for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain() -> Case:
    return Case(Plain(), (torch.randn(BATCH, LENGTH, WIDTH),))


MODELS = [torchtune_llama, torchtitan_llama, plain]


def model_of(make: Callable[[], Case]) -> nn.Module:
    return make().modules[0]


def check(make: Callable[[], Case], source: Any, regions: tuple[str, ...]) -> recipe.Recipe:
    """Under the recipe the model does what it does without, and the regions are these; every one ran and was recomputed."""
    handles = []

    def applied(model: nn.Module) -> nn.Module:
        handles.append(recipe.apply(model, source))
        return model

    without = run(make)
    ours = run(make, applied)
    assert_same(without, ours)
    assert any(gradient is not None and gradient.any() for gradient in without.gradients.values())
    assert handles[0].regions == regions
    assert ours.regions == ours.recomputations == len(regions)
    assert (ours.kept_bytes < without.kept_bytes) == bool(regions)
    return recipe.load(source)


# -- the peers' own choice --------------------------------------------------------------------------------------------


def wrapped_in(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        name.replace("._checkpoint_wrapped_module", "")
        for name, module in model.named_modules()
        if isinstance(module, CheckpointWrapper)
    )


def torchtune_does(model: nn.Module, source: dict[str, Any]) -> nn.Module:
    """Apply these fields as torchtune's recipes do."""
    if source.get("enable_activation_checkpointing"):
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    else:
        activations.apply_selective_activation_checkpointing(model, source["ac_mode"], source.get("ac_option"))
    return model


def torchtitan_does(model: nn.Module, source: dict[str, Any]) -> nn.Module:
    if source["mode"] != "none":  # as its parallelize functions do
        config = ActivationCheckpoint(**source)
        torchtitan_checkpoint.apply_ac(model, config, op_sac_save_list=_op_sac_save_list)
    return model


TORCHTUNE: list[dict[str, Any]] = [
    {"enable_activation_checkpointing": True},
    {"enable_activation_checkpointing": True, "enable_activation_offloading": True},
    {"ac_mode": "none"},
    {"ac_mode": "full"},
    {"enable_activation_checkpointing": False, "enable_activation_offloading": False, "ac_mode": "full"},
    *({"ac_mode": "selective", "ac_option": k} for k in range(1, LAYERS + 1)),
]
TORCHTITAN: list[dict[str, Any]] = [
    {"mode": "none"},
    {"mode": "full"},
    *({"mode": "selective", "selective_ac_option": str(k)} for k in range(1, LAYERS + 1)),
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "full", "preserve_rng_state": True, "determinism_check": "none", "early_stop": False},
    {"mode": "selective", "selective_ac_option": "2", "debug": True},
]


# -- torchtitan's selective mode "op" ---------------------------------------------------------------------------------


OP = {"mode": "selective", "selective_ac_option": "op"}
FORCED = "per_op_sac_force_recompute_mm_shapes_by_fqns"
