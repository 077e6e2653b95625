"""Sections of the overhead benchmark: the steps to time, the figures to take from them, and their targets.

The workloads are small on purpose, so that what a region costs stands out from what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from _timing import SINGLE, WARM, Array, Key, Step, View
from _ways import EVERY, MAIN, PLAIN, Function, Wrap
from torch import Tensor, nn

FORWARD = "extra forward"
"""The plain function without a graph: the least that recomputing it can cost."""

SAVED_TENSORS = (1, 2, 4, 8, 16, 32)
FEW, MANY = 10, 1000
SEVERAL = 24

Subjects = Mapping[str, Wrap]
Steps = dict[Key, Step]


@dataclass(frozen=True)
class Quantity:
    """One figure of every subject.

    Attributes:
        unit: "µs" is compared with torch non-reentrant, "ratio" is not.
        figure: (times, name of the subject) -> its figure in seconds, or a ratio.
        targets: {method: what our figure may be at most: in "µs" as a part of torch non-reentrant's}.
        subjects: what it is given for.
    """

    name: str
    unit: Literal["µs", "ratio"]
    figure: Callable[[View, str], Array]
    targets: Mapping[str, float] = field(default_factory=dict)
    subjects: tuple[str, ...] = EVERY


@dataclass(frozen=True)
class Section:
    """Steps that are timed together, and what is read off them.

    Attributes:
        name: for `--only`.
        heavy: how many times fewer rounds there are than in other sections, since a step takes so long.
    """

    name: str
    title: str
    make_steps: Callable[[Subjects, torch.device], Steps]
    quantities: tuple[Quantity, ...]
    heavy: int = 1


def slope(sizes: Sequence[int], values: Sequence[Array]) -> Array:
    """By how much the values grow with the size: the least-squares line's slope, one for each draw."""
    x = np.asarray(sizes, dtype=np.float64)
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()
    return np.asarray(weights @ np.stack(values))


def over_plain(view: View, subject: str) -> Array:
    return view.over((subject, 1), (PLAIN, 1))


def beyond_forward(view: View, subject: str) -> Array:
    return over_plain(view, subject) - view.level((FORWARD, 1))


def per_tensor(view: View, subject: str) -> Array:
    return slope(SAVED_TENSORS, [view.over((subject, size), (PLAIN, size)) for size in SAVED_TENSORS])


def per_tensor_less_op(view: View, subject: str) -> Array:
    return per_tensor(view, subject) - slope(SAVED_TENSORS, [view.level((FORWARD, size)) for size in SAVED_TENSORS])


def per_region(regions: int) -> Callable[[View, str], Array]:
    return lambda view, subject: view.over((subject, regions), (PLAIN, regions)) / regions


def growth(view: View, subject: str) -> Array:
    return per_region(MANY)(view, subject) / per_region(FEW)(view, subject)


# -- workloads --------------------------------------------------------------------------------------------------------


def wave(x: Tensor) -> Tensor:
    """Two ops and one saved tensor: hardly more than the cost of a region."""
    return (x * 2).sin()


def chain(saved_tensors: int) -> Function:
    """One op for each saved tensor."""

    def run(x: Tensor) -> Tensor:
        for _ in range(saved_tensors):
            x = x.sin()
        return x

    return run


def vector(device: torch.device) -> Tensor:
    """The argument of the functions."""
    return torch.randn(16, device=device, requires_grad=True)


def ten_modules(device: torch.device) -> tuple[nn.Module, Tensor]:
    """A block with buffers (batch norm's statistics) and dropout, and its argument."""
    block = nn.Sequential(
        nn.Linear(32, 64),
        nn.BatchNorm1d(64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 32),
        nn.LayerNorm(32),
    )
    return block.to(device), torch.randn(8, 32, device=device, requires_grad=True)


class TransformerBlock(nn.Module):
    """Explicit attention and a gated feed-forward: about 50 ops in the forward pass and 30 saved tensors."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        hidden = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))

    def attention(self, x: Tensor) -> Tensor:
        mixed = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind()
        scores = (query @ key.transpose(-2, -1) * query.size(-1) ** -0.5).softmax(-1)
        return self.out((scores @ value).transpose(1, 2).flatten(2))


def transformer_block(device: torch.device) -> tuple[nn.Module, Tensor]:
    """The block and its argument."""
    return TransformerBlock().to(device), torch.randn(2, 8, 32, device=device, requires_grad=True)


def training_step(fn: Function, x: Tensor) -> Step:
    """A forward and a backward pass."""
    gradient = torch.ones_like(fn(x))

    def step() -> None:
        fn(x).backward(gradient)

    return step


def forward_pass(fn: Function, x: Tensor) -> Step:
    """A forward pass with nothing to differentiate."""

    def step() -> None:
        with torch.no_grad():
            fn(x)

    return step


def many_regions(wrap: Callable[[Function], Function], regions: int, x: Tensor) -> Step:
    """A forward pass through as many regions, all of them alive before one backward pass."""
    region = wrap(wave)

    def forward(x: Tensor) -> Tensor:
        for _ in range(regions):
            x = region(x)
        return x

    return training_step(forward, x)


class Blocks(nn.Module):
    """Different blocks, each called by one method of the model that has them all."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(count))

    def step(self, x: Tensor, index: int) -> Tensor:
        return self.blocks[index](x)  # type: ignore[no-any-return]


# -- sections ---------------------------------------------------------------------------------------------------------


def fixed(subjects: Subjects, device: torch.device) -> Steps:
    x = vector(device)
    return {(name, 1): training_step(wrap(wave), x) for name, wrap in subjects.items()}


def slopes(subjects: Subjects, device: torch.device) -> Steps:
    x = vector(device)
    steps: Steps = {(FORWARD, size): forward_pass(chain(size), x) for size in SAVED_TENSORS}
    for name in (PLAIN, *MAIN):
        if name in subjects:
            steps |= {(name, size): training_step(subjects[name](chain(size)), x) for size in SAVED_TENSORS}
    return steps


def block(make: Callable[[torch.device], tuple[nn.Module, Tensor]]) -> Callable[[Subjects, torch.device], Steps]:
    def steps(subjects: Subjects, device: torch.device) -> Steps:
        model, x = make(device)
        found = {(name, 1): training_step(wrap(model), x) for name, wrap in subjects.items()}
        return {(FORWARD, 1): forward_pass(model, x), **found}

    return steps


def no_grad(subjects: Subjects, device: torch.device) -> Steps:
    x = vector(device)
    return {(name, 1): forward_pass(wrap(wave), x) for name, wrap in subjects.items()}


def regions(subjects: Subjects, device: torch.device) -> Steps:
    x = vector(device)
    names = [name for name in (PLAIN, *MAIN) if name in subjects]
    return {(name, count): many_regions(subjects[name], count, x) for name in names for count in (FEW, MANY)}


def blocks(subjects: Subjects, device: torch.device) -> Steps:
    """A region for each of many blocks, which its function is: (name, 1); or which a method of the model calls: (name, 2)."""
    model, x = Blocks(SEVERAL).to(device), transformer_block(device)[1]

    def by_block(wrap: Wrap) -> Function:
        def forward(x: Tensor) -> Tensor:
            for block in model.blocks:
                x = wrap(block)(x)
            return x

        return forward

    def by_method(wrap: Any) -> Function:
        def forward(x: Tensor) -> Tensor:
            for index in range(SEVERAL):
                x = wrap(model.step)(x, index)
            return x

        return forward

    found: Steps = {(FORWARD, 1): forward_pass(by_block(subjects[PLAIN]), x)}
    for name in (PLAIN, *MAIN):
        if name in subjects:
            found[name, 1] = training_step(by_block(subjects[name]), x)
            found[name, 2] = training_step(by_method(subjects[name]), x)
    return found


def per_block(kind: int) -> Callable[[View, str], Array]:
    return lambda view, subject: (view.over((subject, kind), (PLAIN, kind)) - view.level((FORWARD, 1))) / SEVERAL


OVER_PLAIN = "over plain"
BEYOND_FORWARD = "beyond one extra forward"
PER_TENSOR = "each saved tensor"

SECTIONS = (
    Section(
        "fixed",
        "Fixed cost of a region: `(x * 2).sin()`, forward and backward",
        fixed,
        (Quantity(OVER_PLAIN, "µs", over_plain, {WARM.name: 0.40, SINGLE.name: 0.47}),),
    ),
    Section(
        "slope",
        f"Each further saved tensor: chains of {SAVED_TENSORS[0]} to {SAVED_TENSORS[-1]} `sin`",
        slopes,
        (
            Quantity(PER_TENSOR, "µs", per_tensor, {WARM.name: 0.55, SINGLE.name: 0.55}, MAIN),
            Quantity(
                "each saved tensor, less the op", "µs", per_tensor_less_op, {WARM.name: 0.5, SINGLE.name: 0.5}, MAIN
            ),
        ),
    ),
    Section(
        "block",
        "A block of ten modules with buffers and dropout",
        block(ten_modules),
        (Quantity(OVER_PLAIN, "µs", over_plain), Quantity(BEYOND_FORWARD, "µs", beyond_forward)),
    ),
    Section(
        "transformer",
        "A small transformer block: 50 ops, 28 saved tensors",
        block(transformer_block),
        (
            Quantity(OVER_PLAIN, "µs", over_plain),
            Quantity(BEYOND_FORWARD, "µs", beyond_forward, {WARM.name: 0.5, SINGLE.name: 0.55}),
        ),
    ),
    Section(
        "no_grad",
        "Without gradients: `(x * 2).sin()` under `torch.no_grad()`",
        no_grad,
        (Quantity(OVER_PLAIN, "µs", over_plain, {WARM.name: 0.1, SINGLE.name: 0.1}),),
    ),
    Section(
        "regions",
        f"Regions alive at one time: {FEW} and {MANY:,} of `(x * 2).sin()`, then one backward",
        regions,
        (
            Quantity(f"a region of {FEW}, over plain", "µs", per_region(FEW), subjects=MAIN),
            Quantity(f"a region of {MANY:,}, over plain", "µs", per_region(MANY), subjects=MAIN),
            # No target for single calls: there the few regions run on cold caches, the many warm them up.
            Quantity(f"a region of {MANY:,} against one of {FEW}", "ratio", growth, {WARM.name: 1.15}, MAIN),
        ),
        heavy=25,
    ),
    Section(
        "blocks",
        f"{SEVERAL} different transformer blocks, a region each, then one backward",
        blocks,
        (
            Quantity("a region of a block, beyond one extra forward", "µs", per_block(1), subjects=MAIN),
            Quantity(
                "a region of a method that calls one, beyond one extra forward",
                "µs",
                per_block(2),
                {WARM.name: 1.0, SINGLE.name: 1.0},
                MAIN,
            ),
        ),
        heavy=25,
    ),
)
