"""Limits of generators and iterators, which a region copies, or refuses."""

from __future__ import annotations

from typing import Any

import pytest
from limit_cases import NEVER, is_right, ours, shows, torchs
from torch import Tensor, nn

from reactivate.errors import RecomputeMismatchError, UnsupportedError


@shows("Generators")
def test_generators() -> None:
    def make() -> tuple[Any, ...]:
        return lambda x, items: (x.sin() * next(items)).exp(), (float(number) for number in range(1, 100))

    assert is_right(torchs, make) == NEVER
    assert is_right(ours(), make) == [UnsupportedError] * 3
    assert is_right(ours(), lambda: (make()[0], iter([1.0, 2.0, 3.0]))) == [True] * 3


@pytest.mark.parametrize("where", ["closure", "attribute"])
def test_generators_that_are_no_arguments(where: str) -> None:
    def make() -> tuple[Any, ...]:
        holder, items = nn.Module(), (float(number) for number in range(1, 100))
        holder.items = items  # type: ignore[assignment]
        if where == "attribute":
            return (lambda x: (x.sin() * next(holder.items)).exp(),)  # type: ignore[call-overload]
        return (lambda x: (x.sin() * next(items)).exp(),)

    assert is_right(torchs, make) == NEVER
    assert is_right(ours(), make) == [UnsupportedError] * 3


@pytest.mark.parametrize("advance", ["send", "throw"])
def test_generators_that_are_sent_something(advance: str) -> None:
    def make() -> tuple[Any, ...]:
        def numbers() -> Any:
            number = 1.0
            while True:
                try:
                    number += (yield number) or 1
                except KeyError:
                    number += 1

        items = numbers()
        next(items)
        return (lambda x: (x.sin() * getattr(items, advance)(2 if advance == "send" else KeyError())).exp(),)

    assert is_right(torchs, make) == NEVER
    assert is_right(ours(), make) == [UnsupportedError] * 3


def test_a_generator_that_the_forward_closes() -> None:
    def make() -> tuple[Any, ...]:
        items = (number for number in range(9))
        return (lambda x: (items.close(), x.sin().exp())[1],)

    assert is_right(ours(), make) == [True] * 3


@shows("One iterator in two places")
def test_one_iterator_in_two_places() -> None:
    def make() -> tuple[Any, ...]:
        items = iter([float(number) for number in range(1, 100)])
        pairs = zip(items, range(100))

        def fn(x: Tensor) -> Tensor:
            return ((x.sin() * next(items)).sin() * next(pairs)[0]).exp()

        return (fn,)

    def make_in_a_tuple() -> tuple[Any, ...]:
        items = iter([float(number) for number in range(1, 100)])
        both = items, zip(items, range(100))

        def fn(x: Tensor) -> Tensor:
            return ((x.sin() * next(both[0])).sin() * next(both[1])[0]).exp()

        return (fn,)

    assert is_right(torchs, make) == NEVER
    assert is_right(ours(check="metadata"), make) == NEVER
    assert RecomputeMismatchError in is_right(ours(), make)
    assert is_right(ours(), make_in_a_tuple) == [True] * 3
