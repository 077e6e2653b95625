"""Arguments and closures that the function changes: once for each call, however often it is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from journal import Journal
from oracle import compare, leaf
from torch import Tensor, nn

import reactivate
from reactivate.errors import UnsupportedError


def test_a_list_that_the_function_pops() -> None:
    def once(wrap: Any) -> list[Any]:
        x, items = leaf(4), [leaf(4), leaf(4), leaf(4)]
        kept = list(items)

        def fn(x: Tensor, items: list[Tensor]) -> Tensor:
            return (x * items.pop()).sin().exp()

        fn = wrap(fn)
        out = fn(x, items) + fn(x, items)
        assert len(items) == 1
        out.sum().backward()
        assert len(items) == 1
        return [x.grad, *(item.grad for item in kept)]

    compare(once)


class Cache:
    """Like a key-value cache: an object with a list of layers that grow."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.seen = 0

    def update(self, index: int, key: Tensor) -> Tensor:
        if index == len(self.layers):
            self.layers.append(Layer())
        self.seen += 1
        return self.layers[index].update(key)


class Layer:
    keys: Tensor | None = None

    def update(self, key: Tensor) -> Tensor:
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        return self.keys


def test_a_cache_that_is_appended_to() -> None:
    def once(wrap: Any) -> list[Any]:
        x, cache = leaf(2, 4), Cache()

        def fn(x: Tensor, cache: Cache, index: int) -> Tensor:
            return cache.update(index, x.sin()).exp().mean(0, keepdim=True).expand_as(x) * x

        fn = wrap(fn)
        h = x
        for _ in range(2):
            for index in range(3):
                h = fn(h, cache, index)
        h.sum().backward()
        assert cache.seen == 6 and [tuple(layer.keys.shape) for layer in cache.layers] == [(4, 4)] * 3
        return [h.detach(), x.grad]

    compare(once)


def test_a_dict_that_is_written_to_and_a_set_and_an_iterator() -> None:
    def once(wrap: Any) -> list[Any]:
        x, table, names, numbers = leaf(4), {"scale": leaf(4)}, {"a"}, iter([2.0, 3.0])

        def fn(x: Tensor, table: dict[str, Tensor], names: set[str], numbers: Iterator[float]) -> Tensor:
            scale = table.pop("scale") if "a" in names else torch.zeros(4)
            names.discard("a")
            table["new"] = x.detach()
            return (x * scale * next(numbers)).sin().exp()

        kept = table["scale"]
        out = wrap(fn)(x, table, names, numbers)
        out.sum().backward()
        assert list(table) == ["new"] and names == set() and next(numbers) == 3.0
        return [x.grad, kept.grad]

    compare(once)


def test_a_generator_that_the_forward_goes_through_is_refused_by_name() -> None:
    out = reactivate.checkpoint(lambda x, items: (x * next(items)).exp())(leaf(4), (item for item in [1.0]))
    with pytest.raises(UnsupportedError, match="generator.*Pass a list"):
        out.sum().backward()


def test_a_generator_that_nobody_goes_through_is_passed_on() -> None:
    x, items = leaf(4), (item for item in [1.0])
    reactivate.checkpoint(lambda x, items: x.sin().exp())(x, items).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert next(items) == 1.0


def test_counters_in_a_closure_count_each_call_once() -> None:
    """Rule 23: a recomputation finds them as the forward did, and leaves them as it found them."""
    x, counts, calls, seen = leaf(4), [0], 0, Journal()

    def fn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        counts[0] += 1
        seen.append((calls, counts[0]))
        return x.sin().exp()

    out = reactivate.checkpoint(fn)(x).sum() + reactivate.checkpoint(fn)(x).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert calls == counts[0] == 2
    assert sorted(seen) == [(1, 1)] * 3 + [(2, 2)] * 3


def test_late_binding_of_a_loop_variable() -> None:
    x, layers = leaf(4, 8), [nn.Linear(8, 8) for _ in range(3)]

    def once(wrap: Any) -> Any:
        h = x
        for index, layer in enumerate(layers):
            h = wrap(lambda h: layer(h).tanh() * (index + 1))(h)
        return torch.autograd.grad(h.sum(), [x, *(layer.weight for layer in layers)])

    compare(once)
