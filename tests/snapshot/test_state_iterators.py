"""Iterators: the recomputation takes the items that the forward took, or says that it cannot."""

from __future__ import annotations

import array
import csv
import functools
import io
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from several import each
from state_programs import Holding, Program, Programs, Wrap, backward, check_program, curve, leaf, train, vectors
from torch import Tensor, nn
from torch.utils.data import DataLoader

import reactivate
from reactivate._snapshot.iterators import copied, position_of

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, loud = PROGRAMS.right, PROGRAMS.loud


def with_iterator(wrap: Wrap, make: Callable[[list[Any]], Any]) -> Any:
    def fn(x: Tensor, items: Any) -> Tensor:
        for item in items:
            for weight in item if isinstance(item, tuple) else (item,):
                x = curve(x * weight, 2)
        return x

    weights = [leaf(4) for _ in range(3)]
    checkpointed = wrap(fn)
    return [train(lambda x: checkpointed(x, make(weights)), vectors()), [weight.grad for weight in weights]]


PROGRAMS.rows(
    with_iterator,
    {
        "zip_argument": (lambda weights: zip(weights, [1.0, 2.0, 3.0]),),
        "enumerate_argument": (lambda weights: enumerate(weights, 1),),
        "list_iterator_argument": (iter,),
        "reversed_argument": (reversed,),
        "dict_values_argument": (lambda weights: dict(enumerate(weights)).values(),),
        "map_argument": (lambda weights: map(torch.sin, weights),),
    },
)


@right
def captured_iterator_advances(wrap: Wrap) -> Any:
    factors = iter([1.0, 2.0, 3.0, 4.0])
    return [train(wrap(lambda x: curve(x, next(factors))), vectors(3)), next(factors)]


def scaled_by_all(x: Tensor, pairs: Any) -> Tensor:
    for factor, shift in pairs:
        x = curve(x, factor) + shift
    return x


def in_a_call(wrap: Wrap, call: Callable[[Wrap, Tensor, Any], Tensor]) -> Any:
    return train(lambda x: call(wrap, x, zip([0.5, 1.5], [1.0, 2.0])), vectors())


PROGRAMS.rows(
    in_a_call,
    {
        "iterator_in_a_default": (lambda wrap, x, pairs: wrap(lambda y, given=pairs: scaled_by_all(y, given))(x),),
        "iterator_bound_by_a_partial": (
            lambda wrap, x, pairs: wrap(functools.partial(lambda given, y: scaled_by_all(y, given), pairs))(x),
        ),
        "iterator_named_by_a_partial": (lambda wrap, x, pairs: wrap(functools.partial(scaled_by_all, pairs=pairs))(x),),
        "iterator_in_a_tuple": (
            lambda wrap, x, pairs: wrap(lambda given: scaled_by_all(given[0], given[1][0]))((x, (pairs, None))),
        ),
        "iterator_in_a_tuple_in_a_list": (
            lambda wrap, x, pairs: wrap(lambda y, given: scaled_by_all(y, given[0][0]))(x, [(pairs, None)]),
        ),
    },
)


def of_a_module(wrap: Wrap, place: Callable[[Any], Any], find: Callable[[Any], Any]) -> Any:
    class Block(Holding):
        def forward(self, x: Tensor) -> Tensor:
            return curve(x, next(find(self.factors)))

    block = Block(factors=place(iter([1.0, 2.0, 3.0, 4.0])))
    return [train(wrap(block), vectors(3)), next(find(block.factors))]


PROGRAMS.rows(
    of_a_module,
    {
        "iterator_in_an_attribute_of_a_module": (lambda items: items, lambda factors: factors),
        "iterator_in_a_tuple_of_a_module": (lambda items: (items, 1), lambda factors: factors[0]),
    },
)


@right
def iterator_in_an_attribute_of_a_class(wrap: Wrap) -> Any:
    class Block(nn.Module):
        factors = iter([1.0, 2.0, 3.0, 4.0])

        def forward(self, x: Tensor) -> Tensor:
            return curve(x, next(self.factors))

    return [train(wrap(Block()), vectors(3)), next(Block.factors)]


@right
def iterator_in_an_attribute_of_a_function(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        return curve(x, next(fn.factors))  # type: ignore[attr-defined]

    fn.factors = iter([1.0, 2.0, 3.0, 4.0])  # type: ignore[attr-defined]
    return [train(wrap(fn), vectors(3)), next(fn.factors)]


@loud
def captured_count_advances(wrap: Wrap) -> Any:
    counter = itertools.count(1)
    return [train(wrap(lambda x: curve(x, next(counter))), vectors(3)), next(counter)]


@loud
def generator_argument_is_consumed(wrap: Wrap) -> Any:
    def make(weights: list[Tensor]) -> Iterator[Tensor]:
        yield from weights

    return with_iterator(wrap, make)


def advanced(wrap: Wrap, make: Callable[[], Any], number: Callable[[Any], float] = float) -> list[Any]:
    """Advance an iterator in an attribute, an argument, a list and a closure, before and after what autograd saves."""

    class Block(Holding):
        def forward(self, x: Tensor) -> Tensor:
            y = curve(x, number(next(self.items)))
            return curve(y, number(next(self.items))) * number(next(self.items))

    block, closed_over, listed = Block(items=make()), make(), [make()]

    def fn(x: Tensor, given: list[Any]) -> Tensor:
        y = curve(curve(x, number(next(closed_over))), number(next(given[0])))
        return y * number(next(closed_over)) * number(next(given[0]))

    def of_argument(x: Tensor, given: Any) -> Tensor:
        return curve(curve(x, number(next(given))), number(next(given)))

    closing, with_argument, given = wrap(fn), wrap(of_argument), make()
    found: list[Any] = [train(wrap(block), vectors(3))]
    found.append(train(lambda x: closing(x, listed), vectors(3)))
    found.append(train(lambda x: with_argument(x, given), vectors(3)))
    return [*found, *(number(next(items)) for items in (block.items, closed_over, listed[0], given))]


def square(number: float) -> float:
    return number * number


def countdown() -> Callable[[], int]:
    numbers = [*range(30, 0, -1)]
    return numbers.pop


COPIED: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0, 4.0, 5.0]), float),
    "islice": (lambda: itertools.islice(range(100), 3, 90, 2), float),
    "accumulate": (lambda: itertools.accumulate(range(1, 40)), float),
    "accumulate of a number": (lambda: itertools.accumulate(range(1, 40), initial=3), float),
    "starmap": (lambda: itertools.starmap(pow, [(i, 2) for i in range(1, 40)]), float),
    "deque": (lambda: iter(deque(range(1, 40))), float),
    "takewhile": (lambda: itertools.takewhile(lambda item: item < 90, range(1, 90)), float),
    "dropwhile": (lambda: itertools.dropwhile(lambda item: item < 2, range(1, 40)), float),
    "compress": (lambda: itertools.compress(range(1, 90), itertools.cycle([1, 0, 1])), float),
    "groupby": (lambda: itertools.groupby([1, 1, *range(2, 40)]), lambda pair: float(pair[0] + len(list(pair[1])))),
    "chain": (lambda: itertools.chain([1.0], iter(range(2, 20)), range(30)), float),
    "zip_longest": (lambda: itertools.zip_longest(range(1, 9), [1] * 30, fillvalue=2), lambda pair: float(sum(pair))),
    "strict zip": (lambda: zip(range(1, 40), range(39), strict=True), lambda pair: float(sum(pair))),
    "one iterator twice": (lambda: zip(*[iter(range(1, 90))] * 2), lambda pair: float(pair[0] - 3 * pair[1])),
    "tee": (lambda: itertools.tee(range(1, 40))[0], float),
    "array": (lambda: iter(array.array("d", range(1, 40))), float),
    "callable": (lambda: iter(functools.partial(next, itertools.count(1)), None), float),
    "method of a list": (lambda: iter(countdown(), None), float),
    "map over a list": (lambda: map(square, [*range(1, 40)]), float),
    "nditer": (lambda: numpy.nditer(numpy.arange(1, 40)), float),
    "ndenumerate": (lambda: numpy.ndenumerate(numpy.arange(1, 40)), lambda pair: float(pair[1])),
    "text stream": (lambda: io.StringIO("\n".join(map(str, range(1, 40)))), float),
    "byte stream": (lambda: io.BytesIO(b"\n".join(b"%d" % number for number in range(1, 40))), float),
}


@each("name", COPIED)
def test_advanced_iterator_is_copied(name: str) -> None:
    check_program(Program(lambda wrap: advanced(wrap, *COPIED[name]), recomputations=9))


def numbers() -> Iterator[int]:
    yield from range(1, 40)


WITHOUT_A_COPY: dict[str, Callable[[], Any]] = {
    "pairwise": lambda: map(sum, itertools.pairwise(range(1, 40))),
    "finditer": lambda: map(re.Match.group, re.finditer(r"\d", "123456789" * 9)),
    "memoryview": lambda: iter(memoryview(bytes(range(1, 40)))),
    "generator": numbers,
    "map of a generator": lambda: map(float, numbers()),
}


@each("where", ["attribute", "argument", "list", "closure"])
@each("name", WITHOUT_A_COPY)
def test_iterator_without_a_copy(name: str, where: str) -> None:
    """Nobody is disturbed as long as the forward does not advance it; if it does, the recomputation raises."""

    def make(*, advances: bool) -> Callable[[Wrap], Any]:
        def run(wrap: Wrap) -> Any:
            items = WITHOUT_A_COPY[name]()

            def scaled(x: Tensor, items: Any) -> Tensor:
                return curve(x, float(next(items)) if advances else 2.0)

            class Block(Holding):
                def forward(self, x: Tensor) -> Tensor:
                    return scaled(x, self.items)

            if where == "attribute":
                checkpointed = wrap(Block(items=items))
            elif where == "argument":
                checkpointed = functools.partial(wrap(scaled), items=items)
            elif where == "list":
                with_list = wrap(lambda x, given: scaled(x, given[0]))
                checkpointed = functools.partial(with_list, given=[items])
            else:
                checkpointed = wrap(lambda x: scaled(x, items))
            found = []
            for x in vectors(3):
                out = checkpointed(x)
                found.append(float(next(items)))
                backward(out)
                found.append(x.grad)
            return [found, float(next(items))]

        return run

    if where != "argument" or "generator" not in name:  # one that somebody has advanced before raises
        check_program(Program(make(advances=False), recomputations=3))
    with pytest.raises(reactivate.errors.UnsupportedError, match="list"):
        make(advances=True)(reactivate.checkpoint)


@right
def used_up_generator_is_asked_again(wrap: Wrap) -> Any:
    items = numbers()
    list(items)
    return train(wrap(lambda x: curve(x, next(items, 3.0))), vectors(3))


@right
def class_of_an_iterator_without_a_copy(wrap: Wrap) -> Any:
    pairs = itertools.pairwise([1, 2, 3])
    return train(wrap(lambda x: curve(x, 2 if isinstance(pairs, itertools.pairwise) else 3)), vectors(3))


def test_position_of_an_iterator() -> None:
    """The number that the iterator has reached may have the address of an earlier one."""
    steps = itertools.count(0.5)
    before = position_of(steps)
    assert position_of(steps) == before
    for _ in range(20):
        next(steps)
        assert position_of(steps) != before
    for items in (iter({1: 2, 3: 4}), iter({5, 6}), itertools.cycle([1, 2]), zip([1, 2], [3, 4])):
        before = position_of(items)
        assert position_of(items) == before
        next(items)  # type: ignore[call-overload]
        assert position_of(items) != before


def test_copy_of_a_cycle_adds_to_a_list_of_its_own() -> None:
    items = itertools.cycle(range(3))
    next(items)
    twin = copied(items)
    assert list(itertools.islice(twin, 7)) == list(itertools.islice(items, 7)) == [1, 2, 0, 1, 2, 0, 1]
    assert list(itertools.islice(twin, 3)) == list(itertools.islice(items, 3)) == [2, 0, 1]


UNNOTED: dict[str, Callable[[], Any]] = {
    "file": functools.partial(open, __file__),
    "csv": lambda: csv.reader(["1", "2"]),
    "loader": lambda: iter(DataLoader([1, 2])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", UNNOTED)
def test_iterator_over_one_that_nobody_notes_has_no_copy(name: str) -> None:
    items = UNNOTED[name]()
    with pytest.raises(reactivate.errors.UnsupportedError, match="`enumerate`"):
        next(copied(enumerate(items)))
    getattr(items, "close", list)()


@right
def iterator_of_ones_own_is_enumerated(wrap: Wrap) -> Any:
    class Numbers:
        def __init__(self) -> None:
            self.reached = 0

        def __iter__(self) -> Numbers:
            return self

        def __next__(self) -> int:
            self.reached += 1
            return self.reached

    numbered = enumerate(Numbers())
    return train(wrap(lambda x: curve(x, sum(next(numbered)))), vectors(3))
