"""The models whose frontiers are drawn: a byte-level GPT, a Llama, a ResNet with BatchNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _selective_examples import GPT, ModelSettings
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)


@dataclass(frozen=True)
class Size:
    """The size of a model and its batch.

    Attributes:
        layers: blocks.
        dim: their width; of a ResNet the channels of its first stage.
        batch: sequences, or images.
        length: tokens of a sequence, or pixels of a side.
    """

    layers: int
    dim: int
    batch: int
    length: int


@dataclass(frozen=True)
class Subject:
    """A model in training.

    Attributes:
        title: what it is, for a reader.
        args, kwargs: of its call.
        loss: from what it returns to a scalar.
        blocks: the paths of what others checkpoint.
    """

    name: str
    title: str
    model: nn.Module
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]
    blocks: tuple[str, ...]

    def copied(self) -> nn.Module:
        """The model again: modules and buffers of its own, the same parameters and gradients."""
        shared = {id(parameter): parameter for parameter in self.model.parameters()}
        return copy.deepcopy(self.model, shared)  # type: ignore[arg-type]

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a copy."""
        return [model.get_submodule(path) for path in self.blocks]

    def step_of(self, model: Callable[..., Any]) -> Callable[[], Tensor]:
        """A forward and a backward pass of a copy; what it returns stays alive in between, as in most training loops."""

        def step() -> Tensor:
            output = model(*self.args, **self.kwargs)
            loss = self.loss(output)
            loss.backward()
            return loss.detach()

        return step


def byte_gpt(size: Size) -> Subject:
    """The model of `examples/byte_gpt.py` without dropout, so that compiled and eager steps are the same."""
    sizes = ModelSettings(
        layers=size.layers, dim=size.dim, heads=max(1, size.dim // 32), context=size.length, dropout=0.0
    )
    model = GPT(sizes)
    tokens = torch.randint(256, (size.batch, size.length + 1))
    targets = tokens[:, 1:].flatten()
    title = f"A byte-level GPT: {size.layers} blocks of width {size.dim}, {size.batch} x {size.length} tokens"
    return Subject(
        *("gpt", title, model, (tokens[:, :-1].contiguous(),), {}),
        loss=lambda logits: F.cross_entropy(logits.flatten(0, 1), targets),
        blocks=_numbered("blocks", size.layers),
    )


def llama(size: Size) -> Subject:
    """Hugging Face's Llama, with grouped keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM  # an optional package

    heads = max(2, size.dim // 32)
    config = LlamaConfig(
        hidden_size=size.dim,
        intermediate_size=size.dim * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=512,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    tokens = torch.randint(512, (size.batch, size.length))
    title = (
        f"Hugging Face's Llama: {size.layers} blocks of width {size.dim}, {size.batch} x {size.length} tokens, "
        "a vocabulary of 512"
    )
    return Subject(
        *("llama", title, LlamaForCausalLM(config), (), {"input_ids": tokens, "labels": tokens}),
        loss=lambda output: output.loss,
        blocks=_numbered("model.layers", size.layers),
    )


def resnet(size: Size) -> Subject:
    """Residual blocks with BatchNorm, twice as wide and half as high from stage to stage."""
    widths = [size.dim * 2 ** (index * 3 // size.layers) for index in range(size.layers)]
    stages = [_Residual(before, after) for before, after in zip([size.dim, *widths], widths)]
    model = _ResNet(size.dim, stages, widths[-1])
    images = torch.randn(size.batch, 3, size.length, size.length)
    labels = torch.randint(100, (size.batch,))
    title = (
        f"A ResNet with BatchNorm: {size.layers} residual blocks of {widths[0]} to {widths[-1]} channels, {size.batch} "
        f"images of {size.length} x {size.length}"
    )
    return Subject(
        *("resnet", title, model, (images,), {}),
        loss=lambda logits: F.cross_entropy(logits, labels),
        blocks=_numbered("stages", size.layers),
    )


class _ResNet(nn.Module):
    def __init__(self, first: int, stages: list[_Residual], last: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(last, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x), inplace=True)


def _numbered(path: str, count: int) -> tuple[str, ...]:
    return tuple(f"{path}.{index}" for index in range(count))


MODELS: dict[str, Callable[[Size], Subject]] = {"gpt": byte_gpt, "llama": llama, "resnet": resnet}

SIZES = {"gpt": Size(8, 192, 4, 256), "llama": Size(8, 192, 4, 256), "resnet": Size(9, 32, 24, 48)}
"""A step takes about half a second on one core."""

ON_ACCELERATORS = {"gpt": Size(16, 1024, 8, 1024), "llama": Size(16, 1024, 8, 1024), "resnet": Size(16, 64, 64, 128)}
SMALL = {"gpt": Size(4, 32, 2, 16), "llama": Size(4, 64, 2, 16), "resnet": Size(4, 8, 2, 16)}
"""Of these the solver's choice is compared with every choice that there is."""


def make_subject(name: str, size: Size, device: torch.device) -> Subject:
    """One of `MODELS`, with the same numbers every time, in training, with gradients allocated."""
    torch.manual_seed(0)
    with device:
        subject = MODELS[name](size)
    subject.model.train()
    for parameter in subject.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return subject
