"""The cases of `test_storage_sharded`: each runs on all ranks, and asserts on each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Ran, assert_bitwise, random_states, seed_everything
from ranks import Cases, case, refused
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.dropin.transformer_engine import checkpoint
from reactivate.errors import StorageError
from reactivate.storage import Disk, Sharded, agreement, contract

CASES: Cases = {}
WIDTH, ROWS, BLOCKS = 12, 5, 4
SHORT = timedelta(seconds=3)


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x)).sin()))


class Model(nn.Module):
    """An embedding, so that what every block is called with is computed, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.seen: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if self.seen is not None:
                self.seen.append(x)
        return x


def model_and_data() -> tuple[Model, Tensor]:
    seed_everything()
    return Model(), torch.randn(ROWS, WIDTH)


def trained(
    policy: Any = None, steps: int = 2, prepare: Callable[[Model], None] = lambda model: None
) -> tuple[Ran, Any]:
    model, x = model_and_data()
    prepare(model)
    handle = None if policy is None else reactivate.apply(model, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    with observed_by(ran := Ran()):
        for step in range(steps):
            model(x + step).square().mean().backward()
            found |= {f"{name} {step}": parameter.grad.clone() for name, parameter in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return ran, found | random_states()


def assert_trains_as_plain(policy: Any, **options: Any) -> Ran:
    _, expected = trained(**options)
    ran, found = trained(policy, **options)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert_bitwise(value, found[name], name)
    return ran


def part(nbytes: int) -> int:
    return -(-nbytes // dist.get_world_size())


# -- what it keeps, and what comes back --------------------------------------------------------------------------------


@case(CASES, 2, 4)
def contract_of_a_storage() -> None:
    for check in contract.CHECKS:
        check(lambda: Sharded(least_bytes=0))


@case(CASES, 2)
def contract_with_a_disk_for_the_parts(directory: Path) -> None:
    for check in contract.CHECKS:
        check(lambda: Sharded(storage=Disk(directory, least_bytes=0), least_bytes=0))


@case(CASES, 2, 4)
def inputs_of_regions_train_as_plain() -> None:
    storage = Sharded(least_bytes=0)
    ran = assert_trains_as_plain(policies.full(inputs=storage))
    assert (ran.regions, ran.recomputations) == (2 * BLOCKS, 2 * BLOCKS)
    assert storage.traffic.moved == 2 * BLOCKS
    assert storage.traffic.loaded_bytes == storage.traffic.moved_bytes == 2 * BLOCKS * ROWS * WIDTH * 4


@case(CASES, 2, 4)
def saved_calls_train_as_plain() -> None:
    storage = Sharded(least_bytes=0)
    saved = policies.save_ops("linear", storage=storage)
    ran = assert_trains_as_plain(policies.first_match(saved, policies.full()))
    assert ran.regions == 2 * BLOCKS
    assert storage.traffic.moved >= 2 * BLOCKS and storage.traffic.loaded_bytes > 0


@case(CASES, 2, 4)
def a_rank_keeps_one_part_and_padding() -> None:
    for size in (1, 2, 3, 7, 8, 9, 64, 1001):
        for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64):
            storage = Sharded(least_bytes=0)
            nbytes = size * torch.empty((), dtype=dtype).element_size()
            tensor = torch.arange(size * 16, dtype=torch.uint8)[:nbytes]
            tensor = (tensor > 3) if dtype is torch.bool else tensor.clone().view(dtype)
            before = tensor.untyped_storage().data_ptr(), tensor._version, tensor.clone()
            handle = storage.save(tensor)
            assert storage.used_bytes == part(tensor.numel() * tensor.element_size())
            assert (tensor.untyped_storage().data_ptr(), tensor._version) == before[:2]
            assert_bitwise(storage.load(handle).view(torch.uint8), before[2].view(torch.uint8), "bytes")
            del handle
            assert storage.used_bytes == 0


@case(CASES, 2, 4)
def bytes_between_forward_and_backward() -> None:
    storage = Sharded(least_bytes=0)
    model, x = model_and_data()
    reactivate.apply(model, policies.full(inputs=storage))
    loss = model(x).square().mean()
    assert storage.used_bytes == BLOCKS * part(ROWS * WIDTH * 4)
    loss.backward()
    assert storage.used_bytes == 0


@case(CASES, 4)
def groups_of_two_in_four() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    storage = Sharded(groups[half], least_bytes=0)
    tensor = torch.full((7,), float(half))
    handle = storage.save(tensor)
    assert storage.used_bytes == 14
    assert_bitwise(storage.load(handle), tensor, "of this half")
    with pytest.raises(reactivate.errors.UsageError, match="which this process is in"):
        Sharded(groups[1 - half])


@case(CASES, 2, 4)
def the_first_argument_of_transformer_engines_function() -> None:
    def fn(x: Tensor, scale: Tensor) -> Tensor:
        return (x.sin() * scale).exp().cos()

    torch.manual_seed(0)
    scale = torch.rand(WIDTH) + dist.get_rank()  # of each rank its own, and not distributed
    gradients = []
    for call in (fn, partial(checkpoint, fn, distribute_saved_activations=True, tp_group=dist.group.WORLD)):
        torch.manual_seed(1)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        out = call(x * 2, scale)
        if call is not fn:
            assert Sharded(least_bytes=0).used_bytes == part(ROWS * WIDTH * 4)
        out.sum().backward()
        gradients.append(x.grad)
    assert_bitwise(*gradients, "gradient")


@case(CASES, 2)
def one_graph_several_backwards() -> None:
    """Retained graphs, two microbatches before the first backward, their backwards in either order, nested regions."""

    def once(wrap: Callable[..., Any], inner: Callable[..., Any]) -> list[Tensor]:
        model, x = model_and_data()

        def two(y: Tensor) -> Tensor:
            return model.blocks[1](inner(model.blocks[0])(y))

        losses = [wrap(two)(model.first(x + index)).square().mean() for index in range(2)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    storage = Sharded(least_bytes=0)
    expected = once(lambda fn: fn, lambda fn: fn)
    found = once(
        lambda fn: reactivate.checkpoint(fn, inputs=storage), lambda fn: reactivate.checkpoint(fn, inputs=storage)
    )
    assert len(found) > 4 and storage.traffic.moved == 2
    for one, other in zip(expected, found):
        assert_bitwise(one, other, "gradient")


# -- ranks that hold other things --------------------------------------------------------------------------------------


@case(CASES, 2)
def a_rank_that_holds_the_inputs_takes_part() -> None:
    """Rank 0 has the inputs of the blocks in a list, so that it needs nobody; the other one needs its parts (rule 1)."""

    def prepare(model: Model) -> None:
        model.seen = [] if dist.get_rank() == 0 else None

    storage = Sharded(least_bytes=0)
    assert_trains_as_plain(policies.full(inputs=storage), prepare=prepare)
    assert storage.traffic.moved == 2 * BLOCKS


@case(CASES, 2)
def the_next_one_comes_in_advance() -> None:
    """And only if all ranks name the same (rule 4)."""
    storage = Sharded(least_bytes=0)
    tensors = [torch.full((9,), float(index)) for index in range(3)]
    handles = [storage.save(tensor.clone()) for tensor in tensors]
    held = storage.load(handles[2])
    assert [handle.piece.coming is not None for handle in handles] == [False, True, False]
    second = storage.load(handles[1])
    assert [handle.piece.coming is not None for handle in handles] == [True, False, False]
    storage.load(handles[0])
    if dist.get_rank() == 0:
        del second  # the other rank has it, and names none
    time.sleep(0.05)
    del held
    assert_bitwise(storage.load(handles[2]), tensors[2], "third")
    assert [handle.piece.coming is not None for handle in handles] == [False, False, False]
    assert_bitwise(storage.load(handles[1]), tensors[1], "second")


@case(CASES, 2)
def small_tensors_stay() -> None:
    storage = Sharded()
    assert_trains_as_plain(policies.full(inputs=storage), steps=1)
    assert storage.traffic.moved == 0 and "smaller than" in str(storage.traffic)


# -- refusals ----------------------------------------------------------------------------------------------------------


@case(CASES, 2, 4)
def values_that_differ_are_refused_in_the_first_forward() -> None:
    model, x = model_and_data()
    handle = reactivate.apply(model, policies.full(inputs=Sharded(least_bytes=0)))
    x[3, 7] += dist.get_rank() == dist.get_world_size() - 1  # on the last rank alone
    with refused(StorageError, "`args[0]` of blocks.0", f"float32[{ROWS}, {WIDTH}]", "not the same on its", "Host()"):
        model(x)
    handle.remove()
    assert_trains_as_plain(policies.full(inputs=Sharded(least_bytes=0)), steps=1)  # the group is as it was


@case(CASES, 2)
def values_that_differ_later_are_refused_in_the_backward() -> None:
    model, x = model_and_data()
    reactivate.apply(model, policies.full(inputs=Sharded(least_bytes=0)))
    model(x).sum().backward()
    model.zero_grad()
    loss = model(x + dist.get_rank()).sum()
    with refused(StorageError, "`args[0]` of blocks.3", "not the same on its"):
        loss.backward()
    assert model.first.weight.grad is None


@case(CASES, 2)
def the_same_numbers_in_another_order_differ() -> None:
    storage = Sharded(least_bytes=0)
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with refused(StorageError, "not the same"):
        storage.save(rows if dist.get_rank() == 0 else rows.flip(0))


@case(CASES, 2)
def saved_calls_are_refused_by_name() -> None:
    saved = policies.save_ops("linear", storage=Sharded(least_bytes=0))
    region = reactivate.checkpoint(Block(), policy=saved)
    with refused(StorageError, "linear", "not the same"):
        region(torch.full((2, WIDTH), float(dist.get_rank()), requires_grad=True))


@case(CASES, 2)
def parts_of_a_sequence_are_refused() -> None:
    """Tensors of DTensor: a replicated one is sharded; one that is sharded already is refused by name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    storage = Sharded(mesh.get_group(), least_bytes=0)

    def run(placement: Any, wrap: Callable[..., Any]) -> Tensor:
        x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        wrap(lambda y: y.sin().exp())(x * 2).sum().backward()
        assert x.grad is not None
        return x.grad.full_tensor()

    def sharded(fn: Any) -> Any:
        return reactivate.checkpoint(fn, inputs=storage)

    expected = run(Replicate(), lambda fn: fn)
    assert_bitwise(run(Replicate(), sharded), expected, "gradient")
    assert storage.traffic.moved == 1
    storage = Sharded(mesh.get_group(), least_bytes=1)  # another one, which has gathered nothing
    with refused(StorageError, "`args[0]` of", "not the same"):
        run(Shard(0), sharded)


@case(CASES, 2)
def results_of_functional_collectives_are_waited_for() -> None:
    storage = Sharded(least_bytes=0)
    for size in (10, 300_000):
        reduced = all_reduce(torch.full((size,), 1.0 + dist.get_rank()), "sum", dist.group.WORLD)
        assert type(reduced) is AsyncCollectiveTensor
        handle = storage.save(reduced)
        assert_bitwise(storage.load(handle) + 0, torch.full((size,), 3.0), "sum")


@case(CASES, 2)
def shapes_that_differ_are_refused() -> None:
    storage = Sharded(least_bytes=0)
    with refused(StorageError, "rank 0 keeps tensor 0", "float32[4]", "rank 1 keeps tensor 0", "float32[5]"):
        storage.save(torch.ones(4 + dist.get_rank()))
    storage = Sharded(least_bytes=1)
    handle = storage.save(torch.ones(4))
    storage.load(handle)
    handle = storage.save(torch.ones(2, 2) if dist.get_rank() else torch.ones(4))  # of one size, in the second step
    with refused(StorageError, "rank 0 gathers tensor 1", "float32[4]", "float32[2, 2]"):
        storage.load(handle)


@case(CASES, 2)
def other_orders_are_refused() -> None:
    storage = Sharded(least_bytes=0)
    handles = [storage.save(torch.full((4,), float(index))) for index in range(2)]
    with refused(StorageError, "at different calls", "rank 0 gathers tensor 0", "rank 1 gathers tensor 1"):
        storage.load(handles[dist.get_rank()])
    for handle, value in zip(handles, (0.0, 1.0)):
        assert_bitwise(storage.load(handle), torch.full((4,), value), "afterwards")


@case(CASES, 2, timeout=SHORT)
def another_collective_of_the_same_size() -> None:
    """The rank that gathers tells; the other one has the bytes that it asked for, and finds out at its next collective."""
    storage = Sharded(least_bytes=0)
    handle = storage.save(torch.ones(4))
    if dist.get_rank() == 0:
        with refused(StorageError, "rank 1 ran another collective of the same size", "gathers tensor 0"):
            storage.load(handle)
    else:
        mine = torch.zeros(agreement._SIZE, dtype=torch.uint8)
        agreement._all_gather(torch.empty(2 * len(mine), dtype=torch.uint8), mine)
        with refused(StorageError, "did not come to this call"):
            storage.load(handle)


@case(CASES, 2, timeout=SHORT)
def a_rank_with_more_regions() -> None:
    """One rank keeps one more while the other gathers already: both raise, at once."""
    model, x = model_and_data()
    reactivate.apply(model, policies.full(inputs=Sharded(least_bytes=0)))
    with refused(StorageError, "at different calls", "keeps", "gathers", "same regions in the same order"):
        loss = model(x).sum()
        if dist.get_rank() == 1:
            loss = loss + model(x).sum()
        loss.backward()


@case(CASES, 2, timeout=SHORT)
def a_rank_with_fewer_regions() -> None:
    """In a later step, at whose end the ranks find out; the one that is done finds out in the next one."""
    model, x = model_and_data()
    reactivate.apply(model, policies.full(inputs=Sharded(least_bytes=0)))
    model(x).sum().backward()
    with refused(StorageError, ""):
        for _ in range(2):
            depth = BLOCKS if dist.get_rank() == 0 else BLOCKS - 1
            y = model.first(x)
            for block in model.blocks[:depth]:
                y = block(y)
            y.sum().backward()


@case(CASES, 2, timeout=SHORT)
def a_rank_that_raises_in_the_middle() -> None:
    """Its own error there, and on the other rank one that says where to look."""
    model, x = model_and_data()
    reactivate.apply(model, policies.full(inputs=Sharded(least_bytes=0)))
    loss = model(x).sum()
    if dist.get_rank() == 1:

        def fail(grad: Any) -> None:
            raise ValueError("rank 1 fails")

        model.blocks[2].down.weight.register_hook(fail)
        with pytest.raises(ValueError, match="rank 1 fails"):
            loss.backward()
        time.sleep(SHORT.total_seconds() + 1)  # alive, and silent
    else:
        with refused(StorageError, "Rank 0 of the 2", "gathers tensor", "of blocks.1", "errors of the other ranks"):
            loss.backward()


@case(CASES, 2)
def a_slow_rank_is_waited_for() -> None:
    def prepare(model: Model) -> None:
        if dist.get_rank() == 1:
            model.blocks[1].up.weight.register_hook(lambda grad: time.sleep(0.5))

    assert_trains_as_plain(policies.full(inputs=Sharded(least_bytes=0)), steps=1, prepare=prepare)


@case(CASES, 2, timeout=SHORT, is_killed=True)
def a_killed_rank() -> None:
    model, x = model_and_data()
    reactivate.apply(model, policies.full(inputs=Sharded(least_bytes=0)))
    loss = model(x).sum()
    if dist.get_rank() == 1:
        model.blocks[2].down.weight.register_hook(lambda grad: os._exit(1))
        loss.backward()
    with refused(StorageError, "Rank 0 of the 2"):
        loss.backward()
