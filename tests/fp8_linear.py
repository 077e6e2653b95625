"""A small linear layer with delayed scaling in 8-bit floats, as TransformerEngine keeps it, on the CPU.

Every operand has a history of the largest magnitudes of past steps, in a ring buffer, and a scale computed from it. The
scales of all layers are computed anew at once, in the forward of the first layer that runs under an `autocast`. A layer keeps
its quantised weight between the microbatches of a step.

In the phases that `phases()` tells it of, a layer keeps its history and its scales for the recomputation: in a process-wide
queue, which recomputations empty in the order of the forwards, as in TransformerEngine; or under the identity of the region.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import reactivate

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {FORWARD: 448.0, BACKWARD: 57344.0}
INPUT, WEIGHT = 0, 1  # columns of the history of the forward


Kept = tuple[Tensor, Tensor]  # a history and scales


@dataclass(frozen=True)
class Recipe:
    """The rule by which scales follow from histories."""

    margin: int = 0
    uses_largest: bool = True  # of the whole history, otherwise the newest


class State:
    """The state that a process shares: the recipe, all histories and scales, and the queues of recomputations."""

    is_enabled = False
    recipe = Recipe()
    is_first_layer = False
    updates = 0
    buffers: ClassVar[list[tuple[Tensor, Tensor, float]]] = []  # (history, scale, largest number of the dtype)
    keeps_for_recomputation = False
    is_recomputation = False
    queues: ClassVar[list[deque[Kept]]] = []
    of_regions: ClassVar[WeakKeyDictionary[Any, dict[Any, Kept]]] = WeakKeyDictionary()

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        return cls.is_enabled, cls.recipe, cls.is_first_layer

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        cls.is_enabled, cls.recipe, cls.is_first_layer = state

    @classmethod
    def reset(cls) -> None:
        cls.is_enabled = cls.is_first_layer = cls.keeps_for_recomputation = cls.is_recomputation = False
        cls.recipe, cls.updates = Recipe(), 0
        cls.buffers.clear()
        cls.queues.clear()
        cls.of_regions.clear()

    @classmethod
    def update_scales(cls) -> None:
        """Compute the scales of all layers from their histories, and begin a new row of each."""
        cls.updates += 1
        for history, scale, largest in cls.buffers:
            amax = history.amax(0) if cls.recipe.uses_largest else history[0]
            new = largest / amax / 2**cls.recipe.margin
            scale.copy_(torch.where((amax > 0) & torch.isfinite(new), new, scale))
            history.copy_(history.roll(-1, 0))
            history[0].zero_()


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None) -> Iterator[None]:
    before = State.is_enabled, State.recipe, State.is_first_layer
    State.is_enabled, State.recipe = enabled, recipe or Recipe()
    State.is_first_layer = True if enabled and not before[0] else before[2]
    try:
        yield
    finally:
        State.is_enabled, State.recipe, is_first = before
        State.is_first_layer = is_first if State.is_enabled else False


@contextmanager
def phase(*, is_recomputation: bool) -> Iterator[None]:
    before = State.keeps_for_recomputation, State.is_recomputation
    State.keeps_for_recomputation, State.is_recomputation = True, is_recomputation
    try:
        yield
    finally:
        State.keeps_for_recomputation, State.is_recomputation = before


class RecomputationPhase:
    """As `phase(is_recomputation=True)`, and may be entered anew for each recomputation."""

    def __enter__(self) -> None:
        self.context = phase(is_recomputation=True)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def phases() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A pair of contexts for `context_fn=`."""
    return phase(is_recomputation=False), RecomputationPhase()


def quantised(tensor: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    return (tensor * scale).clamp(-LARGEST[kind], LARGEST[kind]).to(kind)


class Product(torch.autograd.Function):
    """A product of two quantised matrices, which saves all that its backward reads in bulk."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        x8: Tensor,
        weight8: Tensor,
        inverses: Tensor,
        history: Tensor,
        scale: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x8, weight8, inverses, None)
        ctx.history, ctx.scale = history, scale
        return (x8.float() * inverses[INPUT]) @ (weight8.float() * inverses[WEIGHT]).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x8, weight8, inverses, _ = ctx.saved_tensors
        ctx.history[0] = torch.maximum(ctx.history[0], grad.abs().amax())
        scale = ctx.scale.clone()
        low = quantised(grad, scale, BACKWARD).float() / scale
        x, weight = x8.float() * inverses[INPUT], weight8.float() * inverses[WEIGHT]
        return low @ weight, low.t() @ x, None, None, None, None, None


class Fp8Linear(nn.Module):
    """A linear layer, quantised under `autocast`."""

    uses_queues = True

    def __init__(self, width: int, height: int, rows: int = 4) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.randn(height, width) / width**0.5)
        self.register_buffer("history", torch.zeros(rows, 2))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("history_of_gradients", torch.zeros(rows, 1))
        self.register_buffer("scale_of_gradients", torch.ones(1))
        self.weight8: Tensor | None = None
        self.weight_inverse = torch.ones(())
        self.is_registered = False
        self.queue: int | None = None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        if not State.is_enabled:
            return nn.functional.linear(x, self.weight)
        self.calls += 1
        present = self.begin()
        history, scale = self.history, self.scale
        with torch.no_grad():
            history[0] = torch.maximum(history[0], torch.stack([x.abs().amax(), self.weight.abs().amax()]))
            x8 = quantised(x, scale[INPUT], FORWARD)
            if is_first_microbatch is None:
                weight8, weight_inverse = quantised(self.weight, scale[WEIGHT], FORWARD), 1 / scale[WEIGHT]
            else:
                weight8, weight_inverse = self.cached_weight(is_first_microbatch)
            inverses = torch.stack([1 / scale[INPUT], weight_inverse])
        out: Tensor = Product.apply(
            x, self.weight, x8, weight8, inverses, self.history_of_gradients, self.scale_of_gradients
        )
        self.end(present)
        return out

    def cached_weight(self, is_first_microbatch: bool) -> tuple[Tensor, Tensor]:
        if is_first_microbatch:
            new = quantised(self.weight, self.scale[WEIGHT], FORWARD)
            if self.weight8 is None:
                self.weight8 = new
            else:
                self.weight8.copy_(new)
            self.weight_inverse.copy_(1 / self.scale[WEIGHT])
        assert self.weight8 is not None
        return self.weight8, self.weight_inverse

    def begin(self) -> Kept | None:
        """Bring the scales up to date; in the phase of a recomputation, take out those of its forward."""
        if State.is_recomputation:
            present = self.history.clone(), self.scale.clone()
            history, scale = self.kept()
            self.history.copy_(history)
            self.scale.copy_(scale)
            return present
        if not self.is_registered:
            State.buffers.append((self.history, self.scale, LARGEST[FORWARD]))
            State.buffers.append((self.history_of_gradients, self.scale_of_gradients, LARGEST[BACKWARD]))
            self.is_registered = True
        if State.is_first_layer:
            State.is_first_layer = False
            State.update_scales()
        if State.keeps_for_recomputation and self.training:
            self.keep((self.history.clone(), self.scale.clone()))
        return None

    def keep(self, kept: Kept) -> None:
        if self.uses_queues:
            if self.queue is None:
                self.queue = len(State.queues)
                State.queues.append(deque())
            State.queues[self.queue].append(kept)
        else:
            region = reactivate.current_region()
            assert region is not None
            State.of_regions.setdefault(region, {})[self, self.calls] = kept

    def kept(self) -> Kept:
        if self.uses_queues:
            assert self.queue is not None, "no forward has kept anything"
            return State.queues[self.queue].popleft()
        return State.of_regions[reactivate.current_region()][self, self.calls]

    def end(self, present: Kept | None) -> None:
        if present is not None:
            self.history.copy_(present[0])
            self.scale.copy_(present[1])
