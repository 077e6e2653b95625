"""Memory and scale of state, counted and never timed."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory import alive, allocated_by, without_collector
from oracle import Watched
from state_programs import Holding, Programs, Wrap, backward, curve, gradients, inputs, leaf, state_of, train
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_with = PROGRAMS.right, PROGRAMS.right_with


# -- large containers ---------------------------------------------------------------------------------------------------


@right
def closed_over_list_of_many_numbers(wrap: Wrap) -> Any:
    numbers = list(range(200_000))
    return [train(wrap(lambda x: curve(x, numbers[-1] / len(numbers))), [leaf(4) for _ in range(3)]), len(numbers)]


@right
def closed_over_list_of_many_numbers_grows(wrap: Wrap) -> Any:
    numbers = list(range(200_000))

    def fn(x: Tensor) -> Tensor:
        numbers.append(len(numbers))
        return curve(x, numbers[-1] / 200_000)

    return [train(wrap(fn), [leaf(4) for _ in range(3)]), len(numbers), numbers[-1]]


@right
def vocabulary_is_in_the_reach_of_a_module(wrap: Wrap) -> Any:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.vocabulary = {f"word{index}": index for index in range(50_000)}
            self.trainer = SimpleNamespace(model=self, log=[0.0])

        def forward(self, x: Tensor) -> Tensor:
            self.trainer.log[0] += 1
            return curve(self.linear(x), self.vocabulary["word7"])

    module = Embed()
    return [train(wrap(module), [leaf(6, 4) for _ in range(3)]), state_of(module), module.trainer.log]


@right
def batch_is_a_slice_of_a_large_data_set(wrap: Wrap) -> Any:
    data = torch.rand(10_000, 4)
    weight = leaf(4)
    checkpointed = wrap(lambda batch: curve(batch * weight, 2))
    for index in range(3):
        backward(checkpointed(data[index * 8 : index * 8 + 8]))
    return [weight.grad, data[:32]]


@right_with(recomputations=120)
def many_blocks_of_one_model(wrap: Wrap) -> Any:
    class Model(Holding):
        def step(self, index: int, x: Tensor) -> Tensor:
            return self.norm(curve(self.blocks[index](x), 2))

    model = Model(blocks=nn.ModuleList([nn.Linear(4, 4) for _ in range(60)]), norm=nn.BatchNorm1d(4))
    step = wrap(model.step)

    def forward(x: Tensor) -> Tensor:
        for index in range(len(model.blocks)):
            x = step(index, x)
        return x

    return [train(forward, [leaf(6, 4) for _ in range(2)]), state_of(model)]


# -- what stays alive ---------------------------------------------------------------------------------------------------


class Stores(nn.Module):
    """A module that stores a tensor with its graph, as those do that show their attention or an extra loss."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.linear(x))
        return self.last.square()


def stores_in_a_module() -> Callable[..., Tensor]:
    return Stores()


def stores_its_graph_in_a_closure() -> Callable[..., Tensor]:
    stored: dict[str, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        stored["last"] = x.tanh()
        return stored["last"].square()

    return fn


def carries_a_detached_state() -> Callable[..., Tensor]:
    class Carries(Holding):
        def forward(self, x: Tensor) -> Tensor:
            out = (x + self.hidden).tanh()
            self.hidden = out.detach()
            return out.square()

    return Carries(hidden=torch.zeros(6, 4))


@pytest.mark.parametrize("make", [stores_in_a_module, stores_its_graph_in_a_closure, carries_a_detached_state])
def test_forward_only_calls_keep_few_inputs(make: Callable[[], Callable[..., Tensor]]) -> None:
    fn = reactivate.checkpoint(make())
    inputs: list[weakref.ref[Tensor]] = []
    with without_collector():
        for _ in range(20):
            x = leaf(6, 4)
            inputs.append(weakref.ref(x))
            fn(x)
            del x
        assert alive(inputs) <= 2


def stores_in_a_closure() -> Callable[..., Tensor]:
    stored: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        stored[:] = [x.detach().sin()]
        return curve(x, stored[0])

    return fn


def writes_a_buffer() -> Callable[..., Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def counts_in_a_list() -> Callable[..., Tensor]:
    seen: list[int] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(1)
        return curve(x, len(seen))

    return fn


@pytest.mark.parametrize("make", [stores_in_a_module, stores_in_a_closure, writes_a_buffer, counts_in_a_list])
def test_nothing_outlives_backward(make: Callable[[], Callable[..., Tensor]]) -> None:
    """With the collector off, the inputs and outputs of a step are gone after it, but for those of the last one."""
    fn = make()
    checkpointed = reactivate.checkpoint(fn)
    references: list[weakref.ref[Tensor]] = []
    with without_collector():
        for _ in range(5):
            x = leaf(6, 4)
            out = checkpointed(x)
            references += [weakref.ref(x), weakref.ref(out)]
            out.square().sum().backward()
            del x, out
        assert alive(references) <= 1, "at most the input that the stored tensor's graph holds, as in the plain model"
        if isinstance(fn, Stores):
            del fn.last
        assert alive(references) == 0


@pytest.mark.parametrize("make", [stores_in_a_module, stores_in_a_closure, writes_a_buffer, counts_in_a_list])
def test_the_function_is_freed_with_its_last_reference(make: Callable[[], Callable[..., Tensor]]) -> None:
    with without_collector():
        fn = make()
        reference = weakref.ref(fn)
        checkpointed = reactivate.checkpoint(fn)
        backward(checkpointed(leaf(6, 4)))
        del fn, checkpointed
        assert reference() is None


def test_a_scalar_loss_in_an_attribute_does_not_keep_the_recomputed_graph() -> None:
    """After backward the attribute holds the forward's loss, whose graph keeps as little as before."""

    class Experts(Holding):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.tanh(self.linear(x))
            self.aux = x.mean()
            return x

    layers = [Experts(linear=nn.Linear(64, 64)) for _ in range(8)]
    regions = [reactivate.checkpoint(layer) for layer in layers]
    x = leaf(256, 64)
    activation = x.numel() * x.element_size()
    for layer in layers:
        layer.linear.weight.grad = torch.zeros(64, 64)
        layer.linear.bias.grad = torch.zeros(64)
    x.grad = torch.zeros_like(x)

    def step() -> None:
        h = x
        for region in regions:
            h = region(h)
        (h.square().sum() + sum(layer.aux for layer in layers)).backward()

    with without_collector():
        step()
        assert allocated_by(step).left_bytes < activation, "no activation of a second step is left"
        assert all(layer.aux.grad_fn is not None for layer in layers)


def test_buffers_that_nobody_writes_are_copied_once() -> None:
    """A model's state has one shadow; a later call keeps less than one more buffer."""
    buffers = 16
    size = 1 << 14

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(buffers):
                self.register_buffer(f"table{index}", torch.rand(size))

        def forward(self, x: Tensor) -> Tensor:
            for index in range(buffers):
                x = curve(x, self._buffers[f"table{index}"][:4])
            return x

    fn = reactivate.checkpoint(Tables())
    x = leaf(2, 4)
    for _ in range(2):
        backward(fn(x))
    kept: list[Tensor] = []
    allocated = allocated_by(lambda: kept.append(fn(x)))
    assert allocated.left_bytes < size * 4, "a call in flight does not hold copies of its own"


class Table(nn.Module):
    """Has a method that writes through `.data`, as initialisers do, which no region calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(512, 512))
        self.init_table()

    def init_table(self) -> None:
        self.table.data.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return curve(x, self.table[0, :4])


class RestartedTable(Table):
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            self.init_table()
        return super().forward(x)


def tensor_bytes() -> int:
    """Return the bytes of all tensors that Python code can reach."""
    tensors = [item for item in gc.get_objects() if type(item) is Tensor]
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors}.values())


def test_copies_of_state_go_with_the_policy() -> None:
    """Copies that a region refers to stay until its backward."""
    model = nn.Sequential(Table())
    x, size = leaf(6, 4), model[0].table.nbytes
    handle = reactivate.apply(model, policies.recompute_modules("0"))
    for _ in range(2):
        backward(model(x))
    out = model(x)
    gc.collect()
    applied = tensor_bytes()
    handle.remove()
    assert tensor_bytes() > applied - size
    model[0].table.zero_()  # the region reads what was there
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    del out
    assert tensor_bytes() <= applied - size
    (expected,) = torch.autograd.grad(curve(x, torch.full((4,), 0.5)).square().sum(), x)
    assert torch.equal(gradient, expected)


def test_microbatches_in_flight_share_the_shadow_of_state_that_did_not_change() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module.register_buffer("table", torch.rand(512, 512))
    checkpointed = reactivate.checkpoint(lambda x: curve(module(x), module.table[0, :4]))
    backward(checkpointed(leaf(6, 4)))
    leaves, kept = [leaf(6, 4) for _ in range(8)], []
    allocated = allocated_by(lambda: kept.extend(checkpointed(x) for x in leaves))
    assert allocated.left_bytes < 2 * module.table.numel() * 4
    backward(*kept)


@pytest.mark.parametrize("kind", [Table, RestartedTable])
def test_versions_are_relied_on_unless_code_asks_for_what_moves_none(kind: type[Table]) -> None:
    module = kind()
    checkpointed, x = reactivate.checkpoint(module), leaf(6, 4)
    for _ in range(2):
        backward(checkpointed(x))
    allocated = allocated_by(lambda: backward(checkpointed(x)))
    assert (allocated.peak_bytes > module.table.nbytes) is (kind is RestartedTable)


def test_a_region_keeps_nothing_for_each_block_that_it_does_not_touch() -> None:
    """A step over N blocks allocates for state in proportion to N, not to its square."""

    def left_for(blocks: int) -> int:
        class Model(Holding):
            def step(self, index: int, x: Tensor) -> Tensor:
                return self.blocks[index](x).tanh()

        model = Model(blocks=nn.ModuleList([nn.BatchNorm1d(4) for _ in range(blocks)]))
        step = reactivate.checkpoint(model.step)

        def forward() -> Tensor:
            x = leaf(6, 4)
            for index in range(blocks):
                x = step(index, x)
            return x

        backward(forward())
        return allocated_by(forward).left_bytes

    assert left_for(64) < 8 * left_for(16)


def test_regions_are_counted_once_a_call() -> None:
    """Two hundred regions over one `self` are two hundred recomputations, whatever is retained."""
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(200)])
    watched = Watched()
    with observed_by(watched):
        region = reactivate.checkpoint(lambda index, x: curve(model[index](x), 2))
        x = leaf(6, 4)
        h = x
        for index in range(200):
            h = region(index, h)
        backward(h * 1e-3)
    assert (watched.regions, watched.recomputations) == (200, 200)
    assert all(gradient is not None for gradient in gradients(model).values())


# -- hooks on unusual inputs, deep nesting ------------------------------------------------------------------------------


def nested_to_the_depth(wrap: Wrap, depth: int) -> Any:
    weight = leaf(4)
    fn: Callable[[Tensor], Tensor] = wrap(lambda x: curve(x, 0.1))
    for _ in range(depth - 1):

        def outer(x: Tensor, fn: Callable[[Tensor], Tensor] = fn) -> Tensor:
            return fn(x) * weight.sin()

        fn = wrap(outer)
    (x,) = inputs(1)
    backward(fn(x))
    return [x.grad, weight.grad]


PROGRAMS.rows(
    nested_to_the_depth,
    {
        "twenty_nested_regions": (20,),
        "a_hundred_nested_regions": (100,),  # at Python's own recursion limit
    },
    recomputations=lambda depth: depth,
)


@right_with(recomputations=200)
def two_hundred_nested_regions(wrap: Wrap) -> Any:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return recursive_to_the_depth(wrap, 200)
    finally:
        sys.setrecursionlimit(limit)


def recursive_to_the_depth(wrap: Wrap, depth: int) -> Any:
    weight = leaf(4)

    def fn(x: Tensor, depth: int) -> Tensor:
        return wrap(fn)(x, depth - 1) * weight.sin() if depth > 1 else curve(x, 0.1)

    (x,) = inputs(1)
    backward(wrap(fn)(x, depth))
    return [x.grad, weight.grad]


@right_with(recomputations=20)
def regions_of_twenty_blocks_over_one_model(wrap: Wrap) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(20)])
            self.register_buffer("steps", torch.zeros(1, 1))

        def step(self, index: int, x: Tensor) -> Tensor:
            self.steps.add_(1)
            return curve(self.blocks[index](x), 1 + self.steps.clone())

    model = Model()
    step = wrap(model.step)

    def forward(x: Tensor) -> Tensor:
        for index in range(len(model.blocks)):
            x = step(index, x)
        return x * 0.1

    return [train(forward, inputs(2)), state_of(model)]
