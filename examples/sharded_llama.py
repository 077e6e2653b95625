"""Plan the training of a Llama with 70 billion parameters on 8 and on 64 H100, in one process of a laptop.

python examples/sharded_llama.py              with FSDP2, in about a minute
python examples/sharded_llama.py tp hsdp      in other ways, about as long for each: FSDP2 with tensor parallelism, HSDP
python examples/sharded_llama.py --layers 4   fewer layers, in seconds

Nothing is allocated and nothing is sent: the parameters are on the meta device, and the process group is torch's `fake` one,
in which this process is rank 0 of as many as you like. Sharding is the code that you would run on the cluster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import reactivate


class Block(nn.Module):
    """Attention with shared keys and values, and a gated MLP."""

    def __init__(self, width: int, heads: int, shared_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, shared_heads * self.head_width, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            part(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama without rotary embeddings, which add little time and no memory; returns the loss."""

    def __init__(self, layers: int, width: int, heads: int, shared_heads: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, shared_heads, hidden) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


TENSOR_PARALLEL = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), ColwiseParallel()),
    **dict.fromkeys(("out", "down"), RowwiseParallel()),
}


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Split each block over the ranks of a mesh."""
    for block in model.blocks:
        parallelize_module(block, mesh, TENSOR_PARALLEL)
    return model


def shard(model: Llama, mesh: DeviceMesh, **options: object) -> Llama:
    """Shard each block, and what is left of the model, with FSDP2; over a mesh of two dimensions: HSDP."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """Be the first of so many ranks, the others of which are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fsdp(model: Llama) -> Llama:
    """FSDP2 over all ranks."""
    return shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=MIXED)


def fsdp_with_tensor_parallelism(model: Llama) -> Llama:
    """Tensor parallelism inside of each node of 8, and FSDP2 between the nodes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 8, 8), mesh_dim_names=("dp", "tp"))
    return shard(parallelize(model, mesh["tp"]), mesh["dp"], mp_policy=MIXED)


def hsdp(model: Llama) -> Llama:
    """Shards over half of the ranks each, and two replicas of these."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    return shard(model, mesh, mp_policy=MIXED)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, Callable[[Llama], Llama]] = {"fsdp": fsdp, "tp": fsdp_with_tensor_parallelism, "hsdp": hsdp}


def planned(way: Callable[[Llama], Llama], layers: int, tokens: int, device: str) -> str:
    """Return what a plan says of one rank, or why there is none."""
    with torch.device("meta"):
        model = Llama(layers, width=8192, heads=64, shared_heads=8, hidden=28672, vocabulary=128256)
        batch = torch.zeros(1, tokens, dtype=torch.long)
    model = way(model)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        plan = reactivate.plan(model, (batch, batch), device=device, optimizer=optimizer)
        return str(plan).partition("\n\n")[0]  # the rest are tables
    except reactivate.errors.PlanInfeasible as error:
        return f"No plan: {error}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}; by default fsdp")
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64], help="how many devices there are")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=8192, help="of the sequence that each rank has")
    parser.add_argument("--device", default="H100-SXM", help="see `reactivate devices`")
    given = parser.parse_args()
    if unknown := set(given.ways) - set(WAYS):
        parser.error(f"{', '.join(sorted(unknown))}: it takes {', '.join(WAYS)}.")
    for name in given.ways or ["fsdp"]:
        for count in given.world:
            with ranks(count):
                print(f"{count} of {given.device}. {WAYS[name].__doc__}", flush=True)
                print(planned(WAYS[name], given.layers, given.tokens, given.device), flush=True, end="\n\n")


if __name__ == "__main__":
    main()
