"""The contract of a storage: the storages of the package keep it, and a storage that breaks one property fails that check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from several import each
from torch import Tensor

import reactivate
from reactivate.errors import UsageError
from reactivate.storage import Device, Disk, Host, contract
from reactivate.storage.moved import Moved, Mover, Piece
from reactivate.storage.placement import Extent, Memory
from reactivate.storage.wrapped import Wrapped

CHECKS = {check.__name__: check for check in contract.CHECKS}


def failures(make_storage: Callable[[], Any]) -> dict[str, str]:
    found = {}
    for name, check in CHECKS.items():
        try:
            check(make_storage)
        except AssertionError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("check", contract.CHECKS, ids=CHECKS)
@pytest.mark.parametrize("kind", ["device", "host", "disk", "a disk that keeps nothing in memory"])
def test_storages_of_the_package(kind: str, check: Any, tmp_path: Path) -> None:
    made: dict[str, Callable[[], Any]] = {
        "device": Device,
        "host": lambda: Host(least_bytes=0),
        "disk": lambda: Disk(tmp_path, least_bytes=0),
        "a disk that keeps nothing in memory": lambda: Disk(tmp_path, least_bytes=0, last=0, ahead=3),
    }
    check(made[kind])


def test_check_runs_all_of_it(tmp_path: Path) -> None:
    disks: list[Disk] = []

    def make() -> Disk:
        disks.append(Disk(tmp_path, least_bytes=0))
        return disks[-1]

    contract.check(make)
    assert len(disks) == len(CHECKS) and sum(disk.traffic.moved for disk in disks) > 100


class CopyPiece(Piece):
    def __init__(self, memory: Memory, extent: Extent, run: Tensor) -> None:
        super().__init__(memory, extent)
        self.run = run.clone()

    def read(self) -> Tensor:
        return self.run.clone()


class Copies(Mover):
    """A right storage, of which the wrong ones below are made."""

    shares_views = True

    def __init__(self) -> None:
        super().__init__(least_bytes=0)

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        return CopyPiece(memory, extent, run)


def test_a_right_storage() -> None:
    assert failures(Copies) == {}


class RoundsHalf(Copies):
    def load(self, handle: Any) -> Tensor:
        found = super().load(handle)
        return found.to(torch.bfloat16).to(torch.float16) if found.dtype is torch.float16 else found


class ForgetsStrides(Copies):
    def load(self, handle: Any) -> Tensor:
        found = super().load(handle)
        return found.contiguous() if found.dim() == 4 else found


class ForgetsConjugates(Copies):
    def _moved(self, tensor: Tensor, wrappers: Any) -> Any:
        return super()._moved(tensor.conj() if tensor.is_conj() else tensor, wrappers)


class ForgetsClasses(Copies):
    def load(self, handle: Any) -> Tensor:
        found = super().load(handle)
        if type(handle) is not Moved:
            return found
        plain = found.as_subclass(Tensor)
        vars(plain).update(handle.placement.attributes)
        return plain


class OpensWrappers(Copies):
    def load(self, handle: Any) -> Tensor:
        found = super().load(handle)
        if type(handle) is not Wrapped:
            return found
        plain = found.first.clone()  # type: ignore[attr-defined]
        vars(plain).update(handle.attributes)
        return plain


class ForgetsAttributes(Copies):
    def load(self, handle: Any) -> Tensor:
        found = super().load(handle)
        vars(found).pop("note", None)
        return found


class TearsViewsApart(Copies):
    def _moved(self, tensor: Tensor, wrappers: Any) -> Any:
        self._pieces.clear()
        return super()._moved(tensor, wrappers)


class Late(Copies):
    """A storage that copies when the next tensor comes, and does not look whether the first was modified."""

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        piece = CopyPiece(memory, extent, run)
        piece.run, before = run, getattr(self, "latest", None)
        if before is not None:
            before.run = before.run.clone()
        self.latest = piece
        return piece

    def load(self, handle: Any) -> Tensor:
        if self.latest is not None:
            self.latest.run, self.latest = self.latest.run.clone(), None
        return super().load(handle)


class ReusesPlaces(Copies):
    """A storage that gives the place of a tensor to another one, of the same size, while it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Tensor] = []

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        piece = CopyPiece(memory, extent, run)
        if run.numel() == 256 and run.dtype is torch.float32:
            self.places.append(piece.run)
            if len(self.places) == 4:
                piece.run = self.places[0]
                piece.run.fill_(7)
        return piece


class OwnPiece(CopyPiece):
    def read(self) -> Tensor:
        return self.run.view(-1)


class GivesItsOwn(Copies):
    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        return OwnPiece(memory, extent, run)


class GivesOnce(Copies):
    def load(self, handle: Any) -> Tensor:
        found = super().load(handle)
        if type(handle) is Moved and found.size() == (4, 6) and type(found) is Tensor and not vars(found):
            handle.piece.reads = reads = getattr(handle.piece, "reads", 0) + 1
            return found if reads == 1 else found + 1
        return found


class HoldsOriginals(Copies):
    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        piece = super().put(run, memory, extent)
        piece.original = run  # type: ignore[attr-defined]
        return piece


class HoldsHandles(Copies):
    def save(self, tensor: Tensor, wrappers: Any = ()) -> Any:
        handle = super().save(tensor, wrappers)
        self.handles = [*getattr(self, "handles", ()), handle]
        return handle


class HoldsPlaces(Copies):
    used_bytes = 0

    def put(self, run: Tensor, memory: Memory, extent: Extent) -> Piece:
        self.used_bytes += run.numel()
        return super().put(run, memory, extent)


class HoldsLoaded(Copies):
    def load(self, handle: Any) -> Tensor:
        self.found = super().load(handle)
        return self.found


class OneShape(Copies):
    """A storage that takes the size of a tensor with as many columns from the first one."""

    def load(self, handle: Any) -> Tensor:
        found = super().load(handle)
        if found.dim() == 2 and found.size(1) == 16 and found.dtype is torch.float32 and found.size(0) < 12:
            self.rows = getattr(self, "rows", found.size(0))
            return found[: self.rows]
        return found


class MovesLeaves(Copies):
    def save(self, tensor: Tensor, wrappers: Any = ()) -> Any:
        return super().save(tensor.detach() if tensor.is_leaf and tensor.requires_grad else tensor, wrappers)


WRONG = {
    RoundsHalf: ("every_dtype", "every dtype comes back: torch.float16, but .* bytes are different"),
    ForgetsStrides: ("every_layout", "channels_last, but its stride is"),
    ForgetsConjugates: ("lazy_values", "a conjugate, but .* bytes are different"),
    ForgetsClasses: ("subclasses", "a plain subclass, but its class is Tensor where it was Plain"),
    OpensWrappers: ("wrappers", "as Tensor, not as their class"),
    ForgetsAttributes: ("attributes", "a tensor has None for 'set'"),
    TearsViewsApart: ("views", "they have 3 memories"),
    Late: ("modified_originals", "a tensor that is modified at once, but .* bytes are different"),
    ReusesPlaces: ("freed_originals", "survives its original, but"),
    GivesItsOwn: ("two_backwards", "loaded and then modified, but"),
    GivesOnce: ("two_backwards", "load 1, but"),
    HoldsOriginals: ("memory_is_freed", "holds that of the original"),
    HoldsHandles: ("memory_is_freed", "holds the handle"),
    HoldsPlaces: ("memory_is_freed", "bytes of the storage are in use"),
    HoldsLoaded: ("memory_is_freed", "holds what it loaded"),
    OneShape: ("new_shapes", "its size is"),
    MovesLeaves: ("leaves", "the handle of a parameter is a Moved"),
}


@each("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_storage_fails_one_check(kind: Any) -> None:
    name, message = WRONG[kind]
    assert list(failures(kind)) == [name]
    with pytest.raises(AssertionError, match=message):
        contract.check(kind)


def test_there_is_a_wrong_storage_for_each_check() -> None:
    assert {name for name, _ in WRONG.values()} == set(CHECKS)


def test_what_a_users_simple_storage_misses() -> None:
    class Numpy:
        def save(self, tensor: Tensor) -> Any:
            return tensor.detach().numpy().copy()

        def load(self, handle: Any) -> Tensor:
            return torch.from_numpy(handle.copy())

    with pytest.raises(AssertionError, match="transposed, but its stride is"):
        contract.every_layout(Numpy)
    contract.freed_originals(Numpy)


def test_without_numbers_of_the_programs() -> None:
    """Checks draw from no generator that a program uses."""
    before = torch.get_rng_state()
    contract.check(reactivate.storage.Device)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_storage_in_the_place_of_what_makes_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes a function that makes a storage.*; got .*Host.*lambda"):
        contract.check(Host())  # type: ignore[arg-type]
