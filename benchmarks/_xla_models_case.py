"""Models of transformers on XLA, with their gradient checkpointing: what three steps compute, and one step for a TPU.

Run as a script it reads a request from the command line and writes a line of JSON (see `compared` and `traced`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from _tpu_case import Case, measured, written
from _xla_case import KEEPS_BARRIERS, NONE, OURS, TORCH, Program, answer_of, read_program, versions
from torch import Tensor, nn

import reactivate
from reactivate._passes.observing import observed_by

WAYS = (NONE, TORCH, OURS)
LONGEST_SECONDS = 1800
STEPS, LEARNING_RATE, DROPOUT, CLASSES, PATCH = 3, 1e-3, 0.1, 10, 16


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batch.

    Attributes:
        layers: how many are checkpointed; of a convolutional network in each of its two stages.
        width: features between the layers.
        batch: sequences, or images.
        length: tokens of a sequence, or pixels of a side.
    """

    layers: int
    width: int
    batch: int
    length: int


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        title: for people.
        make: size -> the model.
        give: size -> its keyword arguments, labels with them.
        layer: the class whose calls are checkpointed, if the model has no gradient checkpointing of its own.
        small, large: for three steps on a CPU, and for a compiler of TPUs.
    """

    title: str
    make: Callable[[Size], nn.Module]
    give: Callable[[Size], dict[str, Tensor]]
    small: Size
    large: Size
    layer: str | None = None


def _hub(name: str, **config: Any) -> nn.Module:
    import transformers  # an optional package

    family = name.partition("For")[0].removesuffix("LMHeadModel")
    model: nn.Module = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**config))
    return model


def _llama(size: Size) -> nn.Module:
    sizes = {"hidden_size": size.width, "intermediate_size": 4 * size.width, "num_hidden_layers": size.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": DROPOUT}
    return _hub("LlamaForCausalLM", **_of_text(size), **sizes, **heads, max_position_embeddings=size.length)


def _gpt2(size: Size) -> nn.Module:
    sizes = {"n_embd": size.width, "n_layer": size.layers, "n_head": 4, "n_positions": size.length}
    return _hub("GPT2LMHeadModel", **_of_text(size), **sizes)


def _of_text(size: Size) -> dict[str, Any]:
    tokens = {"vocab_size": size.width, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return {**tokens, "attn_implementation": "eager", "use_cache": False}


def _vit(size: Size) -> nn.Module:
    sizes = {"hidden_size": size.width, "intermediate_size": 4 * size.width, "num_hidden_layers": size.layers}
    heads = {"num_attention_heads": 4, "attention_probs_dropout_prob": DROPOUT, "hidden_dropout_prob": DROPOUT}
    image = {"image_size": size.length, "patch_size": PATCH, "num_labels": CLASSES, "attn_implementation": "eager"}
    return _hub("ViTForImageClassification", **sizes, **heads, **image)


def _convnext(size: Size) -> nn.Module:
    stages = {"num_stages": 2, "hidden_sizes": [size.width, 2 * size.width], "depths": [size.layers] * 2}
    return _hub("ConvNextForImageClassification", **stages, drop_path_rate=DROPOUT, num_labels=CLASSES)


def _tokens(size: Size) -> dict[str, Tensor]:
    tokens = torch.randint(size.width, (size.batch, size.length))
    return {"input_ids": tokens, "labels": tokens}


def _images(size: Size) -> dict[str, Tensor]:
    images = torch.randn(size.batch, 3, size.length, size.length)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (size.batch,))}


TEXT, IMAGES = Size(2, 32, 2, 8), Size(2, 16, 2, 32)
KINDS = {
    "llama": Kind("Llama", _llama, _tokens, TEXT, Size(2, 256, 8, 512)),
    "gpt2": Kind("GPT-2", _gpt2, _tokens, TEXT, Size(2, 256, 8, 512)),
    "vit": Kind("ViT", _vit, _images, IMAGES, Size(2, 256, 32, 256)),
    "convnext": Kind("ConvNeXt", _convnext, _images, IMAGES, Size(2, 64, 16, 256), layer="ConvNextLayer"),
}


# -- a model in a way -------------------------------------------------------------------------------------------------


def made(kind: Kind, size: Size, way: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model on XLA, its layers checkpointed unless the way is none, and its keyword arguments."""
    torch.manual_seed(0)
    model, batch = kind.make(size), kind.give(size)
    if way != NONE:
        reactivate.dropin.xla.context_fn()  # registers the `torch.xla` that torch's function asks for
        if kind.layer is None:
            name = "activation_checkpointing_enable"  # since transformers 5.23
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})  # type: ignore[operator]
        else:
            _checkpoint_layers(model, kind.layer)
    return model.to("xla").train(), {name: tensor.to("xla") for name, tensor in batch.items()}


def _checkpoint_layers(model: nn.Module, name: str) -> None:
    """Checkpoint the calls of layers of this class, as `activation_checkpointing_enable` does."""
    for layer in [module for module in model.modules() if type(module).__name__ == name]:
        layer.forward = partial(_checkpointed, layer.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False)


def installed(way: str) -> Any:
    """Return the context in which a way runs."""
    return reactivate.dropin.install() if way == OURS else nullcontext()


# -- bits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Steps with regions, against the same steps without.

    Attributes:
        recomputations: how many regions were recomputed.
        compared: how many tensors: losses, the last gradients and the parameters afterwards.
        equal: how many of them are, bit for bit.
        largest: the largest difference of an element of a loss, of a gradient and of a parameter.
        is_same_seed: whether the random numbers afterwards begin from the same seed.
    """

    model: str
    is_op_by_op: bool
    recomputations: int
    compared: int
    equal: int
    largest: tuple[float, ...]
    is_same_seed: bool


@dataclass
class Trained:
    """Results of steps: {kind: tensors}, the seed afterwards, and how many regions were recomputed."""

    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    seed: int = 0
    recomputations: int = 0

    def forward_done(self, record: Any) -> None:
        """Take no notice."""

    def recomputation_done(self, record: Any) -> None:
        """Count a recomputation."""
        self.recomputations += 1


def trained(kind: Kind, size: Size, way: str) -> Trained:
    """Train for some steps with AdamW."""
    import torch_xla  # an optional package

    losses, ran = [], Trained()
    with installed(way), observed_by(ran):
        model, batch = made(kind, size, way)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        torch_xla.manual_seed(5)
        torch_xla.sync()
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            torch_xla.sync()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = {"losses": losses, "gradients": gradients, "parameters": [*model.parameters()]}
    ran.tensors = {name: [tensor.detach().cpu() for tensor in tensors] for name, tensors in found.items()}
    ran.seed = torch_xla._XLAC._xla_get_rng_seed("")
    return ran


def compared(model: str, size: Size, is_op_by_op: bool) -> Found:
    """Compare the steps with the drop-in installed with those without checkpointing."""
    from torch_xla.experimental import eager_mode  # an optional package

    eager_mode(is_op_by_op)
    try:
        plain, ours = trained(KINDS[model], size, NONE), trained(KINDS[model], size, OURS)
    finally:
        eager_mode(False)
    pairs = [[*zip(plain.tensors[name], ours.tensors[name], strict=True)] for name in plain.tensors]
    far = tuple(max((one - two).abs().max().item() for one, two in group) for group in pairs)
    equal = sum(torch.equal(one, two) for group in pairs for one, two in group)
    count = sum(map(len, pairs))
    return Found(model, is_op_by_op, ours.recomputations, count, equal, far, plain.seed == ours.seed)


def compared_elsewhere(model: str) -> tuple[list[Found], dict[str, str]]:
    """Compare in a process of its own, op by op and compiled; with the versions that it ran on.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    said = answer_of(__file__, {"model": model}, KEEPS_BARRIERS, LONGEST_SECONDS)
    return [Found(**{**found, "largest": tuple(found["largest"])}) for found in said["found"]], said["versions"]


# -- a program for a TPU ----------------------------------------------------------------------------------------------


def traced_step(model: str, way: str, size: Size) -> list[Tensor]:
    """Trace forward and backward of a step, and return what it computes: the loss and the gradients."""
    import torch_xla  # an optional package

    with installed(way):  # transformers binds the function when checkpointing is enabled
        subject, batch = made(KINDS[model], size, way)
        torch_xla.sync()
        loss = subject(**batch).loss
        loss.backward()
    return [loss.detach(), *(item.grad for item in subject.parameters() if item.grad is not None)]


def products(text: str) -> Program:
    """Read a traced program, its convolutions counted with the matrix products: so does the compiler of TPUs."""
    found = read_program(text)
    return replace(found, dots=found.dots + text.count(" convolution("))


def compiled(model: str, way: str, size: Size, topologies: list[str]) -> Iterator[tuple[Case, dict[str, str]]]:
    """Trace a step in a process of its own, and compile it for each topology; with the versions."""
    return measured(model, way, topologies, __file__, size=asdict(size))


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request: a program in a file, or the differences of a model."""
    if "path" in request:
        outputs = traced_step(request["model"], request["way"], Size(**request["size"]))
        said = written(outputs, Path(request["path"]), products)
        return {**said, "versions": _versions()}
    size = KINDS[request["model"]].small
    found = [asdict(compared(request["model"], size, is_op_by_op)) for is_op_by_op in (True, False)]
    return {"found": found, "versions": _versions()}


def _versions() -> dict[str, str]:
    return {**versions(), "transformers": version("transformers")}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
