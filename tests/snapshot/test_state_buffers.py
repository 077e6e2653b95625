"""Buffers: the recomputation reads what the forward read, under every name that the memory has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from oracle import assert_alike, assert_bitwise, compare
from several import each
from state_programs import (
    Program,
    Programs,
    Scale,
    Wrap,
    backward,
    check_program,
    curve,
    inputs,
    leaf,
    plainly,
    state_of,
    train,
    with_module,
)
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._snapshot.rewound_tensors import rewound_memory
from reactivate.errors import MutationError

PROGRAMS = Programs()
right, right_by, right_with, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with, PROGRAMS.loud


@pytest.mark.parametrize("program", PROGRAMS.listed, ids=str)
def test_program(program: Program) -> None:
    check_program(program)


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


@right
def buffers_are_slices_of_one_storage(wrap: Wrap) -> Any:
    """Make buffers as flattened or sharded state has them: many buffers, one memory."""

    class Sliced(nn.Module):
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

    module = Sliced()
    return [train(wrap(module), inputs()), module.flat, state_of(module)]


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


@right
def a_view_of_a_buffer_is_saved(wrap: Wrap) -> Any:
    """Autograd saves a tensor that lies in the buffer's memory, which a later region writes by another storage."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.rand(8, 4))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return (x * self.table[1]).tanh() * self.table[2] * self.steps.clone()

    module = Reads()
    return [train(wrap(module), inputs()), state_of(module)]


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


def updated_every(wrap: Wrap, module: nn.Module, steps: int = 12) -> Any:
    return [train(wrap(module), inputs(steps)), state_of(module), module.calls]


@right_with(recomputations=8)
def buffer_is_first_written_at_step_five(wrap: Wrap) -> Any:
    return updated_every(wrap, Every(1, 5), 8)


@right_with(recomputations=12)
def buffer_is_written_every_second_call(wrap: Wrap) -> Any:
    return updated_every(wrap, Every(2, 2))


@right_with(recomputations=12)
def buffer_is_written_every_fourth_call(wrap: Wrap) -> Any:
    return updated_every(wrap, Every(4, 4))


@right_with(recomputations=21)
def buffer_is_written_every_tenth_call(wrap: Wrap) -> Any:
    return updated_every(wrap, Every(10, 10), 21)


@right_with(recomputations=8)
def buffer_is_written_in_the_first_three_calls_only(wrap: Wrap) -> Any:
    class Observer(Every):
        def forward(self, x: Tensor) -> Tensor:
            if self.calls == 3:
                self.first = 1000
            return super().forward(x)

    return updated_every(wrap, Observer(1, 1), 8)


@right_with(recomputations=9)
def buffer_is_rebound_every_third_call(wrap: Wrap) -> Any:
    return updated_every(wrap, Every(3, 3, rebinds=True), 9)


@right
def tensor_decides_whether_the_buffer_is_written(wrap: Wrap) -> Any:
    class Gated(Scale):
        def forward(self, x: Tensor) -> Tensor:
            out = curve(x, self.amax.clone())
            if x.detach().mean() > 0:
                self.update(x)
            return curve(out, self.amax.clone())

    module = Gated()
    return [train(wrap(module), inputs(8)), state_of(module)]


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


@right_with(recomputations=5)
def readers_stand_between_writers(wrap: Wrap) -> Any:
    return regions_of(wrap, lambda losses: sum(losses).backward(), "rwrwr")


@right_with(recomputations=6)
def readers_and_writers_are_taken_backward_in_forward_order(wrap: Wrap) -> Any:
    return regions_of(wrap, lambda losses: [loss.backward() for loss in losses], "wrrwwr")


@right_with(recomputations=4)
def one_region_of_four_writes(wrap: Wrap) -> Any:
    return regions_of(wrap, lambda losses: [loss.backward() for loss in reversed(losses)], "rrwr")


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


# -- how it is written --------------------------------------------------------------------------------------------------


def written_by(wrap: Wrap, write: Callable[[Any, Tensor], None]) -> Any:
    class Written(Scale):
        def forward(self, x: Tensor) -> Tensor:
            out = curve(x, self.amax.clone())
            write(self, x.detach())
            return curve(out, self.amax.clone())

    module = Written()
    return [train(wrap(module), inputs()), state_of(module)]


@right_by(written_by)
def buffer_is_rebound(module: Any, x: Tensor) -> None:
    module.amax = module.amax * 0.5 + x.amax(0)


@right_by(written_by)
def buffer_is_rebound_to_a_view_of_a_history(module: Any, x: Tensor) -> None:
    history = torch.cat([module.amax, x])
    module.history = history
    module.amax = history.amax(0, keepdim=True)


@right_by(written_by)
def buffer_is_written_through_data(module: Any, x: Tensor) -> None:
    module.amax.data.mul_(0.5).add_(x.amax(0))


@right_by(written_by)
def buffer_is_swapped_through_data(module: Any, x: Tensor) -> None:
    module.amax.data = module.amax * 0.5 + x.amax(0)


@right_by(written_by)
def buffer_is_written_through_numpy(module: Any, x: Tensor) -> None:
    array = module.amax.numpy()
    array *= 0.5
    array += x.amax(0).numpy()


@right_by(written_by)
def buffer_is_written_under_inference_mode(module: Any, x: Tensor) -> None:
    with torch.inference_mode():
        module.amax.mul_(0.5).add_(x.amax(0))


@right_by(written_by)
def buffer_is_written_by_an_out_argument(module: Any, x: Tensor) -> None:
    torch.maximum(module.amax, x.amax(0) * 2, out=module.amax)


@right_by(written_by)
def buffers_are_written_by_foreach(module: Any, x: Tensor) -> None:
    torch._foreach_lerp_([module.amax], [x.amax(0, keepdim=True)], 0.5)


@right_by(with_module, Scale, show=lambda module: module.amax, check="every")
def buffer_is_written_by_foreach_where_values_are_compared(module: nn.Module, x: Tensor) -> Tensor:
    """Under a dispatch mode, as the comparison is one, such an op moves no version."""
    out = curve(x, module.amax.clone())
    with torch.no_grad():
        torch._foreach_add_([module.amax], 0.5)
    return out


@right
def state_made_under_inference_mode(wrap: Wrap) -> Any:
    with torch.inference_mode():
        module = Scale()

    def fn(x: Tensor) -> Tensor:
        out = curve(x, module.amax.clone())
        with torch.inference_mode():
            module.amax.mul_(0.5).add_(x.amax(0))
        return curve(out, module.amax.clone())

    return [train(wrap(fn), inputs()), module.amax.clone()]


@right_by(written_by)
def buffer_grows_by_a_new_tensor(module: Any, x: Tensor) -> None:
    module.queue = torch.cat([getattr(module, "queue", module.amax), x[:2]])
    module.amax = module.queue.sum(0, keepdim=True)


@loud
def buffer_grows_in_place(wrap: Wrap) -> Any:
    module = Scale()
    module.register_buffer("queue", torch.ones(1, 4))

    def fn(x: Tensor) -> Tensor:
        out = curve(x, module.queue.sum(0))
        count = len(module.queue)
        module.queue.resize_(count + 1, 4)
        module.queue[count] = x.detach().amax(0)
        return curve(out, module.queue.mean(0))

    return [train(wrap(fn), inputs()), state_of(module)]


@right
def circular_queue(wrap: Wrap) -> Any:
    """The queue of a contrastive loss, with a pointer that is a tensor."""

    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.rand(4, 8))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            out = (x @ self.queue.clone()).tanh()
            with torch.no_grad():
                at = int(self.pointer)
                self.queue[:, at : at + 2] = x[:2].T
                self.pointer[0] = (at + 2) % 8
            return out.square()

    module = Queue()
    return [train(wrap(module), inputs(6)), state_of(module)]


@loud
def moving_average_teacher(wrap: Wrap) -> Any:
    """Parameters that need no gradient follow those that do, inside the forward."""

    class Distill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(4, 4)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            return curve(self.student(x), self.teacher(x).detach())

    module = Distill()
    checkpointed = wrap(module)
    optimizer = torch.optim.SGD(module.student.parameters(), lr=0.1)
    found = []
    for x in inputs():
        backward(checkpointed(x))
        optimizer.step()
        optimizer.zero_grad()
        found.append(x.grad)
    return [found, state_of(module)]


# -- written without a new version --------------------------------------------------------------------------------------


class Table(nn.Module):
    """Every call reads the rows of a table, has `write` write to them, and reads them again."""

    table: Tensor

    def __init__(self, *, is_parameter: bool = False, rows: int = 12) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hold(self, torch.zeros(rows, 4), is_parameter)

    @staticmethod
    def hold(module: nn.Module, table: Tensor, is_parameter: bool) -> None:
        if is_parameter:
            module.table = nn.Parameter(table, requires_grad=False)
        else:
            module.register_buffer("table", table)

    def rows(self) -> Tensor:
        return self.table[:6]

    def write(self, x: Tensor) -> None:
        self.table.data[:6] = x
        self.table.data[6:] += 1

    def forward(self, x: Tensor) -> Tensor:
        x = curve(self.layer(x), 1 + self.rows())
        self.write(x.detach())
        return curve(x, 1 + self.rows())


def moved_towards(average: Tensor, x: Tensor) -> None:
    average.data.mul_(0.9).add_(x.repeat(2, 1), alpha=0.1)


class Averaged(Table):
    def write(self, x: Tensor) -> None:
        moved_towards(self.table, x)


class Copied(Table):
    def write(self, x: Tensor) -> None:
        self.table.data.copy_(torch.cat([x, self.table[6:] + 1]))


class Moved(Table):
    def write(self, x: Tensor) -> None:
        self.table.data = torch.cat([x, self.table[6:] + 1])


class InNumpy(Table):
    def write(self, x: Tensor) -> None:
        self.table.numpy()[:6] += x.numpy()


class OfAChild(Table):
    """Writes to the table of a module whose own code does not."""

    @staticmethod
    def hold(module: nn.Module, table: Tensor, is_parameter: bool) -> None:
        module.child = nn.Module()
        module.child.register_buffer("table", table)

    def rows(self) -> Tensor:
        return self.child.table[:6]

    def write(self, x: Tensor) -> None:
        self.child.table.data[:6] = x


class Records:
    def __init__(self) -> None:
        self.rows = torch.zeros(6, 4)

    def record(self, x: Tensor) -> None:
        self.rows.data.copy_(x)


class OfAnObject(Table):
    def __init__(self) -> None:
        super().__init__()
        self.records = Records()

    def rows(self) -> Tensor:
        return self.records.rows

    def write(self, x: Tensor) -> None:
        self.records.record(x)


class ByAHook(Table):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(self.add)

    def add(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.table.data.add_(out.detach().mean())

    def write(self, x: Tensor) -> None:
        pass


class Quantizer(nn.Module):
    """The vector quantiser that most implementations of VQ-VAE-2 copy, line by line."""

    embed: Tensor
    cluster_size: Tensor
    embed_avg: Tensor

    def __init__(self) -> None:
        super().__init__()
        embed = torch.randn(4, 16)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(16))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, 4)
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        index = (-distance).max(1)[1]
        one_hot = nn.functional.one_hot(index, 16).type(flat.dtype)
        quantized = nn.functional.embedding(index.view(*x.shape[:-1]), self.embed.transpose(0, 1))
        if self.training:
            self.cluster_size.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.embed_avg.data.mul_(0.9).add_(flat.transpose(0, 1) @ one_hot, alpha=0.1)
            n = self.cluster_size.sum()
            cluster_size = (self.cluster_size + 1e-5) / (n + 16 * 1e-5) * n
            self.embed.data.copy_(self.embed_avg / cluster_size.unsqueeze(0))
        difference = (quantized.detach() - x).pow(2).mean()
        return x + (quantized - x).detach(), difference


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.quantize, self.decode = nn.Linear(4, 4), Quantizer(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        quantized, difference = self.quantize(self.encode(x))
        return curve(self.decode(quantized), quantized) + difference


class InALargeTree(nn.Module):
    """So many modules that each is noted as the forward reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(30)))
        self.table = OfAChild()

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.layers[:2](x))  # type: ignore[no-any-return]


def steps_with(wrap: Wrap, module: nn.Module, **options: Any) -> Any:
    """Seven calls, one to three of them before their backwards."""
    checkpointed = wrap(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: list[Any] = []
    for count in (1, 2, 1, 3):
        xs = inputs(count)
        for out in reversed([checkpointed(x) for x in xs]):
            backward(out)
        found.append([x.grad for x in xs])
        optimizer.step()
        optimizer.zero_grad()
    return [found, state_of(module)]


WRITERS = [Table, Averaged, Copied, Moved, InNumpy, OfAChild, OfAnObject, ByAHook, Autoencoder, InALargeTree]


@each("determinism", ["first", "metadata"])
@each("make", WRITERS)
def test_writes_without_a_new_version(make: Callable[[], nn.Module], determinism: str) -> None:
    """Code that names `.data` or NumPy may write so, in every call: with "metadata" none of them is compared."""
    check_program(Program(lambda wrap: steps_with(wrap, make(), check=determinism), recomputations=7))


@right_with(recomputations=7)
def quantizer_is_a_saved_module(wrap: Wrap) -> Any:
    return steps_with(wrap, Autoencoder(), policy=policies.save_modules("quantize"))


@right_with(recomputations=14)
def quantizer_is_a_region_in_a_region(wrap: Wrap) -> Any:
    module = Autoencoder()
    inner = wrap(module.quantize.forward)
    module.quantize.forward = inner  # type: ignore[method-assign]
    return steps_with(wrap, module)


@right_with(recomputations=7)
def closed_over_table_is_written_through_data(wrap: Wrap) -> Any:
    layer, table = nn.Linear(4, 4), torch.zeros(6, 4)

    def fn(x: Tensor) -> Tensor:
        x = curve(nn.functional.linear(x, layer.weight, layer.bias), 1 + table)
        table.data.copy_(x)
        return curve(x, 1 + table)

    layer.forward = wrap(fn)  # type: ignore[method-assign]
    return steps_with(plainly, layer)


def of_a_large_argument(wrap: Wrap) -> Callable[[Tensor], Tensor]:
    table = torch.zeros(3000, 4)

    def fn(x: Tensor, table: Tensor) -> Tensor:
        x = curve(x, 1 + table[:6])
        table.data[:6] = x.detach()
        return curve(x, 1 + table[:6])

    fn = wrap(fn)
    return lambda x: fn(x, table)


@pytest.mark.parametrize("make", [lambda wrap: wrap(Table(is_parameter=True)), of_a_large_argument])
def test_a_tensor_without_a_copy_that_is_written_to_without_a_new_version(make: Any) -> None:
    """The tensor is refused once by its name, and then there is a copy."""

    def run(wrap: Wrap) -> list[Tensor]:
        torch.manual_seed(0)
        fn = make(wrap)
        found = []
        for number in range(5):
            x = leaf(6, 4)
            out = fn(x)
            if number or wrap is plainly:
                found.append(torch.autograd.grad(out.sum(), x)[0])
            else:
                with pytest.raises(MutationError, match=r"`Table.table`|`args\[1\]`"):
                    out.sum().backward()
        return found

    assert_alike(run(plainly)[1:], run(reactivate.checkpoint))


# -- small buffers that an earlier region has noted ---------------------------------------------------------------------


class Small(nn.Module):
    """Two buffers of a few bytes, one of which every call writes to."""

    table: Tensor
    mean: Tensor

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0).reshape(2, 2).to(kind) + (1j if kind.is_complex else 0))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
            self.table.mul_(1.5)
        table = torch.view_as_real(self.table.resolve_conj()).reshape(-1)[:4] if self.table.is_complex() else self.table
        return (x * self.mean + x * table.reshape(-1)).sin()  # which saves a view of the table


def transposed(module: Small) -> None:
    module.table.data = module.table.data.t()


def of_other_shape(module: Small) -> None:
    module.table.data = module.table.data.reshape(4, 1)


def negated(module: Small) -> None:
    module.table.data = torch._neg_view(module.table.data)


def conjugated(module: Small) -> None:
    module.table.data = module.table.data.conj()


def negated_and_doubled(module: Small) -> None:
    negated(module)
    module.table.data.mul_(2)


def conjugated_and_doubled(module: Small) -> None:
    conjugated(module)
    module.table.data.mul_(2)


def elsewhere(module: Small) -> None:
    module.table.data = module.table.data.clone() + 1


def elsewhere_and_back(module: Small) -> None:
    """Memory is used again for other elements, unless something holds it, as a saved view does."""
    address = module.table.data_ptr()
    module.table.data = torch.zeros(2, 2)
    found = [torch.full((2, 2), 7.0) for _ in range(1000)]
    module.table.data = next((tensor for tensor in found if tensor.data_ptr() == address), found[0])


def of_another_class(module: Small) -> None:
    module._buffers["table"] = module.table.as_subclass(Marked)


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


BETWEEN = [transposed, of_other_shape, negated, conjugated, elsewhere, of_another_class]
BEFORE = [*BETWEEN, negated_and_doubled, conjugated_and_doubled, elsewhere_and_back]


@each(("change", "is_between"), [*((item, True) for item in BETWEEN), *((item, False) for item in BEFORE)])
def test_a_small_buffer_that_changes_its_form(change: Callable[[Small], None], is_between: bool) -> None:
    def run(wrap: Callable[[nn.Module], Any]) -> list[Any]:
        module = Small(torch.complex64 if change in (conjugated, conjugated_and_doubled) else torch.float32)
        fn = wrap(module)
        x = torch.randn(3, 4, requires_grad=True)
        found: list[Any] = []
        for number in range(4):
            if number == 2 and is_between:
                change(module)
            out = fn(x)
            if number == 2 and not is_between:
                change(module)
            found += [out, *torch.autograd.grad(out.sum(), x), module.table.clone(), module.mean.clone()]
        return [*found, *(tensor.stride() for tensor in found)]

    compare(run)


@pytest.mark.parametrize("is_written", [False, True])
def test_memory_counts_as_rewound_only_where_it_is(is_written: bool) -> None:
    """A buffer that holds what it held, as most do, is saved as it is."""
    marked: SimpleQueue[bool] = SimpleQueue()  # which no recomputation rewinds

    def gradient(wrap: Wrap) -> Tensor:
        scale = torch.tensor([2.0, 3.0])

        def scaled(x: Tensor) -> Tensor:
            if reactivate.is_recomputing():
                marked.put(bool(rewound_memory))
            return (x * scale).sin() * scale

        x = torch.tensor([0.5, -1.5], requires_grad=True)
        out = wrap(scaled)(x)
        if is_written:
            scale.numpy()[0] = 7.0  # without a new version, so that autograd reads it
        (found,) = torch.autograd.grad(out.sum(), x)
        return found

    assert_bitwise(gradient(lambda fn: fn), gradient(reactivate.checkpoint), "gradient")
    assert marked.get() is is_written and marked.empty()
