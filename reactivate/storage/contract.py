"""The contract of a storage: properties that each of them has, as checks that run on any.

`check(MyStorage)` runs all of them on a storage of your own; `CHECKS` has them one by one, for
`pytest.mark.parametrize("check", CHECKS)`. Each is called with a function that makes a storage, and the device of the
tensors. It raises an `AssertionError` that names the property and what was found instead.

A tensor that comes back as itself, since it stays where it is, is excused from what only concerns copies: the code that
keeps it compares its version counter.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from reactivate._text.words import described
from reactivate._types import Storage
from reactivate.errors import UsageError
from reactivate.storage import samples
from reactivate.storage.samples import Look

_PATIENCE = 2.0  # seconds
MakeStorage = Callable[[], Storage]


class Shelf:
    """A storage in use: whatever is taken in has others come after it, so that it is where the storage keeps things.

    Args:
        make_storage: makes the storage.
        device: of the tensors that come after.
    """

    def __init__(self, make_storage: MakeStorage, device: str) -> None:
        self.storage = make_storage()
        self._device = device
        self._later: list[Any] = []

    def save(self, *tensors: Tensor) -> list[Any]:
        """Take tensors in, and others after them: a handle for each of the first."""
        with torch.no_grad():
            handles = [self.storage.save(tensor) for tensor in tensors]
            self._later += [self.storage.save(samples.numbers((64,), self._device)) for _ in range(6)]
        return handles

    def load(self, *handles: Any) -> list[Tensor]:
        """Return the tensors of some handles, read from the last one to the first, as a backward does."""
        with torch.no_grad():
            return [self.storage.load(handle) for handle in reversed(handles)][::-1]

    def let_go(self) -> None:
        """Let go of what was taken in later."""
        self._later.clear()


def _come_back(make_storage: MakeStorage, device: str, some: dict[str, Tensor], noun: str) -> None:
    shelf = Shelf(make_storage, device)
    looks = {name: Look(tensor) for name, tensor in some.items()}
    handles = shelf.save(*some.values())
    for (name, look), found in zip(looks.items(), shelf.load(*handles)):
        look.check(found, f"{noun}: {name}")


def every_dtype(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back the bits of every dtype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf")
        _come_back(make_storage, device, samples.of_every_dtype(device), "every dtype comes back")


def every_layout(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back sizes and strides, of views and of tensors that overlap themselves too."""
    _come_back(make_storage, device, samples.of_every_layout(device), "sizes and strides come back")


def lazy_values(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back the values of lazy conjugates and negatives."""
    _come_back(make_storage, device, samples.lazy(device), "lazy values come back")


def subclasses(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back tensors of subclasses as such."""
    tensor = samples.numbers((4, 6), device).as_subclass(samples.Plain)
    _come_back(make_storage, device, {"a plain subclass": tensor}, "subclasses come back")


def wrappers(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back tensors that are made of tensors (`__tensor_flatten__`) as such, with the bits of the parts."""
    parts = samples.numbers((4, 6), device), samples.numbers((4, 6), device).t().contiguous().t()
    shelf = Shelf(make_storage, device)
    looks = [Look(part) for part in parts]
    (found,) = shelf.load(*shelf.save(samples.Pair(*parts)))
    prefix = "tensors that are made of tensors come back"
    assert type(found) is samples.Pair, f"{prefix}: as {type(found).__name__}, not as their class"
    for name, part, look in zip(("first", "second"), (found.first, found.second), looks):
        look.check(part, f"{prefix}: the part {name!r}")


def attributes(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back what was set on a tensor in Python."""
    plain = samples.numbers((4, 6), device)
    wrapper = samples.Pair(samples.numbers((4, 6), device), samples.numbers((4, 6), device))
    plain.note = wrapper.note = "set"  # type: ignore[attr-defined]
    shelf = Shelf(make_storage, device)
    for name, found in zip(("a tensor", "a wrapper"), shelf.load(*shelf.save(plain, wrapper))):
        note = vars(found).get("note")
        assert note == "set", f"Python attributes come back: {name} has {note!r} for 'set'"


def views(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back views of one memory as views of one memory, if the storage says so (`shares_views = True`)."""
    whole = samples.numbers((4, 6), device)
    some = [whole, whole[1:3], whole.t()]
    shelf = Shelf(make_storage, device)
    looks = [Look(tensor) for tensor in some]
    handles = shelf.save(*some)
    found = shelf.load(*handles)
    for look, tensor in zip(looks, found):
        look.check(tensor, "views of one memory come back")
    memories = {tensor.untyped_storage().data_ptr() for tensor in found}
    if getattr(shelf.storage, "shares_views", False):
        assert len(memories) == 1, f"views of one memory come back as such: they have {len(memories)} memories"


def modified_originals(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back what was taken in although the original is modified then, or raise: never anything else."""
    tensor = samples.numbers((4, 6), device)
    shelf = Shelf(make_storage, device)
    look = Look(tensor)
    with torch.no_grad():
        first = shelf.storage.save(tensor)
    tensor.zero_()  # at once
    shelf.save()
    _right_or_refused(shelf, first, tensor, look, "a tensor that is modified at once")
    tensor = samples.numbers((4, 6), device)
    (second,) = shelf.save(tensor)
    tensor.zero_()  # when it is where the storage keeps it, or on its way
    _right_or_refused(shelf, second, tensor, look, "a tensor that is modified later")


def _right_or_refused(shelf: Shelf, handle: Any, original: Tensor, look: Look, name: str) -> None:
    if handle is original:
        return
    try:
        (found,) = shelf.load(handle)
    except RuntimeError:
        return
    look.check(found, f"what is taken in stays what it was: {name}")


def freed_originals(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Give back what was taken in although the memory of the original is in use for something else."""
    shelf = Shelf(make_storage, device)
    looks, handles = [], []
    for _ in range(4):
        tensor = samples.numbers((256,), device)
        looks.append(Look(tensor))
        handles += shelf.save(tensor)
        del tensor
        noise = [torch.full((256,), -1.0, device=device) for _ in range(4)]
    for look, found in zip(looks, shelf.load(*handles)):
        look.check(found, "what is taken in survives its original")
    del noise


def two_backwards(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Load a tensor as often as wanted; modifying what was loaded changes no later load, or makes it an error."""
    tensor = samples.numbers((4, 6), device)
    shelf = Shelf(make_storage, device)
    look = Look(tensor)
    (handle,) = shelf.save(tensor)
    stays = handle is tensor
    for number in range(3):
        (found,) = shelf.load(handle)
        look.check(found, f"a tensor can be loaded more than once: load {number}")
    if not stays:
        found.zero_()
        del found
        _right_or_refused(shelf, handle, tensor, look, "a tensor that was loaded and then modified")


def memory_is_freed(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Let go of the original's memory, of what was loaded, and of the storage's own place as soon as they are not needed."""
    shelf = Shelf(make_storage, device)
    before = _used_bytes(shelf.storage)
    tensor = samples.numbers((256,), device)
    handles = shelf.save(tensor)
    moved = handles[0] is not tensor
    original = ref(tensor.untyped_storage())
    del tensor
    assert not moved or original() is None, "memory is freed: the storage holds that of the original"
    (found,) = shelf.load(*handles)
    loaded = ref(found.untyped_storage())
    handle = _reference(handles[0])
    del found
    handles.clear()
    shelf.let_go()
    assert _comes_true(lambda: loaded() is None), "memory is freed: the storage holds what it loaded without a handle"
    assert handle() is None, "memory is freed: the storage holds the handle"
    assert _comes_true(lambda: _used_bytes(shelf.storage) <= before), (
        f"memory is freed: {_used_bytes(shelf.storage):,} bytes of the storage are in use, although no handle is left"
    )


def _used_bytes(storage: Storage) -> int:
    return int(getattr(storage, "used_bytes", 0))


def _comes_true(is_true: Callable[[], bool]) -> bool:
    """Return whether something is true once what was on its way when the handles went has arrived."""
    end = time.monotonic() + _PATIENCE
    while not (found := is_true()) and time.monotonic() < end:
        time.sleep(0.001)
    return found


def _reference(handle: Any) -> Callable[[], Any]:
    try:
        return ref(handle)
    except TypeError:  # a tuple, a number
        return lambda: None


def new_shapes(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Take tensors of other shapes in every step."""
    shelf = Shelf(make_storage, device)
    for step in range(12):
        some = [samples.numbers((1 + (step * 7 + number * 5) % 11, 16), device) for number in range(4)]
        looks = [Look(tensor) for tensor in some]
        handles = shelf.save(*some)
        some.clear()
        for look, found in zip(looks, shelf.load(*handles)):
            look.check(found, f"shapes may change: step {step}")
        handles.clear()
        shelf.let_go()


def leaves(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Leave parameters and other leaves where they are: the handle is the tensor itself."""
    shelf = Shelf(make_storage, device)
    parameter = torch.nn.Parameter(samples.numbers((4, 6), device))
    leaf = samples.numbers((4, 6), device).requires_grad_()
    for name, tensor in (("a parameter", parameter), ("a leaf", leaf)):
        (handle,) = shelf.save(tensor)
        assert handle is tensor, f"leaves stay where they are: the handle of {name} is a {type(handle).__name__}"
        assert shelf.load(handle)[0] is tensor, f"leaves stay where they are: {name} comes back as another tensor"


CHECKS = (
    *(every_dtype, every_layout, lazy_values, subclasses, wrappers, attributes, views),
    *(modified_originals, freed_originals, two_backwards, memory_is_freed, new_shapes, leaves),
)


def check(make_storage: MakeStorage, device: str = "cpu") -> None:
    """Check that a storage of your own has the properties that every storage has to have.

    Args:
        make_storage: a function that makes a storage, called once for each property. If the storage leaves small tensors
            where they are, let it make one that does not.
        device: where the tensors are that it is given.

    Raises:
        AssertionError: it has not; the message names the property, and what was found.
        UsageError: `make_storage` cannot be called.

    Examples:
        >>> import reactivate
        >>> reactivate.storage.contract.check(lambda: reactivate.storage.Host(least_bytes=0))
    """
    if not callable(make_storage):
        raise UsageError(
            "contract.check takes a function that makes a storage, which it calls once for each property; got "
            f"{described(make_storage)}. Write contract.check(lambda: YourStorage(...))."
        )
    for one in CHECKS:
        one(make_storage, device)
