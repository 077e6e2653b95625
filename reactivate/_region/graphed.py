"""Constants that became part of the graph since a forward read them: a recomputation gets each as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from reactivate._snapshot.geometry import memory_of
from reactivate._snapshot.inputs import Constant, TupleInput

if TYPE_CHECKING:
    from reactivate._region.region import Region

_REQUIRES_GRAD = attrgetter("requires_grad")


def hide_graphs(region: Region) -> None:
    """Let recomputations read without a gradient what had none, and has one by now: something wrote one into it.

    Two in the same memory are not hidden: a write to one must make the other part of the graph. Code that reads what is not
    hidden saves what he saved in the forward, or more: where a whole recomputation saves as much, it saves the same. So
    none stops early.
    """
    if not region.inputs and region.reached is None and True not in map(_REQUIRES_GRAD, region.moment.states.tensors):
        return  # as mostly
    reached = () if region.reached is None else region.reached.moments
    moments = [region.moment, *(moment for moment in reached if moment.light is None)]
    read = [item for item in region.inputs if item.is_constant and item.tensor.requires_grad]
    found = [(item.tensor, item.version) for item in read]
    for moment in moments:
        found += moment.differentiable_since()
    found = [item for item in found if id(item[0]) not in region.replaced]
    if found:
        region.early_stop = False
        graphed = [tensor for tensor, _ in found if not tensor.is_leaf]
        counts = Counter(map(memory_of, graphed))
        hidden = {id(tensor): Constant(tensor) for tensor in graphed if counts[memory_of(tensor)] == 1}
        region.replaced = {**region.replaced, **hidden}
        region.args = [_opened(item, hidden) for item in region.args]
        region.kwargs = {name: _opened(item, hidden) for name, item in region.kwargs.items()}
        for moment in moments:
            moment.hide_graphs(hidden, [item for item in found if item[0].is_leaf])


def _opened(spec: Any, hidden: Mapping[int, Constant]) -> Any:
    """Return a spec of a tuple's items, if one of them is hidden."""
    if not isinstance(spec, tuple):
        return spec
    items = [_opened(item, hidden) for item in spec]
    is_same = all(item is before and id(item) not in hidden for item, before in zip(items, spec))
    return spec if is_same else TupleInput(type(spec), items)
