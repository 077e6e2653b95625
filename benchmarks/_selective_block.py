"""One transformer block, small enough to show what the ways cost, and large: times, and bytes that are kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from _overhead_sections import TransformerBlock, training_step, transformer_block
from _selective_experiment import Settings
from _timing import (
    METHODS,
    SINGLE,
    Array,
    Estimate,
    Figure,
    Key,
    Method,
    Step,
    Timer,
    Times,
    Track,
    View,
    by_both_methods,
    estimate,
    finished,
    quiet,
    single_calls,
    verdict,
)
from _training import Forward, allocated_bytes
from _ways import (
    CALLS_OF,
    FUNCTION_SITES,
    MODULE_SITES,
    NOTHING,
    OUR_BLOCKS,
    PLAIN,
    REMAT,
    SAC,
    TORCH,
    Function,
    Way,
    differs_from_plain,
    make_ways,
    recomputed_alone,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK, LARGE = "block", "large"
OVER_PLAIN, OF_TORCH, OF_REMAT = "over plain", "of torch's", "of torch_remat's"
OVER_IDEAL = "over the ideal"

TARGETS = {(MODULE_SITES, OF_TORCH, SINGLE.name): 0.35, (FUNCTION_SITES, OF_TORCH, SINGLE.name): 0.43} | {
    (system, OF_REMAT, method.name): 1.0 for system in (MODULE_SITES, FUNCTION_SITES) for method in METHODS
}
TOLERANCE = 0.02
"""Of a large block's time: what is not above the ideal by more is no loss."""

RECOMPUTED = "recomputed alone"
PLAIN_KEY = (PLAIN, 1)

Make = Callable[[torch.device], tuple[TransformerBlock, Tensor]]


@dataclass(frozen=True)
class Row:
    """One figure of one way to checkpoint a block, by one method.

    Attributes:
        quantity: `OVER_PLAIN` in µs, the others as ratios.
        keeps: the calls whose results the way keeps.
        target: what the figure may be at most; None where there is no target.
        verdict: "met", "missed" or "within noise", by the interval.
    """

    part: str
    quantity: str
    system: str
    keeps: str
    method: str
    figure: Estimate
    target: float | None = None
    verdict: str | None = None


@dataclass(frozen=True)
class Kept:
    """The bytes that the forward pass of a way leaves for the backward.

    Attributes:
        kept_bytes: of activations, as autograd and the systems hold them, the argument of the block among them.
        allocated_bytes: by the forward pass, whoever holds it: without the argument, with the block's result and states
            of random number generators.
    """

    part: str
    system: str
    keeps: str
    kept_bytes: int
    allocated_bytes: int


# -- times ------------------------------------------------------------------------------------------------------------


def small_block(device: torch.device) -> tuple[TransformerBlock, Tensor]:
    """The block that the overhead benchmark has."""
    model, x = transformer_block(device)
    assert isinstance(model, TransformerBlock)
    return model, x


def large_block(settings: Settings) -> Make:
    """A variant of the block, so wide that nothing counts but what it computes, and with a batch of one."""

    def make(device: torch.device) -> tuple[TransformerBlock, Tensor]:
        width = settings.large_width
        block = TransformerBlock(width, heads=max(1, width // 64))
        block.gate, block.up, block.down = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )
        return block.to(device), torch.randn(1, settings.large_length, width, device=device, requires_grad=True)

    return make


def measure_block(settings: Settings, device: torch.device, track: Track) -> list[Row]:
    """The small block: the time over plain, and what part it is of torch's and of torch_remat's."""
    block, x = small_block(device)
    ways = make_ways()
    steps = {key_of(way): training_step(way.wrap(block), x) for way in ways}
    times = by_both_methods(BLOCK, steps, replace(settings.block, clock=settings.clock), device, track)
    return [
        row
        for way in ways
        if way.system != PLAIN
        for method in METHODS
        for row in _rows(way, method, times[method.name])
    ]


def measure_large(settings: Settings, device: torch.device, track: Track) -> list[Row]:
    """The large block: the time over that of the plain step plus the recomputed ops alone, as a part of that."""
    block, x = large_block(settings)(device)
    ways = make_ways()
    steps: dict[Key, Step] = {key_of(way): finished(training_step(way.wrap(block), x), device) for way in ways}
    for keeps in CALLS_OF:
        steps[RECOMPUTED + keeps, 1] = finished(recomputed_alone(block, keeps, x), device)
    timer = Timer(device, settings.clock if device.type == "cpu" else "wall")
    with quiet():
        times = single_calls(steps, settings.large_calls, timer, track(LARGE, settings.large_calls))
    return [_over_ideal(way, times) for way in ways if way.system != PLAIN]


def kept_by(part: str, make: Make, device: torch.device) -> list[Kept]:
    """Return what each way keeps of one forward pass."""
    found = []
    for way in make_ways():
        block, x = make(device)
        fn = way.wrap(block)
        forward = partial(fn, x)
        kept = kept_bytes(forward, fn if isinstance(fn, nn.Module) else block)
        allocated, _ = allocated_bytes(forward, device)
        found.append(Kept(part, way.system, way.keeps, kept, allocated))
    return found


def differences(make: Make, device: torch.device) -> dict[str, list[str]]:
    """{way: what one step leaves different from plain, bit for bit}."""
    return {way.name: differs_from_plain(on_one_model(way), lambda: make(device)) for way in make_ways()}


def on_one_model(way: Way) -> Callable[[Any], Function]:
    """The way, with the gradients at the parameters of the block that it is given, also if it copies the block."""

    def wrap(block: Any) -> Function:
        fn = way.wrap(block)
        if isinstance(fn, nn.Sequential):
            for parameter, copied in zip(block.parameters(), fn.parameters(), strict=True):
                copied.register_post_accumulate_grad_hook(lambda leaf, to=parameter: setattr(to, "grad", leaf.grad))
        return fn

    return wrap


def key_of(way: Way) -> Key:
    """Of its times."""
    return (PLAIN if way.system == PLAIN else way.name, 1)


def _rows(way: Way, method: Method, times: Times) -> Iterator[Row]:
    """A way's figures; its rivals are torch's and torch_remat's ways that keep the same calls."""

    own = key_of(way)
    seconds = estimate(lambda view: view.over(own, PLAIN_KEY), times, method)
    yield Row(BLOCK, OVER_PLAIN, way.system, way.keeps, method.name, seconds.scaled(1e6))
    rivals = {OF_TORCH: TORCH if way.keeps == NOTHING else SAC, OF_REMAT: REMAT}
    for quantity, system in rivals.items():
        rival = (f"{system} ({way.keeps})", 1)
        if rival not in times or (way.system not in OUR_BLOCKS and quantity == OF_REMAT):
            continue
        ratio = estimate(_ratio(own, rival), times, method)
        target = TARGETS.get((way.system, quantity, method.name))
        judged = None if target is None else verdict(ratio, target)
        yield Row(BLOCK, quantity, way.system, way.keeps, method.name, ratio, target, judged)


def _ratio(one: Key, other: Key) -> Figure:
    return lambda view: view.over(one, PLAIN_KEY) / view.over(other, PLAIN_KEY)


def _over_ideal(way: Way, times: Times) -> Row:
    recomputed = (RECOMPUTED + way.keeps, 1)

    def over_ideal(view: View) -> Array:
        alone = view.level(recomputed)
        return (view.over(key_of(way), PLAIN_KEY) - alone) / (view.level(PLAIN_KEY) + alone)

    figure = estimate(over_ideal, times, SINGLE)
    ours = way.system in OUR_BLOCKS
    judged = not_above_zero(figure) if ours else None
    return Row(LARGE, OVER_IDEAL, way.system, way.keeps, SINGLE.name, figure, TOLERANCE if ours else None, judged)


def not_above_zero(figure: Estimate) -> str:
    """Return whether the figure cannot be told from zero, or is within `TOLERANCE` of it."""
    return "met" if figure.low <= 0 else verdict(figure, TOLERANCE)


MAKERS: dict[str, Callable[[Settings], Make]] = {BLOCK: lambda settings: small_block, LARGE: large_block}
MEASURES = {BLOCK: measure_block, LARGE: measure_large}


# -- bytes ------------------------------------------------------------------------------------------------------------


def kept_bytes(forward: Forward, model: nn.Module) -> int:
    """Bytes of the storages that wait for the backward, each once, without parameters.

    Hooks around the call see what autograd and the systems keep, and what regions keep of their arguments. SAC keeps
    results where no hook sees them, in the dispatch mode that its context function made, and so that is searched.
    Not counted is what is no activation, such as states of random number generators.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    before = {id(mode) for mode in _modes()}
    with saved_tensors_hooks(count, lambda tensor: tensor):
        output = forward()
    for mode in _modes():
        if id(mode) not in before:
            for tensor in _tensors_in(mode):
                count(tensor)
    total = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in parameters)
    kept.clear()
    output.sum().backward()
    return total


def _modes() -> list[TorchDispatchMode]:
    return [found for found in gc.get_objects() if issubclass(type(found), TorchDispatchMode)]


def _tensors_in(value: object, depth: int = 6) -> Iterator[Tensor]:
    """List the tensors that an object leads to: SAC has {op: {number of the call: [wrapped tensor]}}."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, type):
        for inner in gc.get_referents(value):
            yield from _tensors_in(inner, depth - 1)
