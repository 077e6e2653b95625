"""The ways to compare: a transformer block, checkpointed with the same calls kept, by each system at its best."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from _subjects import OURS, PLAIN, REMAT, TORCH, Function
from _workloads import TransformerBlock
from torch import Tensor, nn
from torch.utils import checkpoint as upstream

import reactivate
from reactivate import policies

SAC = "torch SAC"
FUNCTION_SITES = "reactivate, function sites"
MODULE_SITES = "reactivate, module sites"
ALL_OURS = (OURS, FUNCTION_SITES, MODULE_SITES)

LINEARS = ("query_key_value", "out", "gate", "up", "down")
MATMULS = ("scores", "mix")

EVERYTHING, NOTHING, ONLY_LINEARS, PRODUCTS = "everything", "nothing", "5 linear", "5 linear, 2 matmul"
CALLS_OF = {NOTHING: (), ONLY_LINEARS: LINEARS, PRODUCTS: (*LINEARS, *MATMULS)}
"""{what a way keeps: the calls}. All keep the block's argument as well."""

aten = torch.ops.aten
# What `linear` and `matmul` are to SAC, which sees the ops below autograd.
OPS_OF = {
    ONLY_LINEARS: [aten.mm.default, aten.addmm.default],
    PRODUCTS: [aten.mm.default, aten.addmm.default, aten.bmm.default],
}


@dataclass(frozen=True)
class Way:
    """A way to checkpoint the block.

    Attributes:
        keeps: a key of `CALLS_OF`, or `EVERYTHING`.
        wrap: block -> the same function, checkpointed; it may share the block's parameters or copy them.
    """

    system: str
    keeps: str
    wrap: Callable[[TransformerBlock], Function]

    @property
    def name(self) -> str:
        return f"{self.system} ({self.keeps})"


def make_ways() -> list[Way]:
    """All ways. Without torch_remat where that is not installed."""
    ways = [
        Way(PLAIN, EVERYTHING, lambda block: block),
        Way(TORCH, NOTHING, lambda block: partial(upstream.checkpoint, block, use_reentrant=False)),
        Way(OURS, NOTHING, reactivate.checkpoint),
        Way(FUNCTION_SITES, PRODUCTS, _function_sites),
        Way(MODULE_SITES, ONLY_LINEARS, _module_sites),
        *(Way(SAC, keeps, partial(_sac, ops)) for keeps, ops in OPS_OF.items()),
    ]
    if find_spec("torch_remat"):
        ways += [Way(REMAT, keeps, partial(_remat, calls)) for keeps, calls in CALLS_OF.items()]
    order = [EVERYTHING, *CALLS_OF]
    return sorted(ways, key=lambda way: (order.index(way.keeps), way.system in ALL_OURS, way.system == REMAT))


def _sac(ops: list[Any], block: TransformerBlock) -> Function:
    contexts = partial(upstream.create_selective_checkpoint_contexts, ops)
    return partial(upstream.checkpoint, block, use_reentrant=False, context_fn=contexts)


def _function_sites(block: TransformerBlock) -> Function:
    checkpointed: Function = reactivate.checkpoint(block, policy=policies.save_ops("linear", "matmul"))
    return checkpointed


def _module_sites(block: TransformerBlock) -> Function:
    """On a copy, for a policy that is applied stays on the modules."""
    model = nn.Sequential(copy.deepcopy(block))
    linears = policies.save_modules(*(f"0.{name}" for name in LINEARS))
    reactivate.apply(model, policies.first_match(linears, policies.recompute_modules("0")))
    return model


def _remat(calls: tuple[str, ...], block: TransformerBlock) -> Function:
    """torch_remat is told by marks in the code of the block.

    Each result has the second mark as well, that code which runs again will read it. It could do without on one or two,
    if torch_remat 0.2.2 did not need, for what is not marked so, a private function that torch 2.13 lacks.
    """
    import torch_remat  # an optional package

    def mark(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        region = torch_remat.region(call, name, recompute=False)

        def marked(*tensors: Tensor) -> Tensor:
            result: Tensor = region(*tensors)
            torch_remat.recompute_needs_tensor(result)
            return result

        return marked if name in calls else call

    checkpointed: Function = torch_remat.checkpoint(region_name="block")(MarkedBlock(block, mark))
    return checkpointed


class MarkedBlock(nn.Module):
    """The block, with its parameters, and with something else in the place of its seven products.

    Args:
        mark: (name of a product, the function that computes it) -> the function to call for it.
    """

    def __init__(self, block: TransformerBlock, mark: Callable[[str, Callable[..., Tensor]], Callable[..., Tensor]]):
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = block.heads, block.norm_1, block.norm_2
        for name in LINEARS:
            setattr(self, name, getattr(block, name))
        self.product = {name: mark(name, getattr(block, name)) for name in LINEARS}
        self.product |= {name: mark(name, torch.matmul) for name in MATMULS}

    def forward(self, x: Tensor) -> Tensor:
        x, hidden = self.before_down(x)
        return x + self.product["down"](hidden)

    def before_down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two terms of the result, the second before its last product."""
        x = x + self.attention(self.norm_1(x))
        hidden = self.norm_2(x)
        return x, nn.functional.silu(self.product["gate"](hidden)) * self.product["up"](hidden)

    def attention(self, x: Tensor) -> Tensor:
        mixed = self.product["query_key_value"](x).unflatten(-1, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()
        scores = (self.product["scores"](query, key.transpose(-2, -1)) * query.size(-1) ** -0.5).softmax(-1)
        return self.product["out"](self.product["mix"](scores, value).transpose(1, 2).flatten(2))


def recomputed_alone(block: TransformerBlock, keeps: str, x: Tensor) -> Callable[[], object]:
    """The least that a recomputation can do: the forward pass, without a graph, of what is neither kept nor needless.

    The results of kept calls are there, from a forward pass before. The last product and the sum with it are needless,
    since the backward reads only what went into them.
    """
    results: dict[str, Tensor] = {}

    def recording(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def record(*tensors: Tensor) -> Tensor:
            results[name] = call(*tensors)
            return results[name]

        return record

    def looked_up(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def look_up(*tensors: Tensor) -> Tensor:
            for tensor in tensors:
                tensor.flatten(0, -3)  # as `matmul` does, which copies what is not contiguous, and saves the copy
            return results[name]

        return look_up if name in CALLS_OF[keeps] else call

    recomputation = MarkedBlock(block, looked_up)

    def step() -> None:
        with torch.no_grad():
            recomputation.before_down(x)

    with torch.no_grad():
        MarkedBlock(block, recording)(x)
    return step
