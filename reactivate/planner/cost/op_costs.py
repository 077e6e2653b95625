"""The costs of ops: from a roofline, or as they were measured.

An op is known by its name, the shapes, strides and dtypes of its tensors, and its other arguments. Of one that was
measured in other shapes, a roofline tells how its time changes with them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reactivate._inspect.collectives import is_collective
from reactivate._region.accounts import storages_of
from reactivate._torch.ops import group_name_of, opaque_arguments, ranks_of, tensors_at_op
from reactivate.planner.cost import collectives, roofline
from reactivate.planner.cost.devices import DeviceSpec
from reactivate.planner.trace.records import SUM_IN_PLACE, Cost, Trace

Key = tuple[Hashable, ...]


class _TensorFacts(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype


class RooflineCosts:
    """The costs of ops as a roofline tells, and those of collectives as the links between devices do."""

    def __init__(self, spec: DeviceSpec, rounding: int) -> None:
        self.rounding = rounding
        self.has_streams = rounding > 1  # a CPU's processes share its cores: nothing runs beside compute
        self._spec = spec
        self._known: dict[Key, Cost] = {}

    def of(self, op: Any, args: Any, kwargs: Any, result: Any) -> Cost:
        group = group_name_of(op, args, kwargs) if is_collective(op) else None
        key = op_key(op, args, kwargs) if group is None else (*op_key(op, args, kwargs), group)
        cost = self._known.get(key)
        if cost is None:
            if group is None:
                cost = Cost(roofline.seconds_of(op, args, kwargs, result, self._spec))
            else:
                cost = Cost(collectives.seconds_of(op, args, result, ranks_of(group), self._spec), group=group)
            self._known[key] = cost
        return cost


class MeasuredCosts(RooflineCosts):
    """The costs of ops as they were measured; of an op in other shapes, what its nearest ones lead to.

    Its time is to the roofline's as it was there. What a kernel takes for itself grows with its tensors, and is never taken
    to be less than it was: it may not depend on shapes, or only up to a size.

    Args:
        modelled: the seconds of the same ops as a roofline tells.
    """

    def __init__(
        self, spec: DeviceSpec, rounding: int, known: dict[Key, Cost], modelled: Mapping[Key, float] | None = None
    ) -> None:
        super().__init__(spec, rounding)
        self.has_streams = False  # each op was measured by itself
        self._known = dict(known)
        self._modelled = modelled or {}
        self._families: defaultdict[Key, list[Key]] = defaultdict(list)
        for key in self._modelled:
            self._families[_family_of(key)].append(key)
        self._measured = known

    def of(self, op: Any, args: Any, kwargs: Any, result: Any) -> Cost:
        key = op_key(op, args, kwargs)
        known = self._known.get(key)
        if known is None:
            family = self._families.get(_family_of(key))
            known = super().of(op, args, kwargs, result)
            if family:
                known = self._known[key] = self._like(key, min(family, key=_distance_from(key)), known, result)
        return known

    def priced(self, trace: Trace, before: RooflineCosts) -> Trace | None:
        """Return a step that ran for real with these costs; None if one of its ops was not measured.

        Args:
            trace: the step. Its tensors have the memory that they have, whatever an op costs.
            before: the costs that it was traced with.
        """
        keys = {id(cost): key for key, cost in before._known.items()}
        costs = [self._measured.get(keys[id(cost)]) for cost in trace.costs]
        if not trace.is_real or None in costs:
            return None
        ops = []
        for op, cost in zip(trace.ops, costs):
            assert cost is not None
            own_bytes = 0 if op.name == SUM_IN_PLACE else cost.top_bytes
            ops.append(op._replace(seconds=cost.seconds, top_bytes=max(op.live_bytes, op.start_bytes + own_bytes)))
        return replace(trace, ops=ops, costs=costs)  # type: ignore[arg-type]

    def _like(self, key: Key, near: Key, cost: Cost, result: Any) -> Cost:
        """Return the cost of the op `key`, whose result is known, from that of `near` and the roofline's for `key`."""
        measured, modelled = self._measured[near], self._modelled[near]
        seconds = measured.seconds * cost.seconds / modelled if modelled else measured.seconds
        own = measured.top_bytes - sum(measured.result_bytes)
        return Cost(seconds, sum(result_sizes(result)) + math.ceil(own * _growth(near, key)) if own > 0 else 0)


def _family_of(key: Key) -> Key:
    """Return what ops that differ in sizes have in common."""
    op, *arguments = key
    kinds = [
        (len(leaf.shape), leaf.dtype) if isinstance(leaf, _TensorFacts) else type(leaf)
        for leaf in _leaves_in(arguments)
    ]
    return (op, *kinds)


def without_strides(key: Hashable) -> Hashable:
    """Return what ops have in common whose tensors have the same shapes, and may lie in another order."""
    if isinstance(key, _TensorFacts):
        return key._replace(stride=None)
    return tuple(map(without_strides, key)) if isinstance(key, tuple) else key


def _shapes_in(key: Key) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in _leaves_in(key) if isinstance(leaf, _TensorFacts)]


def _leaves_in(facts: Iterable[Hashable]) -> Iterator[Hashable]:
    for item in facts:
        if isinstance(item, tuple) and not isinstance(item, _TensorFacts):
            yield from _leaves_in(item)
        else:
            yield item


def _distance_from(key: Key) -> Callable[[Key], float]:
    """Return what tells how far the sizes of an op of the same family are from those of `key`, in doublings."""
    mine = [size for shape in _shapes_in(key) for size in shape]

    def distance(other: Key) -> float:
        its = [size for shape in _shapes_in(other) for size in shape]
        return math.fsum(abs(math.log2((one + 1) / (two + 1))) for one, two in zip(mine, its, strict=True))

    return distance


def _growth(near: Key, key: Key) -> float:
    """Return how much larger the tensor is that grew most, at least 1."""
    pairs = zip(map(math.prod, _shapes_in(near)), map(math.prod, _shapes_in(key)), strict=True)
    return max([1.0, *(now / before for before, now in pairs if before)])


def op_key(op: Any, args: Any, kwargs: Any) -> Key:
    """Return the key of an op's cost: all that is known of the call before it runs."""
    opaque = opaque_arguments(op)
    if opaque:
        args = [None if position in opaque else value for position, value in enumerate(args)]
        kwargs = {name: None if name in opaque else value for name, value in kwargs.items()}
    return (op, *map(_facts_of, args), *((name, _facts_of(value)) for name, value in kwargs.items()))


def _facts_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return _TensorFacts(leaf.shape, leaf.stride() if leaf.layout is torch.strided else None, leaf.dtype)
    if isinstance(leaf, (list, tuple)):
        return tuple([_facts_of(item) for item in leaf])
    if isinstance(leaf, torch.ScriptObject):  # a process group, say, of which each call gets another object
        return torch.ScriptObject
    return leaf if isinstance(leaf, Hashable) else repr(leaf)


def result_sizes(result: Any) -> Iterator[int]:
    """Yield the bytes of the memory behind each tensor of a result."""
    for tensor in tensors_at_op(result):
        yield sum(int(storage.nbytes()) for storage in storages_of(tensor))
