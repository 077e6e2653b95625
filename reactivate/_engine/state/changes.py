"""Changes that one saved call makes to what its region has noted: a recomputation that skips the call brings them about.

A recomputation begins with everything as the forward found it. What a skipped call would do to a counter, a list or a
name has to be done in its place. That is possible where it leaves plain values there; a call that leaves anything else, a
tensor or a new object, is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from reactivate._engine.state.attributes import TensorsNote
from reactivate._engine.state.contents import LengthNote, Note
from reactivate._engine.state.functions import CellContainerNote, FunctionNote, Inside
from reactivate._engine.state.held import Position, WeakTensor
from reactivate._engine.state.iterators import holds_iterator, position_of
from reactivate._engine.state.tensor_states import TensorStates, version_of
from reactivate._torch.modes import copy_unseen
from reactivate._torch.versions import set_versions

_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), object, torch.dtype, torch.device})


class Noted:
    """The notes of a region, as the state is when a saved call begins.

    Args:
        notes: the notes of the region.
        tensors: the tensors that it reads, some of them as `WeakTensor`s.
        states: those of them of which there are copies.
    """

    __slots__ = ("_before", "_notes", "_states", "_tensors", "_versions")

    def __init__(self, notes: Sequence[Note], tensors: Iterable[Any], states: TensorStates | None) -> None:
        self._notes = notes
        self._before = {index: _present(note) for index, note in enumerate(notes) if not note.is_at(note.noted)}
        self._states = states
        self._tensors = [item for item in tensors if type(item) is WeakTensor or not item.is_inference()]
        self._versions = list(map(version_of, self._tensors))

    def changes(self) -> tuple[str | None, list[Callable[[], None]]]:
        """Return why the call has to be recomputed, or what repeats its changes."""
        if self._versions != list(map(version_of, self._tensors)):
            return "it writes to a tensor that the region reads", []
        changed: list[tuple[Note, Any]] = []
        for index, note in enumerate(self._notes):
            before = self._before.get(index)
            if before is None and note.is_at(note.noted):
                continue
            present = _present(note)
            if before is not None and _are_same(present, before):
                continue
            if isinstance(note, LengthNote) or not _are_values(note, present[0]):
                return f"it changes {_name_of(note)}", []
            changed.append((note, note.contents()))
        found: list[Callable[[], None]] = []
        if changed:
            found.append(functools.partial(_bring, changed))
        if self._states is not None and len(self._states.tensors) > len(self._states.shadows):
            found.append(SilentTensors(self._states).bring)
        return None, found

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the region reads."""
        return [item.get() if type(item) is WeakTensor else item for item in self._tensors]

    def targets(self) -> set[int]:
        """Return the ids of the objects of which there are notes."""
        found = set()
        for note in self._notes:
            found.add(id(note.target))
            if isinstance(note, CellContainerNote) and type(note.noted) is Inside:
                found.add(note.noted.key)
        return found


class SilentTensors:
    """Tensors that are written to without a new version, as a saved call left them.

    Attributes:
        contents: (tensor, a copy of it).
    """

    def __init__(self, states: TensorStates) -> None:
        tensors = states.tensors[len(states.shadows) :]
        self.contents = [(tensor, copy_unseen(tensor)) for tensor in tensors]
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = list(map(version_of, self._counted))

    def bring(self) -> None:
        """Write them."""
        for tensor, content in self.contents:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(content)
        set_versions(self._counted, self._versions)


def _bring(changed: Sequence[tuple[Note, Any]]) -> None:
    for note, contents in changed:
        if type(contents) is Inside and isinstance(note, CellContainerNote):
            now = note.contents()
            if type(now) is Inside and now.kind is contents.kind:  # made anew, perhaps: the same one is meant
                contents = contents._replace(key=now.key)
        note.put(contents)


Present = tuple[list[Any], list[Any]]  # the items themselves, and where iterators among them stand


def _present(note: Note) -> Present:
    if isinstance(note, LengthNote):
        length, tail = note.appended()
        pairs = tail if isinstance(note.target, dict) else [(item,) for item in tail]
        items = [length, *(item for pair in pairs for item in pair)]
    else:
        items = _items_of(note, note.contents(weak=None))
    return items, [position_of(item) for item in items if holds_iterator(item)]


def _are_same(one: Present, other: Present) -> bool:
    (items, positions), (others, other_positions) = one, other
    return (
        len(items) == len(others)
        and all(item is another or _are_equal_arrays(item, another) for item, another in zip(items, others))
        and positions == other_positions
    )


def _are_equal_arrays(item: Any, other: Any) -> bool:
    return hasattr(item, "tobytes") and type(item) is type(other) and bool(item.tobytes() == other.tobytes())


def _items_of(note: Note, contents: Any) -> list[Any]:
    """Return the items of the contents of a note."""
    if isinstance(note, FunctionNote):
        code, defaults, keywords, attributes = contents
        return [code, defaults, keywords, *attributes, *attributes.values()]
    if isinstance(note, TensorsNote):
        return [item for attributes in contents or () for pair in attributes.items() for item in pair]
    if type(contents) is Inside:
        contents = contents.items
    elif isinstance(note, CellContainerNote):
        return [contents]
    if isinstance(contents, dict):
        return [*contents, *contents.values()]
    return contents if isinstance(contents, list) else [contents]


def _are_values(note: Note, items: Iterable[Any]) -> bool:
    """Return whether a recomputation has these items too: values, or objects that were there before."""
    known = {id(item.reference() if type(item) is WeakTensor else item) for item in _items_of(note, note.noted)}
    return all(
        type(item) in _VALUES or id(item) in known or (hasattr(item, "tobytes") and not isinstance(item, Tensor))
        for item in items
        if type(item) is not Position
    )


def _name_of(note: Note) -> str:
    name = getattr(note, "name", None)
    if name is not None:
        return f"`{name}`"
    kind = note.noted.kind if type(note.noted) is Inside else type(note.target)
    return f"a {kind.__name__}"
