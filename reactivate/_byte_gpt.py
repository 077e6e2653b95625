"""A byte-level GPT and the text that it learns, for `reactivate demo` and `examples/byte_gpt.py`. Nothing is downloaded."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody calls it)
from torch import Tensor, nn

from reactivate.errors import UsageError


@dataclass(frozen=True)
class Size:
    """The size of the model and of its batches."""

    layers: int = field(default=12, metadata={"help": "transformer blocks"})
    dim: int = field(default=192, metadata={"help": "width of the model"})
    heads: int = field(default=6, metadata={"help": "attention heads of a block"})
    context: int = field(default=256, metadata={"help": "bytes that the model looks back"})
    batch: int = field(default=6, metadata={"help": "sequences in a step"})
    dropout: float = field(default=0.1, metadata={"help": "probability of every dropout"})


class Block(nn.Module):
    """Attention and MLP, each with its norm before it and its dropout behind it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        dim = size.dim
        self.heads, self.dropout = size.heads, size.dropout
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(self.dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, dim) to the same."""
        x = x + F.dropout(self.out(self.attention(self.attention_norm(x))), self.dropout, self.training)
        y: Tensor = x + self.mlp(x)
        return y

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention of all heads."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.dim)
        self.positions = nn.Embedding(size.context, size.dim)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) to (batch, time, 256)."""
        x = self.dropout(self.bytes(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return the loss of the next byte, in nats, of logits for all but the last of `tokens`."""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def standard_library() -> Tensor:
    """Return the source of every module of Python's standard library, one after the other, as bytes.

    Raises:
        UsageError: this Python has none.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    installed = {"site-packages", "dist-packages"}
    files = [path for path in sorted(root.rglob("*.py")) if not installed & {*path.relative_to(root).parts}]
    source = b"".join(path.read_bytes() for path in files)
    if not source:
        raise UsageError(f"There is no source of the standard library in {root}: run this with a Python that has it.")
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)


def batch_of(source: Tensor, size: Size) -> Tensor:
    """Return random pieces of `source`, each a byte longer than the context: (batch, context + 1)."""
    starts = torch.randint(len(source) - size.context, (size.batch,)).tolist()
    return torch.stack([source[start : start + size.context + 1] for start in starts]).long()
