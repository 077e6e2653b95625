"""Models in training, a byte-level GPT, a Llama, a ResNet with BatchNorm, and the ways that torch has to checkpoint them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _ways import PLAIN, SAC, TORCH, non_reentrant, repeatable, selective
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)
from torch.profiler import record_function

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from _runs import watched
from byte_gpt import GPT, Settings as ModelSettings

NONE, FULL, SECOND, THIRD, FOURTH = "none", "full", "every 2nd block", "every 3rd block", "every 4th block"
EVERY = {FULL: 1, SECOND: 2, THIRD: 3, FOURTH: 4}
"""{mode: of so many blocks in a row the first is checkpointed}."""

SAVED_OPS = "op list saved"
aten = torch.ops.aten
# What `policies.compute_intensive()` is on these models to SAC, which sees the ops below autograd.
ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
OP_LIST = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default]
OP_LIST += [getattr(aten, f"_scaled_dot_product_{kind}").default for kind in ATTENTION]

Call = Callable[..., Any]
Forward = Callable[[], Tensor]
"""A forward pass, to a tensor from which a backward pass begins."""

Blocks = Callable[[Any], Iterable[nn.Module]]
"""model -> its blocks."""


# -- ways -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        make: from a copy of the model, which it may change, to what is called in its place.
        first: runs the first step, in which what has to be compiled is compiled.
        is_compiled: whether it is.
    """

    system: str
    mode: str
    make: Callable[[Any], Call]
    first: Callable[[Callable[[], object]], object] = lambda step: step()
    is_compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.system}: {self.mode}"


def torch_ways(blocks_of: Blocks, every: Mapping[str, int]) -> list[Way]:
    """The plain step, torch's checkpoint of every k-th block, and its selective checkpoint of each block."""
    return [
        Way(PLAIN, NONE, lambda model: model),
        *(Way(TORCH, mode, partial(wrapped, blocks_of, k, non_reentrant)) for mode, k in every.items()),
        Way(SAC, SAVED_OPS, partial(wrapped, blocks_of, 1, partial(selective, OP_LIST))),
    ]


def wrapped(blocks_of: Blocks, k: int, wrap: Callable[[Call], Call], model: nn.Module) -> nn.Module:
    """Every k-th block, from the first, in place: those that `policies.recompute_every(k)` takes."""
    for block in [*blocks_of(model)][::k]:
        block.forward = wrap(block.forward)  # type: ignore[method-assign]
    return model


def left_by(model: nn.Module, step: Callable[[], Tensor]) -> dict[str, list[Tensor]]:
    """Return what one step leaves, from gradients of zero on."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=False)
    with repeatable(next(model.parameters()).device):
        loss = step()
    return {
        "loss": [loss],
        "gradients": [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "random numbers": [torch.rand(4, device=loss.device)],
    }


# -- memory -----------------------------------------------------------------------------------------------------------


def allocated_bytes(forward: Forward, device: torch.device) -> tuple[int, int]:
    """Return what torch has allocated after the forward pass, and at the peak of the step, over what there was before it.

    Whatever holds it: also the result of the forward pass, and states of random number generators.
    """
    forward().sum().backward()  # what is made once is made now
    if device.type == "cpu":
        timeline = watched(partial(_step, forward))
        return timeline.kept_bytes, timeline.peak_bytes
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    output = forward()
    after = torch.accelerator.memory_allocated(device)
    output.sum().backward()
    torch.accelerator.synchronize(device)
    return after - before, torch.accelerator.max_memory_allocated(device) - before


def _step(forward: Forward) -> None:
    with record_function("forward"):
        output = forward()
    output.sum().backward()


# -- models -----------------------------------------------------------------------------------------------------------


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
