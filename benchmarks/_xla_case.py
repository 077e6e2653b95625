"""One step of one model in one way on XLA, in a process of its own: XLA reads its flags once.

Run as a script it reads a request from the command line and writes a line of JSON. `measured` runs it so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs

import reactivate
from reactivate.dropin.xla import context_fn
from reactivate.policies import every_nth, save_ops

KEEPS_BARRIERS = "--xla_disable_hlo_passes=cse_barrier_expander"
"""Otherwise the pipeline of XLA:CPU drops barriers before it schedules, those of JAX's remat as well."""

LONGEST_SECONDS, HEADS = 300, 4


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        blocks: how many there are.
        width: features between the blocks; inside of one there are four times as many.
        rows: how many rows of features go in: the batch, or batch and length.
    """

    blocks: int
    width: int
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.blocks} blocks of width {self.width}, {' x '.join(map(str, self.rows))} rows"


class Mlp(nn.Sequential):
    """Linear, ReLU, Linear."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class OpenEnded(Mlp):
    """Ends in ops that save nothing: nothing of the region waits for the gradient of what it returns."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return (input + super().forward(input) + 1.0).view(len(input), -1)


class Transformer(nn.Module):
    """LayerNorm, attention, LayerNorm, MLP, written out in products and softmax."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = Mlp(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.out(self.attention(self.norms[0](x))))
        return x + self.drop(self.mlp(self.norms[1](x)))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5, -1)
        return (self.drop(weights) @ v).transpose(1, 2).reshape(x.shape)


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        block: width -> a block.
        products: matrix products in a block's forward pass; its backward has twice as many.
        recomputed: how many of them a recomputation needs: not the last, of which no backward reads the result.
        target: what the temp may be at most, as a part of that without checkpointing.
    """

    name: str
    title: str
    block: Callable[[int], nn.Module]
    size: Size
    products: int
    recomputed: int
    target: float

    def make(self, size: Size) -> tuple[nn.Sequential, Tensor]:
        """The model and its input, the same ones every time."""
        torch.manual_seed(0)
        blocks = nn.Sequential(*(self.block(size.width) for _ in range(size.blocks)))
        return blocks, torch.randn(*size.rows, size.width)


_MLP, _ROWS, _TRANSFORMER = Size(6, 768, (2048,)), Size(6, 512, (4096,)), Size(6, 256, (16, 128))
MODELS = {
    model.name: model
    for model in (
        Model("mlp", "An MLP", Mlp, _MLP, 2, 1, 0.35),
        Model("rows", "An MLP whose activations are larger than its weights", Mlp, _ROWS, 2, 1, 0.35),
        Model("open", "An MLP whose regions end in ops that save nothing", OpenEnded, _MLP, 2, 1, 0.5),
        Model("dropout", "A transformer, dropout 0.1", lambda n: Transformer(n, 0.1), _TRANSFORMER, 6, 5, 0.4),
        Model("transformer", "A transformer, dropout 0", lambda n: Transformer(n, 0.0), _TRANSFORMER, 6, 5, 0.4),
    )
}

Way = Callable[[nn.Module], Callable[[Tensor], Tensor]]

NONE, TORCH, CONTEXT, TORCH_XLA, OURS = "none", "torch", "torch, context_fn", "torch_xla", "reactivate"
ALTERNATE, LINEARS = "every 2nd linear saved", "every linear saved"


def torchs_own(block: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    context_fn()  # the first call registers the `torch.xla` that torch's function asks for
    return lambda x: torchs(block, x, use_reentrant=False, **options)


def torch_xlas_own(block: nn.Module) -> Callable[[Tensor], Tensor]:
    from torch_xla.utils.checkpoint import checkpoint

    return lambda x: checkpoint(block.forward, x)  # a bound method: only of one it finds the parameters


WAYS: dict[str, Way] = {
    NONE: lambda block: block,
    TORCH: torchs_own,
    CONTEXT: lambda block: torchs_own(block, context_fn=context_fn),
    TORCH_XLA: torch_xlas_own,
    OURS: reactivate.checkpoint,
    ALTERNATE: lambda block: reactivate.checkpoint(block, policy=every_nth(2, save_ops("linear"))),
    LINEARS: lambda block: reactivate.checkpoint(block, policy=save_ops("linear")),
}


_PRODUCT = re.compile(r' dot\(|custom_call_target="[^"]*(?:matmul|gemm|dot)[^"]*"', re.IGNORECASE)
_DRAW = re.compile(r" = u(?:32|64)\[[^ ]* iota\(")
"""XLA:CPU writes a generator of random numbers out as a hash of a count: one `iota` of unsigned numbers each."""


@dataclass(frozen=True)
class Program:
    """A program before XLA optimises it.

    Attributes:
        barriers: optimisation barriers.
        dots: matrix products.
        draws: generators of random numbers.
    """

    barriers: int
    dots: int
    draws: int


@dataclass(frozen=True)
class Compiled:
    """A program as XLA has compiled it.

    Attributes:
        dots: matrix products.
        draws: generators of random numbers.
        outputs: of the program: what the device keeps of it.
        temp_bytes: preallocated for what is neither input nor output.
        total_bytes: of all buffers: inputs and outputs as well.
    """

    dots: int
    draws: int
    outputs: int
    temp_bytes: int
    total_bytes: int


def read_program(text: str) -> Program:
    """Of the text of a program that torch_xla has traced."""
    return Program(text.count(" opt-barrier("), len(_PRODUCT.findall(text)), text.count(" rng-bit-generator("))


def read_dump(directory: Path) -> Compiled:
    """Of what `--xla_dump_to` wrote.

    Raises:
        RuntimeError: there is not exactly one program: a step was compiled in parts, or twice.
    """
    found = [*directory.glob("*after_optimizations.txt")]
    if len(found) != 1:
        raise RuntimeError(f"Expected the dump of one program in {directory}, found {len(found)}: {found}.")
    text = found[0].read_text(encoding="utf-8")
    buffers = found[0].with_name(found[0].stem + "-buffer-assignment.txt").read_text(encoding="utf-8")
    return Compiled(
        len(_PRODUCT.findall(text)),
        len(_DRAW.findall(text)),
        _found(r"^ +ROOT .* tuple\((.*)\)", text[text.index("\nENTRY ") :]).count("%"),
        sum(map(int, re.findall(r"^allocation \d+: size (\d+), preallocated-temp", buffers, re.MULTILINE))),
        int(_found(r"^Total bytes used: (\d+)", buffers)),
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"The dump has nothing like {pattern!r}: this version of XLA writes something else.")
    return match[1]


@dataclass(frozen=True)
class Case:
    """The findings on a model in a way.

    Attributes:
        keeps_barriers: whether XLA was told to keep barriers until after it has scheduled.
        seconds: on the wall, for tracing, compiling and one step.
    """

    model: str
    way: str
    keeps_barriers: bool
    traced: Program
    compiled: Compiled
    seconds: float


def measured(model: str, way: str, size: Size, keeps_barriers: bool = True) -> tuple[Case, dict[str, str]]:
    """Run the case, and read what XLA dumps; with the versions that it ran on.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    with TemporaryDirectory(prefix="xla-dump-") as directory:
        flags = f"--xla_dump_to={directory} --xla_dump_hlo_as_text" + f" {KEEPS_BARRIERS}" * keeps_barriers
        said = answer_of(__file__, {"model": model, "way": way, "size": asdict(size)}, flags)
        compiled = read_dump(Path(directory))
    case = Case(model, way, keeps_barriers, Program(**said["traced"]), compiled, said["seconds"])
    return case, said["versions"]


def answer_of(script: str, request: dict[str, Any], flags: str, seconds: float = LONGEST_SECONDS) -> Any:
    """Run a script, which writes a line of JSON, in a process of its own on XLA's CPU device.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, json.dumps(request)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{', '.join(filter(None, [request['model'], request.get('way')]))}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def traced_step(model: str, way: str, size: Size) -> list[Tensor]:
    """Trace a step, forward, loss and backward, and return what it computes: the loss and the gradients."""
    import torch_xla  # an optional package

    blocks, x = MODELS[model].make(size)
    blocks, x = blocks.to("xla"), x.to("xla").requires_grad_()
    torch_xla.sync()
    y = x
    for block in blocks:
        y = WAYS[way](block)(y)
    loss = y.square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in blocks.parameters())]  # type: ignore[list-item]


def versions() -> dict[str, str]:
    """Return those of torch and of torch_xla."""
    import torch_xla  # an optional package

    return {"torch": torch.__version__, "torch_xla": torch_xla.__version__}


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Trace, compile and run the step."""
    import torch_xla  # an optional package

    begin = perf_counter()
    outputs = traced_step(request["model"], request["way"], Size(**request["size"]))
    text = torch_xla._XLAC._get_xla_tensors_hlo(outputs)
    torch_xla.sync(wait=True)
    seconds = perf_counter() - begin
    return {"traced": asdict(read_program(text)), "seconds": seconds, "versions": versions()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
