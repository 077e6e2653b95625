"""Tensors rewound for a recomputation, in the memory that they have, and the table of all memory that is rewound now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from reactivate._snapshot.geometry import elements_of, geometry_of, memory_of
from reactivate._snapshot.group_copy import GroupCopy, put
from reactivate._snapshot.shadows import Shadow, current_shadows
from reactivate._snapshot.small_copy import SmallCopy
from reactivate._snapshot.tensor_states import TensorStates, versions_of
from reactivate._torch.autograd import set_versions
from reactivate._torch.modes import run_unseen

rewound_memory: dict[int | None, int] = {}
"""{storage: the version that its tensor has outside of the recomputation} of all memory that is rewound now.

Never of None, which `memory_of` returns where it cannot be told."""


class RewoundTensors:
    """Tensors with the bytes and versions that they had when a region began, for as long as the context lasts."""

    _small: SmallCopy | None = None
    _is_small_same = True
    _may_differ = True  # those that are not small
    _is_rewound = False
    _marks: Mapping[int | None, int] = MappingProxyType({})  # what this has added to the table
    _hidden: Mapping[int | None, int] = MappingProxyType({})  # what the table held in the place of these
    # Of tensors that are not small:
    _present: Sequence[GroupCopy] = ()
    _previous: Sequence[tuple[Tensor, Shadow | None]] = ()
    _writes: Sequence[tuple[Tensor, Tensor, Any, Any]] = ()

    def __init__(self, state: TensorStates) -> None:
        self._state = state

    def differs(self) -> bool:
        """Return whether the tensors are not known to hold what they held; `__enter__` comes next."""
        state = self._state
        if state.small is not None:
            self._small = SmallCopy(state.small.tensors, state.small.places)
            self._is_small_same = self._small.are(state.small)
            if not self._is_small_same:
                self._may_differ = True
                return True
        self._may_differ = bool(state.groups or state.written) or not state.are_shadows_current()
        return self._may_differ or versions_of(state.tensors) != state.versions

    def __enter__(self) -> None:
        state = self._state
        self._tensors = [*state.tensors, *(item.tensor for item in state.written)] if state.written else state.tensors
        self._versions = versions_of(self._tensors)
        try:
            if self._may_differ and (state.shadows or state.groups or state.written):
                self._rewind_large()
            if not self._is_small_same:
                self._rewind_small(state.small, self._small)
            versions = state.noted_versions() if state.written else state.versions
            # Otherwise what autograd saves of this memory is what it would save outside.
            if self._is_rewound or not self._is_small_same or self._versions != versions:
                self._mark_memory()
                self._set_versions(versions)
        except BaseException:
            self.__exit__()
            raise

    def _rewind_small(self, before: Any, now: Any) -> None:
        now.keep_memory(before)
        before.put(SmallCopy(before.tensors, before.places) if self._is_rewound else now)

    def _rewind_large(self) -> None:
        """Write to the tensors that are not small, and may hold something else by now."""
        state = self._state
        self._present = [run_unseen(GroupCopy, group.tensors) for group in state.groups]
        changed = [
            (tensor, shadow)
            for tensor, shadow, version in zip(state.tensors, state.shadows, self._versions)
            if not shadow.is_current(tensor, version)
        ]
        written = [*(tensor for tensor, _ in changed), *(item.tensor for item in state.written)]
        # (tensor, what it holds outside and where, its memory), all of them first: they may share memory
        self._writes = list(map(_set_aside, written))
        self._is_rewound = bool(written or state.groups)
        if self._is_rewound:
            run_unseen(self._write, changed)

    def _mark_memory(self) -> None:
        """Note that saved tensors in this memory are in what is rewound."""
        state, tensors, versions = self._state, self._tensors, self._versions
        count = len(state.shadows)
        if count:
            written = {id(item) for item, *_ in self._writes}
            rewound = [index for index, item in enumerate(tensors) if index >= count or id(item) in written]
            tensors, versions = [tensors[index] for index in rewound], [versions[index] for index in rewound]
        self._marks = marks = dict(zip(map(memory_of, tensors), versions))
        marks.pop(None, None)
        if rewound_memory:
            self._hidden = {key: rewound_memory[key] for key in marks.keys() & rewound_memory.keys()}
        rewound_memory.update(marks)

    @torch.no_grad()
    def _write(self, changed: Sequence[tuple[Tensor, Shadow]]) -> None:
        state = self._state
        self._previous = previous = []
        for written in state.written:
            previous.append((written.tensor, current_shadows.pop(id(written.tensor), None)))
            if written.left is not None and not written.is_left():
                written.left.put(written.tensor)
        for tensor, shadow in changed:
            previous.append((tensor, current_shadows.get(id(tensor))))
            shadow.put(tensor)
            current_shadows[id(tensor)] = shadow
        for group, present in zip(state.groups, self._present):
            if not group.are(present):
                present.keep_memory(group)
                group.put()

    def _set_versions(self, versions: Sequence[int]) -> None:
        tensors = self._tensors
        if tensors and versions_of(tensors) != versions:
            if any(map(Tensor.is_inference, tensors)):  # which have none
                counted = [pair for pair in zip(tensors, versions) if not pair[0].is_inference()]
                tensors, versions = [tensor for tensor, _ in counted], [version for _, version in counted]
            set_versions(tensors, versions)

    def __exit__(self, *error: object) -> None:
        if self._marks:
            list(map(rewound_memory.pop, self._marks))  # those of other threads stay
            rewound_memory.update(self._hidden)
        count = len(self._state.shadows)
        if self._is_rewound or (count and versions_of(self._state.tensors[:count]) != self._versions[:count]):
            run_unseen(self._put_back)
        if self._small is not None:
            self._small.put(SmallCopy(self._small.tensors, self._small.places))
        self._set_versions(self._versions)
        vars(self).clear()  # a traceback may hold this context

    @torch.no_grad()
    def _put_back(self) -> None:
        state = self._state
        for tensor, content, geometry, memory in self._writes:
            put(tensor, content, geometry, memory)
        for tensor, previous in self._previous:
            if previous is not None:
                current_shadows[id(tensor)] = previous
            else:
                current_shadows.pop(id(tensor), None)
        written = {id(tensor) for tensor, *_ in self._writes}
        now = versions_of(state.tensors)
        for tensor, shadow, version, before in zip(state.tensors, state.shadows, now, self._versions):
            if version != before and id(tensor) not in written:  # unchanged since the forward, written to by this one
                shadow.put(tensor)
        for present in self._present:
            # Memory for reading only is left alone; on an accelerator to ask would be to wait.
            if not (present.tensors[0].is_cpu and GroupCopy(present.tensors).are(present)):
                present.put()


def _set_aside(tensor: Tensor) -> tuple[Tensor, Tensor, Any, Any]:
    found = geometry_of(tensor)
    return tensor, elements_of(tensor), found, None if found is None else tensor.detach()
