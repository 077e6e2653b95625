"""The models of the measured plans: GPT, Llama, a mixture of experts, a vision transformer, a ResNet and a U-Net."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _architectures_models import UNet
from _training import Size, Subject
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from byte_gpt import GPT, Settings as ModelSettings

_WORDS = 512


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
        vocab_size=_WORDS,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    return _decoder("llama", f"Llama: {size.layers} blocks of width {size.dim}", size, lambda: LlamaForCausalLM(config))


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


def mixture(size: Size, experts: str = "eager") -> Subject:
    """Hugging Face's Mixtral: each token goes through two of eight experts.

    Args:
        experts: "eager", one by one, so that sizes depend on the data; or "grouped_mm", which compiles to one graph.
    """
    from transformers import MixtralConfig, MixtralForCausalLM  # an optional package

    config = MixtralConfig(
        hidden_size=size.dim,
        intermediate_size=size.dim * 2,
        num_hidden_layers=size.layers,
        num_attention_heads=max(2, size.dim // 32),
        num_key_value_heads=max(1, size.dim // 64),
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=_WORDS,
        max_position_embeddings=size.length,
        experts_implementation=experts,
        use_cache=False,
    )
    how = "" if experts == "eager" else f" ({experts})"
    what = f"Mixtral: {size.layers} blocks of width {size.dim} with 8 experts{how}"
    return _decoder("moe", what, size, lambda: MixtralForCausalLM(config))


def _decoder(name: str, what: str, size: Size, make: Callable[[], nn.Module]) -> Subject:
    """Return one of Hugging Face's models that predict the next token."""
    tokens = torch.randint(_WORDS, (size.batch, size.length))
    title = f"Hugging Face's {what}, {size.batch} x {size.length} tokens, a vocabulary of {_WORDS}"
    return Subject(
        *(name, title, make(), (), {"input_ids": tokens, "labels": tokens}),
        loss=lambda output: output.loss,
        blocks=_numbered("model.layers", size.layers),
    )


def vision_transformer(size: Size) -> Subject:
    """Hugging Face's ViT, on patches of 8 x 8."""
    from transformers import ViTConfig, ViTForImageClassification  # an optional package

    config = ViTConfig(
        hidden_size=size.dim,
        intermediate_size=4 * size.dim,
        num_hidden_layers=size.layers,
        num_attention_heads=max(2, size.dim // 32),
        image_size=size.length,
        patch_size=8,
        num_labels=100,
    )
    images, labels = torch.randn(size.batch, 3, size.length, size.length), torch.randint(100, (size.batch,))
    title = (
        f"Hugging Face's ViT: {size.layers} blocks of width {size.dim}, {size.batch} images of {size.length} x "
        f"{size.length} in patches of 8 x 8"
    )
    return Subject(
        *("vit", title, ViTForImageClassification(config), (images,), {}),
        loss=lambda output: F.cross_entropy(output.logits, labels),
        blocks=_numbered("vit.layers", size.layers),
    )


def u_net(size: Size) -> Subject:
    """Convolutions twice as wide and half as high from stage to stage, and back; each stage sees its twin's features."""
    depth = size.layers // 2
    widths = [size.dim * 2**index for index in range(depth + 1)]
    model = UNet(widths)
    images = torch.randn(size.batch, 3, size.length, size.length)
    classes = torch.randint(4, (size.batch, size.length, size.length))
    title = (
        f"A U-Net with BatchNorm: {depth} stages down and {depth} up of {widths[0]} to {widths[-1]} channels, "
        f"{size.batch} images of {size.length} x {size.length}"
    )
    return Subject(
        *("unet", title, model, (images,), {}),
        loss=lambda logits: F.cross_entropy(logits, classes),
        blocks=(*_numbered("down", depth), "middle", *_numbered("up", depth)),
    )


def _numbered(path: str, count: int) -> tuple[str, ...]:
    return tuple(f"{path}.{index}" for index in range(count))


MODELS: dict[str, Callable[[Size], Subject]] = {
    "gpt": byte_gpt,
    "llama": llama,
    "moe": mixture,
    "vit": vision_transformer,
    "resnet": resnet,
    "unet": u_net,
}
FROM_TRANSFORMERS = ("llama", "moe", "vit")
BY_BLOCK: dict[str, Callable[[Size], Subject]] = {
    "gpt": byte_gpt,
    "llama": llama,
    "moe": partial(mixture, experts="grouped_mm"),
}
"""Those each of whose blocks compiles to one graph."""

SIZES = {
    "gpt": Size(8, 192, 4, 256),
    "llama": Size(8, 192, 4, 256),
    "moe": Size(6, 128, 4, 128),
    "vit": Size(8, 192, 8, 96),
    "resnet": Size(9, 32, 24, 48),
    "unet": Size(7, 16, 4, 96),
}
"""A step takes about half a second on one core."""

SIZES_BY_BLOCK = {"gpt": Size(6, 128, 4, 128), "llama": Size(6, 128, 4, 128), "moe": Size(4, 128, 4, 64)}
"""A step takes about a tenth of a second on one core: what takes time is to compile."""

ON_ACCELERATORS = {
    "gpt": Size(16, 1024, 8, 1024),
    "llama": Size(16, 1024, 8, 1024),
    "moe": Size(12, 512, 8, 512),
    "vit": Size(16, 1024, 64, 128),
    "resnet": Size(16, 64, 64, 128),
    "unet": Size(9, 64, 32, 256),
}
SMALL = {
    "gpt": Size(4, 32, 2, 16),
    "llama": Size(4, 64, 2, 16),
    "moe": Size(4, 64, 2, 16),
    "vit": Size(4, 64, 2, 16),
    "resnet": Size(4, 8, 2, 16),
    "unet": Size(5, 8, 2, 16),
}
"""Of these the solver's choice is compared with every choice that there is."""


def make_subject(name: str, size: Size, device: torch.device, *, by_block: bool = False) -> Subject:
    """One of `MODELS`, or of `BY_BLOCK`, with the same numbers every time, in training, with gradients allocated."""
    torch.manual_seed(0)
    with device:
        subject = (BY_BLOCK if by_block else MODELS)[name](size)
    subject.model.train()
    for parameter in subject.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return subject
