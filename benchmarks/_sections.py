"""Sections of the benchmark: the steps to time, the figures to take from them, and their targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from _figures import SINGLE, WARM, Array, Key, View, slope
from _measure import Step
from _subjects import EVERY, MAIN, PLAIN, Wrap
from _workloads import chain, forward_pass, many_regions, ten_modules, training_step, transformer_block, vector, wave
from torch import Tensor, nn

FORWARD = "extra forward"
"""The plain function without a graph: the least that recomputing it can cost."""

SAVED_TENSORS = (1, 2, 4, 8, 16, 32)
FEW, MANY = 10, 1000

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


OVER_PLAIN = "over plain"
BEYOND_FORWARD = "beyond one extra forward"

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
            Quantity("each saved tensor", "µs", per_tensor, {WARM.name: 0.55, SINGLE.name: 0.55}, MAIN),
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
)
