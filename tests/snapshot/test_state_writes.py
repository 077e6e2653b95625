"""Writes to buffers, in every way: the recomputation reads what the forward read before and after them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_alike
from several import each
from state_programs import (
    Program,
    Programs,
    Scale,
    Wrap,
    as_region,
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
from reactivate.errors import MutationError

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_by, right_with, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with, PROGRAMS.loud


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


@right_by(as_region, count=6)
class CircularQueue(nn.Module):
    """The queue of a contrastive loss, with a pointer that is a tensor."""

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
