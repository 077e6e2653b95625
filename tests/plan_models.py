"""Small models of every kind that people train, each with arguments and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from memory import allocated_by
from torch import Tensor, nn
from torch.nn import functional as F

import reactivate
from reactivate.planner.plan import Plan

DIM = 32


@dataclass
class Case:
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None

    def step(self) -> None:
        output = self.model(*self.args, **self.kwargs)
        (self.loss(output) if self.loss else output.loss).backward()


def peak_with(case: Case, plan: Plan) -> int:
    """Return what a step with a plan allocates at most, above what is there before."""
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with reactivate.apply(case.model, plan):
        case.step()
        found = allocated_by(case.step).peak_bytes
    case.model.zero_grad()
    return found


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, wide: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, wide * dim), nn.GELU(), nn.Linear(wide * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Experts(nn.Module):
    """Each token goes to two of four experts: their loads are known once the router has run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, columns = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, columns, None])
        return out.view_as(x)


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attn, self.experts, self.dropout = Attention(DIM), Experts(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norms[0](x))
        return x + self.dropout(self.experts(self.norms[1](x)))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixtureBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class GPT(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 6, tokens: int = 64, wide: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, dim)
        self.blocks = nn.ModuleList(Block(dim, wide[index] if wide else 4) for index in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(**options: Any) -> Case:
    tokens = torch.randint(64, (4, 64))
    return Case(GPT(**options), (tokens,), loss=lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))


class InForward(nn.Module):
    """A large value on the way that nothing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            large = x.repeat(1, 1, 200).sum(-1, keepdim=True)
        return self.last(x) + large


class Positions(nn.Module):
    """A model whose table of positions ends at 20."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.blocks = nn.Embedding(20, 32), nn.ModuleList(Block(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    tokens = torch.randint(64, (4, 48))
    return Case(LlamaForCausalLM(config), kwargs={"input_ids": tokens, "labels": tokens})


class Residual(nn.Module):
    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(made)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(made)
        self.short = (
            nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))
            if given != made
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.short(x))


def resnet() -> Case:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(Residual(8, 8), Residual(8, 8), Residual(8, 16, 2), Residual(16, 16), Residual(16, 32, 2)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    labels = torch.randint(10, (4,))
    return Case(model, (torch.randn(4, 3, 32, 32),), loss=lambda logits: F.cross_entropy(logits, labels))


class Twice(nn.Sequential):
    def __init__(self, given: int, made: int) -> None:
        super().__init__(
            nn.Conv2d(given, made, 3, 1, 1), nn.GroupNorm(2, made), nn.SiLU(), nn.Conv2d(made, made, 3, 1, 1), nn.SiLU()
        )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = Twice(3, 8), Twice(8, 16), Twice(16, 32)
        self.up2, self.up1 = Twice(48, 16), Twice(24, 8)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.middle(F.max_pool2d(two, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), two], 1))
        return self.last(self.up1(torch.cat([F.interpolate(x, scale_factor=2), one], 1)))


def unet() -> Case:
    image = torch.randn(4, 3, 32, 32)
    return Case(UNet(), (image,), loss=lambda made: F.mse_loss(made, image))


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        vocab_size=64,
        decoder_start_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(64, (4, 32))
    return Case(T5ForConditionalGeneration(config), kwargs={"input_ids": tokens, "labels": tokens})


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=4,
        num_labels=10,
    )
    return Case(
        ViTForImageClassification(config),
        kwargs={"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(10, (4,))},
    )


MODELS: dict[str, Callable[[], Case]] = {
    "gpt": gpt,
    "llama": llama,
    "resnet": resnet,
    "unet": unet,
    "t5": t5,
    "vit": vit,
}


# -- batches of GPT ----------------------------------------------------------------------------------------------------


def tokens(*shape: int) -> Tensor:
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(sum(shape)))


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.long))
