"""`storage.Sharded`: each rank keeps a part of what all of them hold alike. The cases are in `sharded_cases`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import errors_of, listed
from sharded_cases import CASES
from torch._subclasses import FakeTensorMode

import reactivate
from reactivate.errors import UsageError
from reactivate.storage import Sharded, contract, series


@pytest.mark.parametrize("name", listed(CASES))
def test_on_ranks(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    errors = errors_of("sharded_cases", name, tmp_path_factory)
    assert not errors, "\n".join(errors)


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_a_group_of_one_keeps_all_of_it(check: object, alone: None) -> None:
    assert callable(check)
    check(lambda: Sharded(least_bytes=0))


def test_without_a_group() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        Sharded()


def test_what_is_no_group_and_no_storage(alone: None) -> None:
    with pytest.raises(UsageError, match=r"get_group\(\"tp\"\)"):
        Sharded("tp")
    with pytest.raises(UsageError, match=r"such as Host\(\)"):
        Sharded(storage=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs the same tensor on all ranks"):
        Sharded(storage=Sharded())
    with pytest.raises(UsageError, match=r"Sharded\(least_bytes=...\) takes a size"):
        Sharded(least_bytes="much")
    assert Sharded(least_bytes="1KiB") == Sharded(least_bytes=1024)


def test_equal_ones_count_together_and_copies_are_equal(alone: None) -> None:
    one, other = Sharded(least_bytes=0), copy.deepcopy(Sharded(dist.group.WORLD, least_bytes=0))
    handle = one.save(torch.ones(3))
    assert one == other and other.used_bytes == 12 and "1 ranks" in repr(one)
    assert torch.equal(other.load(handle), torch.ones(3))
    with pytest.raises(UsageError, match="belongs to this process"):
        pickle.dumps(one)


def test_what_is_gathered_in_advance_is_of_the_same_stream(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other stream has waited for it: a device has streams, and a group of gloo has no such device."""
    current = ["a"]
    monkeypatch.setattr(series, "current_stream", lambda device: current[0])
    storage, handles = Sharded(least_bytes=0), {}
    for number in (1, 2):
        for current[0] in ("a", "b"):
            handles[current[0], number] = storage.save(torch.full((4,), number))
    storage.load(handles["a", 2])
    assert handles["a", 1].piece.coming is not None and handles["b", 1].piece.coming is None


def test_fake_tensors_are_not_gathered(alone: None) -> None:
    storage = Sharded(least_bytes=0)
    with FakeTensorMode():
        tensor = torch.ones(4, 5)
        found = storage.load(storage.save(tensor))
    assert found.shape == tensor.shape and storage.traffic.loaded_bytes == 0


def test_a_region_without_a_gradient_keeps_nothing(alone: None) -> None:
    storage = Sharded(least_bytes=0)
    with torch.no_grad():
        reactivate.checkpoint(torch.sin, inputs=storage)(torch.ones(3) * 2)
    assert storage.traffic.moved == 0
