"""`Lossy`: numbers of fewer bits, within the stated bound, and said not to be exact wherever anybody looks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from reactivate.errors import UsageError
from reactivate.storage import Disk, Host, Lossy, contract

CHECKS = {check.__name__: check for check in contract.CHECKS}
KINDS: dict[str, dict[str, Any]] = {
    "8 bits": {},
    "4 bits": {"bits": 4},
    "8 bits, zero points": {"zero_point": True},
    "4 bits, zero points, small blocks": {"bits": 4, "zero_point": True, "block": 6},
    "on the host": {"storage": Host(least_bytes=0)},
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("check", contract.CHECKS, ids=CHECKS)
@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind: str, check: Any) -> None:
    made: list[Lossy] = []

    def make() -> Lossy:
        made.append(Lossy(least_bytes=0, **KINDS[kind]))
        return made[-1]

    check(make)
    assert check is contract.leaves or sum(lossy.traffic.moved for lossy in made) > 0


def test_contract_on_a_disk(tmp_path: Any) -> None:
    disk = Disk(tmp_path, least_bytes=0)
    contract.check(lambda: Lossy(least_bytes=0, storage=disk))
    assert disk.traffic.moved > 100


def back(lossy: Lossy, tensor: Tensor) -> Tensor:
    return lossy.load(lossy.save(tensor))


def worst(found: Tensor, tensor: Tensor) -> float:
    return float((found.double() - tensor.double()).abs().max())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_error(bits: int, zero_point: bool, dtype: torch.dtype) -> None:
    """Half a step of the block at most, nearly reached, and not less than half of it in the mean."""
    torch.manual_seed(0)
    tensor = torch.randn(100, 128, dtype=torch.float64).to(dtype)
    found = back(Lossy(bits, zero_point=zero_point, least_bytes=0), tensor)
    levels = 2 ** (bits - 1) - 2
    rows = tensor.double()
    span = rows.amax(1) - rows.amin(1) if zero_point else 2 * rows.abs().amax(1)
    half = span / (4 * levels)
    off = (found.double() - rows).abs().amax(1)
    slack = rows.abs().amax(1) * torch.finfo(dtype).eps
    assert (off <= half * 1.001 + slack).all()
    assert (off > half * 0.8).all()


def test_zeros_stay_zeros_and_numbers_that_are_not_finite_what_they_are() -> None:
    tensor = torch.randn(64, 128)
    tensor[::2, ::3] = 0
    plain = {}
    for kind in ({}, {"bits": 4}, {"zero_point": True}, {"bits": 4, "zero_point": True}):
        lossy = Lossy(least_bytes=0, **kind)
        plain = back(lossy, tensor)
        assert torch.equal(plain[tensor == 0], tensor[tensor == 0])
        odd = tensor.clone()
        odd[:, 1], odd[:, 5], odd[:, 7] = torch.inf, -torch.inf, torch.nan
        odd[:, 127] = torch.inf
        found = back(lossy, odd)
        assert (found[:, 1] == torch.inf).all() and (found[:, 5] == -torch.inf).all() and found[:, 7].isnan().all()
        odd[:, [1, 5, 7, 127]] = 0
        found[:, [1, 5, 7, 127]] = 0
        assert torch.equal(found, back(lossy, odd))  # the others do not see them


def test_extreme_numbers() -> None:
    for dtype in FLOATS:
        info = torch.finfo(dtype)
        for kind in ({}, {"zero_point": True}, {"bits": 4}, {"bits": 4, "zero_point": True}):
            lossy = Lossy(least_bytes=0, **kind)
            for numbers in (
                [info.max, -info.max, 1.0],
                [info.max, -info.max / 3],
                [info.max, 0.0],
                [info.smallest_normal, -info.smallest_normal],
                [info.smallest_normal * info.eps],
                [-1.0, -2.0, -3.0],
                [0.0, 0.0],
                [],
            ):
                tensor = torch.tensor(numbers, dtype=dtype)
                found, bound = back(lossy, tensor), lossy.bound(tensor)
                assert found.isfinite().all() and bound is not None
                assert ((found.double() - tensor.double()).abs() <= bound.double()).all(), (dtype, kind, numbers)


def test_a_part_does_not_see_its_neighbours() -> None:
    whole = torch.randn(64, 128)
    whole[:, 64:] = 1e30
    lossy = Lossy(least_bytes=0)
    for part in (whole[:, :64], whole[:, :64].t(), whole[::2, 1:64:2], whole[:, :1].expand(64, 7)):
        found = back(lossy, part)
        assert worst(found, part) < 0.05 and found.stride() == part.stride()


def test_a_tensor_that_is_taken_in_twice_is_rounded_once() -> None:
    lossy = Lossy(least_bytes=0)
    tensor = torch.randn(64, 128)
    handles = [lossy.save(tensor), lossy.save(tensor.view(64, 128)), lossy.save(tensor.t())]
    assert handles[0].piece is handles[1].piece is not handles[2].piece
    assert lossy.traffic.moved_bytes == 2 * tensor.nbytes
    tensor.add_(1)
    assert lossy.save(tensor).piece is not handles[0].piece


def held(handle: Any) -> int:
    return sum(part.nbytes for part in handle.piece.held() if part is not None)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 2**16 + 2**9 * 4),
        ({"bits": 4}, 2**15 + 2**9 * 4),
        ({"block": 64}, 2**16 + 2**10 * 4),
        ({"zero_point": True}, 2**16 + 2**9 * 5),
    ],
)
def test_bytes(options: Any, size: int) -> None:
    assert held(Lossy(**options).save(torch.randn(2**8, 2**8))) == size


def test_what_stays_as_it_is() -> None:
    lossy = Lossy()
    small = torch.randn(1023)
    whole = torch.arange(10_000)
    for tensor in (
        small,
        whole,
        whole > 7,
        torch.randn(4096, dtype=torch.complex64),
        torch.nn.Parameter(torch.ones(4096)),
    ):
        assert lossy.save(tensor) is tensor and lossy.bound(tensor) is None
    assert lossy.save(torch.randn(1024)) is not small and lossy.traffic.moved == 1
    assert sum(lossy.traffic.stayed.values()) == 5


def test_all_others_go_to_the_storage_behind_it_with_every_bit(tmp_path: Any) -> None:
    disk = Disk(tmp_path, least_bytes=0, last=0)
    lossy = Lossy(storage=disk)
    whole = torch.arange(10_000)
    handle = lossy.save(whole)
    assert handle is not whole and disk.traffic.moved == 1 and lossy.bound(whole) is None
    assert torch.equal(lossy.load(handle), whole)


def test_no_random_numbers_are_drawn() -> None:
    before = torch.get_rng_state()
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(back(Lossy(least_bytes=0), tensor), back(Lossy(least_bytes=0), tensor))
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_and_equality() -> None:
    lossy = Lossy(4, block=32, zero_point=True, least_bytes=7, storage=Host())
    for other in (copy.deepcopy(lossy), pickle.loads(pickle.dumps(lossy))):
        assert other == lossy and hash(other) == hash(lossy) and other._quantizing is not lossy._quantizing
    assert Lossy() != lossy and not Lossy.exact and repr(Lossy()) == "Lossy(bits=8)"
    assert eval(repr(lossy)) == lossy
    assert Lossy(least_bytes="4KiB") == Lossy()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lossy(bits=7), r"bits=...\) takes 8 or 4; got 7"),
        (lambda: Lossy(bits=True), "got True"),
        (lambda: Lossy(block=3), r"block=...\) takes an even number of at least 2; got 3"),
        (lambda: Lossy(block=0), "got 0"),
        (lambda: Lossy(storage=Host), "takes a storage such as Host.*; got the class Host"),
        (lambda: Lossy(storage=Lossy()), "takes a storage that gives back every bit; got Lossy"),
        (lambda: Lossy(least_bytes="much"), r"Lossy\(least_bytes=...\) takes a size: .*; got 'much'"),
    ],
)
def test_refusals(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
