"""State in unusual places: caches, large containers, callable objects, arrays, streams, statistics in larger tensors."""

from __future__ import annotations

import array
import enum
import functools
import io
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import pytest
import torch
from oracle import trained
from several import each
from state_programs import Program, Programs, Wrap, check_program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler

import reactivate

programs = Programs()

STEPS = 4
MANY = 5_000  # more than are looked at


def steps(wrap: Wrap, forward: Callable[[Tensor], Tensor], told: Callable[[], list[Any]] = list) -> list[Any]:
    """Train one linear layer with `forward` behind it, on batches of several sizes."""
    linear = nn.Linear(4, 4)
    call = wrap(lambda x: forward(linear(x)).sin())
    found: list[Any] = []
    for step in range(STEPS):
        call(torch.randn(2 + step % 3, 4)).square().sum().backward()
        found += [linear.weight.grad, *told()]
    return found


# -- functools.cache ---------------------------------------------------------------------------------------------------


@programs.right
def a_cache_that_draws_random_numbers(wrap: Wrap) -> Any:
    mask = functools.cache(lambda rows: torch.rand(rows, 4) > 0.3)
    mask(2)
    return steps(wrap, lambda x: F.dropout(x * mask(len(x))))


@programs.right
def a_cache_that_fills_a_table(wrap: Wrap) -> Any:
    tables: dict[int, Tensor] = {}

    @functools.cache
    def rows_of(rows: int) -> int:
        tables[rows] = torch.arange(rows)[:, None] / rows
        return rows

    return steps(wrap, lambda x: x * tables[rows_of(len(x))], lambda: [len(tables)])


class Built(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.built = nn.Linear(4, 4), 0

    @functools.lru_cache(None)  # noqa: B019
    def mask(self, rows: int) -> Tensor:
        self.built += 1
        self.register_buffer(f"mask{rows}", torch.rand(rows, 4))
        return getattr(self, f"mask{rows}")  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.mask(len(x)) * self.built).sin()


@programs.right
def a_cached_method_that_registers_buffers(wrap: Wrap) -> Any:
    model = Built()
    call = wrap(model)
    for step in range(STEPS):
        call(torch.randn(2 + step % 3, 4)).sum().backward()
    found = [model.linear.weight.grad, model.built, *model.buffers()]
    Built.mask.cache_clear()
    return found


@functools.cache
def of_this_module(rows: int) -> Tensor:
    return torch.rand(rows, 4)


@programs.right
def a_cache_by_a_name_of_the_module(wrap: Wrap) -> Any:
    of_this_module.cache_clear()
    return steps(wrap, lambda x: F.dropout(x * of_this_module(len(x))))


@programs.right
def a_cache_of_many_results(wrap: Wrap) -> Any:
    scale = functools.cache(lambda number: random.random())
    for number in range(MANY):
        scale(-number)
    return steps(wrap, lambda x: x * scale(len(x)), lambda: [scale(1)])


@programs.right
def an_object_in_a_cache(wrap: Wrap) -> Any:
    counter = functools.cache(lambda: [1.0])

    def forward(x: Tensor) -> Tensor:
        counter()[0] += 1
        return x * counter()[0]

    return steps(wrap, forward, lambda: [counter()[0]])


def test_a_cache_keeps_what_the_forward_computed() -> None:
    table = functools.cache(lambda rows: torch.rand(rows, 4))
    x = torch.randn(3, 4, requires_grad=True)
    out = reactivate.checkpoint(lambda x: (x * table(len(x))).sin())(x)
    kept = table(3)
    out.sum().backward()
    assert table(3) is kept


# -- more items than are looked at -------------------------------------------------------------------------------------


class Doubled(list[float]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(int(index)) * 2


class Counted(dict[int, float]):
    reads = 0

    def __getitem__(self, key: int) -> float:
        self.reads += 1
        return super().__getitem__(key)


@programs.right
def a_long_memory(wrap: Wrap) -> Any:
    memory: deque[Any] = deque([0.5] * MANY)

    def forward(x: Tensor) -> Tensor:
        memory.append(x.detach().mean().item())
        return x * memory[-1]

    return steps(wrap, forward, lambda: [len(memory), memory[-1]])


@programs.right
def a_long_list_whose_last_item_is_replaced(wrap: Wrap) -> Any:
    memory: list[Any] = [0.5] * MANY

    def forward(x: Tensor) -> Tensor:
        memory.append(0.1)
        memory[-1] = x.detach().mean().item()
        return x * memory[-1]

    return steps(wrap, forward, lambda: [len(memory), memory[-1]])


@programs.right
def a_long_list_of_a_class_without_slices(wrap: Wrap) -> Any:
    memory = Doubled([1.0] * MANY)

    def forward(x: Tensor) -> Tensor:
        memory.append(memory[-1] + 1)
        return x * memory[-1]

    return steps(wrap, forward, lambda: [len(memory)])


@programs.right
def a_long_dict_that_counts_its_reads(wrap: Wrap) -> Any:
    memory = Counted(enumerate([1.0] * MANY))

    def forward(x: Tensor) -> Tensor:
        memory[len(memory)] = 1.5
        return x * memory[len(memory) - 1] * memory.reads

    return steps(wrap, forward, lambda: [len(memory), memory.reads])


def test_what_was_put_in_front_stays() -> None:
    """Nothing is taken off: it is not told from what came behind."""
    memory: deque[Any] = deque(range(MANY))

    def fn(x: Tensor) -> Tensor:
        memory.appendleft("new")
        return x.sin()

    reactivate.checkpoint(fn)(torch.ones(2, requires_grad=True)).sum().backward()
    assert [*memory][2:] == [*range(MANY)]


# -- classes that are also callable, or derived from others ------------------------------------------------------------


class Noise(random.Random):
    def __call__(self) -> float:
        return self.gauss(0, 1)


class NumpyNoise(numpy.random.RandomState):
    def __call__(self) -> float:
        return float(self.normal())


class TorchNoise(torch.Generator):
    def __call__(self) -> Tensor:
        return torch.rand(4, generator=self)


class Counts(array.array):  # type: ignore[type-arg]
    def __call__(self) -> float:
        self[0] += 1
        return float(self[0])


class NumpyCounts(numpy.ndarray[Any, Any]):
    def __call__(self) -> float:
        self[0] += 1
        return float(self[0])


class Lines(io.StringIO):
    """A log."""

    def __call__(self) -> float:
        self.write("x")
        return len(self.getvalue())


class Bytes(bytearray):
    def __call__(self) -> float:
        self[0] += 1
        return self[0]


CALLED: dict[str, Callable[[], Any]] = {
    "random": lambda: Noise(1),
    "numpy's random": lambda: NumpyNoise(1),
    "torch's random": lambda: TorchNoise().manual_seed(1),
    "array": lambda: Counts("d", [0.0]),
    "numpy's array": lambda: numpy.zeros(2).view(NumpyCounts),
    "stream": Lines,
    "bytes": lambda: Bytes([1]),
}


def called(wrap: Wrap, make: Callable[[], Any]) -> Any:
    source = make()
    return steps(wrap, lambda x: x * source())


programs.rows(called, {f"{name} with a call": (make,) for name, make in CALLED.items()})


@programs.right
def a_sampler_with_a_generator(wrap: Wrap) -> Any:
    sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(3))
    return steps(wrap, lambda x: x * next(iter(sampler)))


@programs.right
def a_member_of_an_enum(wrap: Wrap) -> Any:
    class Act(enum.Enum):
        SCALED = 1

        def __call__(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    Act.SCALED.count = 0  # type: ignore[attr-defined]
    act = Act.SCALED
    return steps(wrap, lambda x: act(x), lambda: [act.count])


@programs.right
def an_attribute_of_an_error(wrap: Wrap) -> Any:
    error: Any = ValueError()
    error.count = 0

    def forward(x: Tensor) -> Tensor:
        error.count += 1
        return x * error.count

    return steps(wrap, forward, lambda: [error.count])


# -- arrays ------------------------------------------------------------------------------------------------------------


@programs.right
def an_array_that_gets_another_shape(wrap: Wrap) -> Any:
    numbers: Any = numpy.arange(4.0)

    def forward(x: Tensor) -> Tensor:
        axes = numbers.ndim
        numbers.shape = (2, 2) if axes == 1 else (4,)
        return x * axes

    return steps(wrap, forward, lambda: [numbers.ndim])


@programs.right
def an_array_that_gets_another_dtype(wrap: Wrap) -> Any:
    numbers: Any = numpy.arange(4.0)

    def forward(x: Tensor) -> Tensor:
        numbers.dtype = numpy.int64 if numbers.dtype == numpy.float64 else numpy.float64
        return x * float(numbers.dtype == numpy.int64)

    return steps(wrap, forward)


@programs.right
def what_is_under_a_mask(wrap: Wrap) -> Any:
    numbers: Any = numpy.ma.masked_array([1.0, 2.0], mask=[0, 1])

    def forward(x: Tensor) -> Tensor:
        numbers.data[1] += 1
        return x * float(numbers.data[1])

    return steps(wrap, forward, lambda: numbers.data.tolist())


def test_an_array_that_was_resized() -> None:
    numbers: Any = numpy.ones(3)

    def fn(x: Tensor) -> Tensor:
        numbers.resize(len(numbers) + 1, refcheck=False)
        return x.sin() * float(numbers[0])

    out = reactivate.checkpoint(fn)(torch.ones(2, requires_grad=True))
    with pytest.raises(reactivate.errors.UnsupportedError, match=r"resized in place .* from \(3,\) to \(4,\)"):
        out.sum().backward()


# -- writes without a new version ---------------------------------------------------------------------------------------


class Writing(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any], size: int = 4) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4), write
        self.register_buffer("buffer", torch.ones(size, size))

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.buffer)
        return (self.linear(x) @ self.buffer[:4, :4]).sin()


def to_array(buffer: Tensor) -> None:
    found = numpy.asanyarray(buffer)
    found += 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "asanyarray": to_array,
    "apply_": lambda buffer: buffer.apply_(lambda value: value + 1),
    "map_": lambda buffer: buffer.map_(buffer, lambda value, other: value * 1.5),
    "storage": lambda buffer: buffer.untyped_storage().copy_((buffer * 1.5).untyped_storage()),
}


def written(wrap: Wrap, write: Callable[[Tensor], Any], size: int) -> Any:
    model = Writing(write, size)
    return trained(model, wrap(model), STEPS)


programs.rows(written, {f"{name} of {size}": (write, size) for name, write in WRITES.items() for size in (4, 80)})


class Domains(nn.Module):
    """Batch norm with statistics for each domain, in the rows of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(4, 4), 0
        self.register_buffer("statistics", torch.stack([torch.zeros(3, 4), torch.ones(3, 4)]))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.statistics[:, self.steps % 3]
        self.steps += 1
        y = F.batch_norm(self.linear(x), mean, variance, training=True)
        return (y * self.statistics.sum()).tanh()  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """Batch norm whose statistics are parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mean, self.variance = (nn.Parameter(item, requires_grad=False) for item in (torch.zeros(4), torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(self.linear(x), self.mean, self.variance, training=True)
        return (y * self.variance).tanh()


def normed(wrap: Wrap, kind: type[nn.Module]) -> Any:
    model = kind()
    return trained(model, wrap(model), STEPS)


programs.rows(normed, {"statistics in one buffer": (Domains,), "statistics in parameters": (Frozen,)})


# -- attributes that cannot be asked for --------------------------------------------------------------------------------


class FallsBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.options, self.misses = nn.Linear(4, 4), {"scale": 2.0}, 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            self.__dict__["misses"] += 1
            return self.__dict__["options"][name]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).sin()


@programs.right
def a_module_that_looks_attributes_up_in_a_dict(wrap: Wrap) -> Any:
    model = FallsBack()
    return trained(model, wrap(model), STEPS, lambda: [model.misses])


class Items(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()  # type: ignore[no-any-return]


@programs.right
def a_callable_dict_with_attributes(wrap: Wrap) -> Any:
    items = Items(linear=nn.Linear(4, 4))
    return trained(items.linear, wrap(items), STEPS)


class Listed(nn.Linear):
    def named_parameters(self, prefix: str = "") -> Iterable[Any]:  # type: ignore[override]
        return super().named_parameters(prefix)


@programs.right
def a_module_that_lists_its_parameters_itself(wrap: Wrap) -> Any:
    model = Listed(4, 4)
    call = wrap(model)
    for _ in range(STEPS):
        call(torch.randn(3, 4)).sin().sum().backward()
    return [model.weight.grad]


@each("program", programs.listed, ids=list(map(str, programs.listed)))
def test_programs(program: Program) -> None:
    check_program(program)


@each("program", programs.listed, ids=list(map(str, programs.listed)))
def test_where_calls_are_not_compared(program: Program) -> None:
    def run(wrap: Wrap) -> Any:
        return program.run(lambda fn, **options: wrap(fn, check="metadata", **options))

    check_program(Program(run, name=str(program)))
