"""Buffers: the recomputation reads what the forward read, under every name that the memory has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from state_programs import Programs, Scale, Wrap, as_region, backward, curve, inputs, state_of, train
from torch import Tensor, nn

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_by, right_with = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with


# -- one memory under two names -----------------------------------------------------------------------------------------


def aliased(
    wrap: Wrap, place: Callable[[nn.Module, Tensor], None], alias_of: Callable[[Tensor], Tensor] = lambda amax: amax
) -> Any:
    """The region writes the buffer and reads its alias, which `place` puts somewhere in the module."""

    class Aliased(Scale):
        read: Callable[[], Tensor]

        def forward(self, x: Tensor) -> Tensor:
            self.update(x)
            return curve(x, self.read().clone())

    module = Aliased()
    place(module, alias_of(module.amax))
    grads = train(wrap(module), inputs())
    return [grads, state_of(module), module.read()]


def as_attribute(module: nn.Module, alias: Tensor) -> None:
    module.alias = alias
    module.read = lambda: module.alias


@right_by(aliased)
def buffer_is_registered_twice(module: nn.Module, alias: Tensor) -> None:
    module.register_buffer("second", alias)
    module.read = lambda: module.second


PROGRAMS.rows(
    aliased,
    {
        "buffer_is_an_attribute_too": (as_attribute,),
        "buffer_has_a_detached_alias": (as_attribute, lambda amax: amax.detach()),
        "buffer_has_a_data_alias": (as_attribute, lambda amax: amax.data),
        "buffer_has_a_view": (as_attribute, lambda amax: amax.view(2, 2).view(1, 4)),
        "buffer_has_a_view_of_one_element": (as_attribute, lambda amax: amax[0, 1]),
    },
)


@right_by(aliased)
def buffer_is_in_a_list(module: nn.Module, alias: Tensor) -> None:
    module.history = [alias]
    module.read = lambda: module.history[0]


@right_by(aliased)
def buffer_is_in_a_second_module(module: nn.Module, alias: Tensor) -> None:
    module.child = nn.Module()
    module.child.register_buffer("amax", alias)
    module.read = lambda: module.child.amax


@right_by(aliased)
def buffer_is_captured_by_a_closure(module: nn.Module, alias: Tensor) -> None:
    module.read = lambda: alias


@right_by(aliased)
def numpy_reads_the_buffer(module: nn.Module, alias: Tensor) -> None:
    array = alias.numpy()
    module.read = lambda: torch.from_numpy(array)


@right_by(as_region, show=lambda module: module.flat)
class BuffersAreSlicesOfOneStorage(nn.Module):
    """Make buffers as flattened or sharded state has them: many buffers, one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.ones(8)
        self.register_buffer("low", self.flat[:4])
        self.register_buffer("high", self.flat[4:])

    def forward(self, x: Tensor) -> Tensor:
        out = curve(x, self.low.clone())
        with torch.no_grad():
            self.high.add_(x.amax(0))
            self.flat.mul_(0.9)
        return curve(out, self.high.clone())


@right
def argument_aliases_the_buffer(wrap: Wrap) -> Any:
    module = Scale()

    def fn(x: Tensor, amax: Tensor) -> Tensor:
        out = curve(x, amax.clone())
        return curve(module(out), amax.clone())

    checkpointed = wrap(fn)
    return [train(lambda x: checkpointed(x, module.amax), inputs()), state_of(module)]


@right
def two_modules_share_a_child(wrap: Wrap) -> Any:
    shared = Scale()
    first, second = nn.Sequential(nn.Linear(4, 4), shared), nn.Sequential(nn.Tanh(), shared)
    one, two = wrap(first), wrap(second)
    return [train(lambda x: two(one(x)), inputs()), state_of(first)]


@right_by(as_region)
class AViewOfABufferIsSaved(nn.Module):
    """Autograd saves a tensor that lies in the buffer's memory, which a later region writes by another storage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(8, 4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return (x * self.table[1]).tanh() * self.table[2] * self.steps.clone()


# -- who writes, and when -----------------------------------------------------------------------------------------------


class Every(nn.Module):
    """A codebook that is updated in every `period`-th call, counted from `first`."""

    def __init__(self, period: int, first: int, rebinds: bool = False) -> None:
        super().__init__()
        self.register_buffer("book", torch.ones(1, 4))
        self.period, self.first, self.rebinds, self.calls = period, first, rebinds, 0

    def forward(self, x: Tensor) -> Tensor:
        out = curve(x, self.book.clone())
        self.calls += 1
        if self.calls >= self.first and (self.calls - self.first) % self.period == 0:
            with torch.no_grad():
                if self.rebinds:
                    self.book = self.book * 0.5 + x.amax(0)
                else:
                    self.book.mul_(0.5).add_(x.amax(0))
        return curve(out, self.book.clone())


class Observer(Every):
    """Is updated in the first three calls only."""

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == 3:
            self.first = 1000
        return super().forward(x)


def updated_every(wrap: Wrap, steps: int, make: Callable[..., Every], *numbers: Any) -> Any:
    module = make(*numbers)
    return [train(wrap(module), inputs(steps)), state_of(module), module.calls]


PROGRAMS.rows(
    updated_every,
    {
        "buffer_is_first_written_at_step_five": (8, Every, 1, 5),
        "buffer_is_written_every_second_call": (12, Every, 2, 2),
        "buffer_is_written_every_fourth_call": (12, Every, 4, 4),
        "buffer_is_written_every_tenth_call": (21, Every, 10, 10),
        "buffer_is_written_in_the_first_three_calls_only": (8, Observer, 1, 1),
        "buffer_is_rebound_every_third_call": (9, Every, 3, 3, True),
    },
    recomputations=lambda steps, *_: steps,
)


@right_by(as_region, count=8)
class TensorDecidesWhetherTheBufferIsWritten(Scale):
    def forward(self, x: Tensor) -> Tensor:
        out = curve(x, self.amax.clone())
        if x.detach().mean() > 0:
            self.update(x)
        return curve(out, self.amax.clone())


@right
def observer_is_switched_on_later(wrap: Wrap) -> Any:
    class Observed(Scale):
        enabled = False

        def forward(self, x: Tensor) -> Tensor:
            out = curve(x, self.amax.clone())
            if self.enabled:
                self.update(x)
            return curve(out, self.amax.clone())

    module = Observed()
    checkpointed = wrap(module)
    grads = train(checkpointed, inputs(3))
    module.enabled = True
    grads += train(checkpointed, inputs(3))
    module.enabled = False
    return [grads, train(checkpointed, inputs(2)), state_of(module)]


@right
def fake_quantize_is_enabled_later(wrap: Wrap) -> Any:
    module = nn.Sequential(nn.Linear(4, 4), torch.ao.quantization.FakeQuantize(), nn.Tanh())
    quantizer = module[1]
    quantizer.disable_observer()
    quantizer.disable_fake_quant()
    checkpointed = wrap(module)
    grads = train(checkpointed, inputs(2))
    quantizer.enable_observer()
    grads += train(checkpointed, inputs(2))
    quantizer.enable_fake_quant()
    return [grads, train(checkpointed, inputs(2)), state_of(module)]


@right_with(recomputations=6)
def amax_is_written_on_the_first_microbatch_only(wrap: Wrap) -> Any:
    class Fp8(Scale):
        first = True

        def forward(self, x: Tensor) -> Tensor:
            if self.first:
                self.update(x)
            return curve(x, self.amax.clone())

    module = Fp8()
    checkpointed = wrap(module)
    found = []
    for _ in range(2):
        outputs = []
        for index, x in enumerate(inputs(3)):
            module.first = index == 0
            outputs.append(checkpointed(x))
            found.append(x)
        backward(*outputs)
    return [[x.grad for x in found], state_of(module)]


def regions_of(wrap: Wrap, order: Callable[[list[Tensor]], Any], names: str) -> Any:
    """Several regions over one `self`: `w` writes its buffer, `r` reads it. `order` runs the backward passes."""

    class Model(Scale):
        def w(self, x: Tensor) -> Tensor:
            out = curve(x, self.amax.clone())
            self.update(x)
            return out

        def r(self, x: Tensor) -> Tensor:
            return curve(x, self.amax.clone())

    model = Model()
    regions = {"w": wrap(model.w), "r": wrap(model.r)}
    leaves = inputs(len(names))
    outputs = [regions[name](x) for name, x in zip(names, leaves, strict=True)]
    order([output.square().sum() for output in outputs])
    return [[x.grad for x in leaves], state_of(model)]


PROGRAMS.rows(
    regions_of,
    {
        "readers_stand_between_writers": (lambda losses: sum(losses).backward(), "rwrwr"),
        "readers_and_writers_are_taken_backward_in_forward_order": (
            lambda losses: [loss.backward() for loss in losses],
            "wrrwwr",
        ),
        "one_region_of_four_writes": (lambda losses: [loss.backward() for loss in reversed(losses)], "rrwr"),
    },
    recomputations=lambda order, names: len(names),
)


@right_by(regions_of, "rwrwr", recomputations=10)
def readers_and_writers_with_retained_graphs(losses: list[Tensor]) -> None:
    for loss in [*losses, *reversed(losses)]:
        loss.backward(retain_graph=True)


@right_with(recomputations=6)
def one_forward_one_backward(wrap: Wrap) -> Any:
    """1F1B order: two microbatches are always in flight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scale())
    checkpointed = wrap(model)
    leaves, flying = inputs(6), []
    for x in leaves:
        flying.append(checkpointed(x))
        if len(flying) == 2:
            backward(flying.pop(0))
    backward(flying.pop())
    return [[x.grad for x in leaves], state_of(model)]


@right
def outside_writes_between_forward_and_backward(wrap: Wrap) -> Any:
    """The region reads a statistic that the training loop updates before backward."""
    module = Scale()
    module.register_buffer("loss_scale", torch.ones(()))
    other = torch.randn(6, 4)

    def write() -> None:
        module.loss_scale.mul_(2)
        module.update(other)

    grads = train(wrap(lambda x: module(x) * module.loss_scale.clone()), inputs(), between=write)
    return [grads, state_of(module)]


@right
def evaluation_runs_between_forward_and_backward(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh())
    checkpointed = wrap(model)
    found = []
    for x in inputs():
        out = checkpointed(x)
        model.eval()
        with torch.no_grad():
            found.append(checkpointed(x))
        backward(out)
        model.train()
        found.append(x.grad)
    return [found, state_of(model), model.training]


@right
def training_forward_without_gradients_runs_in_between(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scale())
    checkpointed, other, found = wrap(model), torch.randn(6, 4), []

    def forward() -> None:
        with torch.no_grad():
            found.append(checkpointed(other))

    return [train(checkpointed, inputs(), between=forward), found, state_of(model)]


@right
def load_state_dict_runs_between_forward_and_backward(wrap: Wrap) -> Any:
    model = nn.Sequential(Scale(), nn.Tanh(), Scale())
    start = copy.deepcopy(model.state_dict())
    return [train(wrap(model), inputs(), between=lambda: model.load_state_dict(start)), state_of(model)]
