"""The modules in which sizes depend on the numbers in tensors, found while a step runs.

A router says how many tokens go to each expert. From then on the sizes of what its module computes are of this batch,
those of the modules that it calls, and those of their gradients. They stay inside if what the module returns is as large
as something that was there before, or that is made elsewhere; else the module around it is one of them as well.

Numbers that follow from arguments alone (a mask made of token ids) decide nothing here: a plan is made for its arguments.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from weakref import WeakSet

from torch import Tensor, UntypedStorage

from reactivate._modules.paths import is_below
from reactivate._region.accounts import storages_of
from reactivate._torch.ops import flatten
from reactivate.planner.trace.records import Trace


class DataScope:
    """The modules in which sizes depend on data.

    Args:
        known: the tensors that are there before the step.
        state: those among them that are the model's.

    Attributes:
        paths: of the modules; "" for the model itself, and for what runs outside of it.
    """

    def __init__(self, known: Iterable[Tensor] = (), state: Iterable[Tensor] = ()) -> None:
        self.paths: set[str] = set()
        self._shapes: set[tuple[int, ...]] = set()  # of tensors that are no such module's
        self._given: WeakSet[UntypedStorage] = WeakSet()  # memory whose numbers follow from arguments
        own = set(map(id, state))
        for tensor in known:
            self._shapes.add(tuple(tensor.shape))
            if not tensor.is_floating_point() and not tensor.is_complex() and id(tensor) not in own:
                self._follow([tensor], is_given=True)

    def ran(self, given: list[Tensor], made: list[Tensor], path: str, *, reads_numbers: bool) -> None:
        """An op of a module has run.

        Args:
            given, made: what it has read and returned.
            reads_numbers: whether its result's size, or its meaning for Python, is in the numbers that it is given.
        """
        is_given = all(storage in self._given for tensor in given for storage in storages_of(tensor))
        if reads_numbers and not is_given:
            self.paths.add(path)
        self._follow(made, is_given=is_given)
        if not any(is_below(path, above) for above in self.paths):
            self._shapes.update(tuple(tensor.shape) for tensor in (*given, *made))

    def returned(self, path: str, outer: str, result: Any) -> None:
        """A module has returned to the one around it."""
        if path in self.paths and outer != path:
            tensors = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
            if any(tuple(tensor.shape) not in self._shapes for tensor in tensors):
                self.paths.add(outer)

    def _follow(self, tensors: Iterable[Tensor], *, is_given: bool) -> None:
        note = self._given.add if is_given else self._given.discard
        for tensor in tensors:
            for storage in storages_of(tensor):
                note(storage)


@dataclass(frozen=True)
class DataMargin:
    """The room that is left for other batches.

    Attributes:
        share: the part by which memory may be larger whose size depends on data.
        paths: the modules that make it, with those inside of them; "" for all that a step makes.
    """

    share: Fraction = Fraction(0)
    paths: frozenset[str] = frozenset()

    def over(self, trace: Trace) -> Trace:
        """Return a step in which all such memory is larger by the share, and take down in `trace` what its peak grows by."""
        changes: Counter[int] = Counter()
        gone: Counter[int] = Counter()
        is_of_data = functools.cache(lambda place: any(is_below(place, path) for path in self.paths))
        for item in trace.allocations if self.share and self.paths else ():
            if is_of_data(item.place):
                changes[item.born] += item.size_bytes
                if item.died is not None:
                    gone[item.died] += item.size_bytes
        if not changes:
            trace.margin_bytes = 0
            return trace

        def part(size_bytes: int) -> int:  # of a step's thousands of sizes: fractions would take as long as the step
            return -(-size_bytes * self.share.numerator // self.share.denominator)

        after, live = [0], 0  # `after[k]`: what of it is alive before op k
        ops = []
        for number, op in enumerate(trace.ops):
            top = live + changes[number]
            live = top - gone[number]
            after.append(live)
            sizes = op.start_bytes + part(after[number]), op.top_bytes + part(top), op.live_bytes + part(live)
            ops.append(op._replace(start_bytes=sizes[0], top_bytes=sizes[1], live_bytes=sizes[2]))
        calls = [
            [replace(call, live_bytes=call.live_bytes + part(after[call.op])) for call in turn] for turn in trace.calls
        ]
        larger = replace(trace, ops=ops, calls=calls)
        trace.margin_bytes = larger.peak_bytes - trace.peak_bytes
        return larger
