"""Who holds which bytes for the backward.

Memory is counted in storages, each once: a view costs nothing, and what two regions keep is kept once. A region keeps its
inputs (saved tensors of autograd's own, or copies), what saved calls left, and what its guards left.
"""

from __future__ import annotations

import functools
import gc
import sys
from _thread import get_ident
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from reactivate._region.naming import name_of
from reactivate._snapshot.inputs import InputSpec, SavedInput, WrittenInput
from reactivate._storing.inputs import StoredInput
from reactivate._torch.autograd import SavedTensor, data_of
from reactivate._types import Guard

if TYPE_CHECKING:
    from reactivate._region.region import Region

"""A region, which is only read here."""

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Ledger:
    """Counts memory, each storage once.

    Args:
        known: tensors whose memory is not to be counted: parameters, which are there anyway.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        # Weakly: that does not keep the memory, but the address, which no other storage can have meanwhile.
        self._seen: dict[int, StorageWeakRef] = {}
        for tensor in known:
            self.enter(tensor)

    def enter(self, tensor: Tensor) -> int:
        """The bytes of `tensor` that were not counted before."""
        new_bytes = 0
        for storage in storages_of(tensor):
            reference = StorageWeakRef(storage)
            if reference.cdata not in self._seen:
                self._seen[reference.cdata] = reference
                new_bytes += int(storage.nbytes())
        return new_bytes

    def enter_all(self, tensors: Iterable[Tensor]) -> int:
        """Enter several tensors and return the bytes that are new."""
        return sum(map(self.enter, tensors))


def storages_of(tensor: Tensor) -> Iterator[UntypedStorage]:
    """The memory of `tensor`: of several, if it is sparse or made of other tensors."""
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that is made of other tensors
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in parts:
            if isinstance(part, Tensor):  # since torch 2.13 a DTensor names its mesh as well
                yield from storages_of(part)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:
        for name in _PARTS.get(tensor.layout, ()):
            yield from storages_of(getattr(tensor.detach(), name)())


# -- what a region holds that autograd does not know of ---------------------------------------------------------------


def copied_inputs(region: Region) -> Iterator[Tensor]:
    """The copies that a region has of its inputs, where autograd's own saved tensors would not do."""
    if region.moment.parts is None:  # otherwise they are counted with the buffers of modules
        yield from region.moment.held()
    for spec in region.replaced.values():
        yield spec.alias if isinstance(spec, WrittenInput) else spec


def stored_inputs(region: Region) -> Iterator[StoredInput]:
    """The inputs of a region that a storage keeps."""
    return (spec for spec in _specs_of(region) if isinstance(spec, StoredInput))


def put_aside(region: Region) -> Iterator[Tensor]:
    """The tensors whose present contents a recomputation of the region would put aside if it began now."""
    moments = [region.moment, *(region.reached.moments if region.reached is not None else ())]
    for moment in moments:
        yield from moment.states.put_aside()


def _specs_of(region: Region) -> Iterator[Any]:
    """List what a region keeps of its function and arguments, with what these are made of."""
    todo: list[Any] = [region.fn, *region.args, *region.kwargs.values(), *(cell.spec for cell in region.cells)]
    while todo:
        spec = todo.pop()
        yield spec
        if isinstance(spec, InputSpec):
            todo += [child for _, child in spec.children()]


def held_by_guards(region: Region) -> Iterator[Tensor]:
    """The tensors in the snapshots of a region's guards, and in what leads over its saved calls."""
    yield from held_by(region.snapshots)
    yield from held_by([call.streams for call in region.saved_calls])
    if region.moment.parts is not None:
        yield from region.moment.held()
    if region.reached is not None:
        yield from region.reached.held()


def held_by(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in containers, in what guards make snapshots of, and in what was bound to a function.

    Not those of modules and of guards themselves, which are not held but known; nor what is behind objects of other
    people's classes.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (Module, Guard, type, str, bytes)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts_of(value):
            yield from held_by(part, seen)


def pieces_in(handle: Any) -> Iterator[Any]:
    """List what keeps bytes elsewhere than in memory, of what a storage made of a tensor: `stored_bytes` says how many."""
    if hasattr(type(handle), "stored_bytes"):
        yield handle
    elif not isinstance(handle, (Tensor, Module, type)):
        for part in _parts_of(handle):
            yield from pieces_in(part)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, functools.partial):
        return (*value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__,)
    if is_dataclass(value):
        return [getattr(value, item.name) for item in fields(value)]
    if callable(getattr(type(value), "held", None)):  # copies of tensors, and what storages made of them
        return value.held()  # type: ignore[no-any-return]
    return ()


# -- out of memory ----------------------------------------------------------------------------------------------------

counting_threads: list[int] = []  # that ask what is kept for a saved tensor: mostly none


class NotKept(Exception):
    """A region will bring a tensor back by a recomputation, and is not to do that only for the tensor to be counted."""


_CPU_SAYS = ("not enough memory", "can't allocate memory")  # its allocator's error has no class of its own
_BEGINNING = "Kept for the backward by regions"
_LINES = 12


def note_shortage(error: BaseException, kind: type) -> None:
    """If memory ran out, say in `error` what the regions that are alive keep. Otherwise do nothing.

    Args:
        error: the error.
        kind: the class of regions.
    """
    if is_shortage(error) and not _is_noted(error):
        add_note(error, _account_of_living(kind))


def is_shortage(error: BaseException) -> bool:
    """Return whether memory ran out: that of an accelerator or that of the host."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_SAYS)


def _is_noted(error: BaseException) -> bool:
    return any(_BEGINNING in str(note) for note in (*getattr(error, "__notes__", ()), *error.args))


def _account_of_living(kind: type) -> str:
    """Say what each living region keeps, most first. Regions are looked for now, not registered before."""
    regions: list[Any] = [item for item in gc.get_objects() if type(item) is kind and hasattr(item, "kwargs")]
    ledger = Ledger(tensor for region in regions for tensor in _own_tensors(region))
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for region in regions:
        calls[name_of(region)] += 1
        sizes[name_of(region)] += ledger.enter_all(_all_kept(region))
    lines = [
        f"  {name}{f' ({calls[name]} calls)' if calls[name] > 1 else ''}: {in_words(size)}"
        for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_LINES]
    ]
    if len(sizes) > _LINES:
        lines.append(f"  and {len(sizes) - _LINES} more")
    return "\n".join(
        [
            f"{_BEGINNING}: {in_words(sum(sizes.values()))} in {len(regions)} that are alive.",
            *lines,
            "What the rest of the model keeps is not in this. `reactivate.explain(model, args, fake=True)` lists all of "
            "it, by module and line, and allocates nothing.",
        ]
    )


def _all_kept(region: Region) -> Iterator[Tensor]:
    yield from _saved_inputs(region)
    yield from copied_inputs(region)
    if hasattr(region, "snapshots"):  # its forward pass is over
        yield from held_by_guards(region)
        for call in region.saved_calls:
            for kept in kept_of(region, call):
                yield from _tensors_of(kept.handle)


def _own_tensors(region: Region) -> Iterator[Tensor]:
    """The parameters and buffers that a region can reach, which are there anyway."""
    for spec in _specs_of(region):
        for owner in (spec, getattr(spec, "__self__", None)):
            if isinstance(owner, Module):
                yield from owner.parameters()
                yield from owner.buffers()


def _saved_inputs(region: Region) -> Iterator[Tensor]:
    for spec in _specs_of(region):
        if isinstance(spec, (SavedTensor, SavedInput)):
            yield from _tensors_of(spec.saved if isinstance(spec, SavedInput) else spec)
        elif isinstance(spec, Tensor):
            yield spec


def kept_of(region: Region, call: Any) -> list[Any]:
    """List what a saved call keeps: results, and what it saved for its backward."""
    slots = map(region.slot_of, range(call.start, call.stop))
    found = [*call.kept(), *(getattr(slot, "kept", None) for slot in slots)]
    return list({id(item): item for item in found if hasattr(item, "storage")}.values())


def _tensors_of(saved: Any) -> Iterator[Tensor]:
    """List what is kept for a saved tensor: nothing if a region around this one recomputes it."""
    if isinstance(saved, SavedTensor):
        counting_threads.append(get_ident())
        try:
            saved = data_of(saved)
        except (NotKept, RuntimeError):  # the latter is autograd's, where the tensor was written to since
            return
        finally:
            counting_threads.remove(get_ident())
    yield from held_by(saved)


def add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error.args[0] if error.args else ''}\n{note}", *error.args[1:])


def in_words(size_bytes: int) -> str:
    """A number of bytes, to be read."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size_bytes} B" if unit == "B" else f"{size:.{0 if size >= 100 else 1 if size >= 10 else 2}f} {unit}"
