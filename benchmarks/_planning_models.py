"""Models to be planned: in the shapes of large ones, without memory; and small ones, whose steps run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder.

    Attributes:
        layers, dim, heads, vocabulary: of the decoder.
        wide: of the products of a block's MLP.
        key_heads: heads of keys and values.
        experts: of each block but the first three; 0 for a dense MLP.
        expert_wide: of the products of an expert.
        chosen: experts for each token.
        latent: of the keys and values that are kept of a token; 0 for attention without.
    """

    layers: int
    dim: int
    heads: int
    key_heads: int
    wide: int
    vocabulary: int
    experts: int = 0
    expert_wide: int = 0
    chosen: int = 0
    latent: int = 0


SHAPES = {
    "llama-8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "llama-70b": Shape(80, 8192, 64, 8, 28672, 128256),
    "deepseek-v3": Shape(61, 7168, 128, 128, 18432, 129280, experts=256, expert_wide=2048, chosen=8, latent=512),
}
_DENSE = 3  # blocks of a model with experts that have none
_HEAD = 128


class Attention(nn.Module):
    """Attention, with keys and values of fewer heads or from a latent vector."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads = shape.heads, shape.key_heads
        self.q_proj = nn.Linear(shape.dim, shape.heads * _HEAD, bias=False)
        self.down = nn.Linear(shape.dim, shape.latent, bias=False) if shape.latent else nn.Identity()
        self.kv_proj = nn.Linear(shape.latent or shape.dim, 2 * shape.key_heads * _HEAD, bias=False)
        self.o_proj = nn.Linear(shape.heads * _HEAD, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, _HEAD)).transpose(1, 2)
        k, v = self.kv_proj(self.down(x)).unflatten(-1, (2 * self.key_heads, _HEAD)).transpose(1, 2).chunk(2, 1)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, dim: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, wide, bias=False), nn.Linear(dim, wide, bias=False)
        self.down = nn.Linear(wide, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Experts with room for an equal number of tokens each, so that no size depends on values, and a shared one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.chosen, self.shared = shape.chosen, MLP(shape.dim, shape.expert_wide)
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        self.up = nn.Parameter(torch.empty(shape.experts, shape.dim, 2 * shape.expert_wide))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.expert_wide, shape.dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        room = self.chosen * len(tokens) // len(self.up)
        weights, taken = self.router(tokens).sigmoid().topk(room, 0)
        gate, up = torch.bmm(tokens[taken.T.flatten()].unflatten(0, (len(self.up), room)), self.up).chunk(2, -1)
        out = torch.bmm(functional.silu(gate) * up, self.down) * weights.T.unsqueeze(-1)
        found = torch.zeros_like(tokens).index_add(0, taken.T.flatten(), out.flatten(0, 1))
        return self.shared(x) + found.view_as(x)


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.mlp = Experts(shape) if shape.experts and number >= _DENSE else MLP(shape.dim, shape.wide)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x), cos, sin)
        return x + self.mlp(self.second_norm(x))


class Decoder(nn.Module):
    """A decoder that returns the loss of its tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList(Block(shape, number) for number in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.dim), nn.Linear(shape.dim, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]), 1e4 ** -(torch.arange(_HEAD) % (_HEAD // 2) / (_HEAD // 2)))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class PackedLSTM(nn.Module):
    """Recurrent layers over sequences of unlike lengths, packed: small ops, and as many as there are tokens."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(layers))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed = layer(packed)[0]
        return pad_packed_sequence(packed, batch_first=True)[0]
