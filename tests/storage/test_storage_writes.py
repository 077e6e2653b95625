"""Writes between two regions that no version counter sees: each region reads what it was called with (Rule 9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from count_ops import CountOps
from oracle import assert_bitwise
from torch import Tensor

import reactivate
from reactivate._bits import checksum
from reactivate.storage import Disk, Sharded, spool


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["disk", "sharded"])
def storage(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A storage that keeps nothing where it is."""
    monkeypatch.setattr(spool, "WRITING", 0)  # each tensor is in the file when the next one comes
    return Disk(tmp_path, least_bytes=0, last=0) if request.param == "disk" else Sharded(least_bytes=0)


def plain(size: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distributed(size: tuple[int, int], seed: int) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    return distribute_tensor(plain(size, seed), mesh, [Shard(0) if seed else Replicate()])


def linear(fixed: Tensor) -> Callable[[Tensor], Tensor]:
    """A region whose gradient does not depend on the values of its input."""
    return lambda x: x @ fixed


def curve(x: Tensor) -> Tensor:
    return (x * x).sin().tanh()


def trained(make: Any, write: Callable[[Tensor], Any], wrap: Any) -> list[Tensor]:
    """Call two regions with one tensor, and write to it in between."""
    weight = make((8, 8), 0).requires_grad_()
    h = make((8, 8), 1) @ weight
    region = wrap(linear(make((8, 8), 4)))
    early = region(h)
    late = [region(make((8, 8), seed) @ weight) for seed in (2, 3)]  # so that `h` is where the storage keeps it
    write(h)
    result = wrap(curve)(h)
    del h
    (sum(late, early) + result).sum().backward()
    assert weight.grad is not None
    return [result.detach(), weight.grad]


def multiply(h: Tensor) -> None:
    h.data.mul_(3)


def negate(h: Tensor) -> None:
    h.data.neg_()


def replace(h: Tensor) -> None:
    h.data = h.data * 3


def by_numpy(h: Tensor) -> None:
    h.detach().numpy()[...] *= 3


def through_the_wrapper(h: Tensor) -> None:
    with torch.no_grad():
        h.add_(1)


def of_the_part(h: Any) -> None:
    h.to_local().data.mul_(3)


def nothing(h: Tensor) -> None:
    pass


WRITES = [(plain, multiply), (plain, negate), (plain, replace), (plain, by_numpy), (distributed, of_the_part)]


@pytest.mark.parametrize("determinism", ["first", "metadata"])
@pytest.mark.parametrize(("make", "write"), [*WRITES, (distributed, through_the_wrapper)])
def test_the_second_region_reads_what_was_written(make: Any, write: Any, determinism: str, storage: Any) -> None:
    expected = trained(make, write, lambda fn: fn)
    ran = oracle.Watched()
    with oracle.observed_by(ran):
        found = trained(make, write, lambda fn: reactivate.checkpoint(fn, inputs=storage, check=determinism))
    assert ran.regions == 4 and ran.recomputations > 0 and storage.traffic.moved == 4
    for one, other in zip(expected, found, strict=True):
        assert_bitwise(one, other, "the result or the gradient")


@pytest.mark.parametrize("make", [plain, distributed])
def test_without_a_write_it_is_moved_once(make: Any, storage: Any) -> None:
    trained(make, nothing, lambda fn: reactivate.checkpoint(fn, inputs=storage))
    assert storage.traffic.moved == 4 and storage.traffic.moved_bytes == 3 * 64 * 8


@pytest.mark.parametrize("alias", [lambda h: h, Tensor.detach], ids=["itself", "an alias"])
def test_a_wrapper_that_is_written_to_before_its_parts_are_copied_is_refused(alias: Any, tmp_path: Path) -> None:
    disk = Disk(tmp_path, least_bytes=0, last=1)
    weight = distributed((8, 8), 0).requires_grad_()
    h = distributed((8, 8), 1) @ weight
    out = reactivate.checkpoint(curve, inputs=disk)(h)
    other = alias(h)
    del h
    through_the_wrapper(other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("start", [0, 1])
def test_a_checksum_sees_highest_bits(dtype: torch.dtype, start: int) -> None:
    """The signs of any part of a tensor: sums of integers that wrap see whether their number is odd, and no more."""
    missed = []
    for count in (*range(1, 70), 1024, 4096):
        values = torch.arange(count * dtype.itemsize, dtype=torch.uint8)
        for step in (1, 2, 3, 4, 8):
            changed = values.clone()
            changed.view(-1, dtype.itemsize)[::step, -1] ^= 128
            some = [torch.cat([tensor[: start * dtype.itemsize], tensor]) for tensor in (values, changed)]
            one, other = (checksum(tensor.view(dtype)[start:]) for tensor in some)
            if one == other:
                missed.append((count, step))
    assert not missed


def test_a_tensor_with_the_id_of_one_that_is_gone_is_taken_in_as_any_other(tmp_path: Path) -> None:
    """The plans of a step depend on which ops a storage runs: not on where Python makes its objects."""
    disk = Disk(tmp_path, least_bytes=0, last=0)
    handles, ids, again = [], set[int](), list[Counter[str]]()
    for number in range(500):
        tensor = plain((4, 4), number)
        with CountOps() as counted:
            handles.append(disk.save(tensor))
        if not number:
            first = counted.ops
        if id(tensor) in ids:
            again.append(counted.ops)
        ids.add(id(tensor))
        del tensor
    assert again and all(ops == first for ops in again)
