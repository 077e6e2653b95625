"""References to torch's checkpoint functions, in every place that one can be in: `dropin.install` finds them all."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as upstream
from install_cases import Get, check_runs_here, check_runs_on_torch, with_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reactivate import dropin

pytestmark = pytest.mark.usefixtures("whole_heap")


class Plain:
    """An object whose attributes Python keeps without a dict, as long as nobody asks for that."""

    def __init__(self, function: Any) -> None:
        self.function = function


@dataclass(frozen=True, slots=True)
class Frozen:
    function: Any


Named = namedtuple("Named", ["function", "label"])


def module_of_its_own() -> Get:
    module = types.ModuleType("a_library")
    exec("from torch.utils.checkpoint import checkpoint as renamed", vars(module))
    return lambda: module.renamed


def function_of_partial() -> Get:
    partial = functools.partial(upstream.checkpoint, use_reentrant=False)
    return lambda: partial.func


def argument_of_partial() -> Get:
    partial = functools.partial(print, 1, upstream.checkpoint)
    return lambda: partial.args[1]


def keyword_of_partial() -> Get:
    partial = functools.partial(print, function=upstream.checkpoint)
    return lambda: partial.keywords["function"]


def closure() -> Get:
    function = upstream.checkpoint
    return lambda: function


def class_attribute() -> Get:
    class Base:
        function = upstream.checkpoint

    class Derived(Base):
        pass

    Derived.function  # now Python has it in a cache
    return lambda: Derived.function


def static_method() -> Get:
    class Owner:
        function = staticmethod(upstream.checkpoint)

    return lambda: Owner.function


def default_argument() -> Get:
    def function(first: int = 1, function: Any = upstream.checkpoint) -> Any:
        return function

    return function


def keyword_default() -> Get:
    def function(*, function: Any = upstream.checkpoint) -> Any:
        return function

    return function


def attribute_of_object() -> Get:
    plain = Plain(upstream.checkpoint)
    return lambda: plain.function


def attribute_of_module() -> Get:
    module = nn.Linear(1, 1)
    module.function = upstream.checkpoint
    return lambda: module.function


def attribute_of_function() -> Get:
    def function() -> Any:
        return function.engine  # type: ignore[attr-defined]

    function.engine = upstream.checkpoint  # type: ignore[attr-defined]
    return function


def slot() -> Get:
    frozen = Frozen(upstream.checkpoint)
    return lambda: frozen.function


def value_of_dict() -> Get:
    table = {"full": upstream.checkpoint}
    return lambda: table["full"]


def item_of_list() -> Get:
    items = [None, upstream.checkpoint]
    return lambda: items[1]


def item_of_deque() -> Get:
    items = deque([None, upstream.checkpoint])
    return lambda: items[1]


def tuple_in_dict() -> Get:
    table = {"full": (upstream.checkpoint, {"use_reentrant": False})}
    return lambda: table["full"][0]


def tuple_in_tuple_in_list() -> Get:
    items = [(1, (2, upstream.checkpoint))]
    return lambda: items[0][1][1]


def named_tuple() -> Get:
    items = [Named(upstream.checkpoint, "full")]
    return lambda: items[0].function


PLACES: list[Callable[[], Get]] = [
    *(module_of_its_own, function_of_partial, argument_of_partial, keyword_of_partial, closure, class_attribute),
    *(static_method, default_argument, keyword_default, attribute_of_object, attribute_of_module),
    *(attribute_of_function, slot, value_of_dict, item_of_list, item_of_deque, tuple_in_dict, tuple_in_tuple_in_list),
    named_tuple,
]


def test_references_of_every_kind() -> None:
    """Made before, they are ours while it is installed, and torch's very own before and after."""
    original = upstream.checkpoint  # a local variable of a running function keeps what it has
    places = {make.__name__: make() for make in PLACES}
    places["the global of a module"] = lambda: checkpoint
    for name, get in places.items():
        assert get() is original, name
    with dropin.install():
        assert upstream.checkpoint is not original
        for name, get in places.items():
            assert get() is upstream.checkpoint, name
            check_runs_here(with_checkpoint(get))
    for name, get in places.items():
        assert get() is original, name
        check_runs_on_torch(with_checkpoint(get))


class Counting(nn.Module):
    """Writes to a buffer, of which a region has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(128, 128))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return (x.sin() * self.count.mean()).exp()


def test_copies_of_buffers_go_with_the_installation() -> None:
    def tensor_bytes() -> int:
        return sum(item.nbytes for item in gc.get_objects() if type(item) is Tensor)

    model = Counting()
    with dropin.install() as installed:
        for _ in range(2):
            upstream.checkpoint(model, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
        during = tensor_bytes()
    assert installed.regions == 2
    assert tensor_bytes() <= during - model.count.nbytes


def test_references_made_while_installed() -> None:
    """They are torch's afterwards, as if they had been made then."""
    original = upstream.checkpoint
    with dropin.install():
        places = {make.__name__: make() for make in PLACES}
        for name, get in places.items():
            assert get() is not original, name
    for name, get in places.items():
        assert get() is original, name


def test_containers_are_the_same_objects_afterwards() -> None:
    """Also those that cannot be written to, and others stood in for."""
    table = {"pair": (upstream.checkpoint, 1), "nested": (0, (upstream.checkpoint, 2))}
    method = staticmethod(upstream.checkpoint)
    owner = type("Owner", (), {"function": method})
    pair, nested = table["pair"], table["nested"]
    with dropin.install():
        assert table["pair"] == (upstream.checkpoint, 1)
        assert table["nested"][1][0] is owner.function is upstream.checkpoint  # type: ignore[index, attr-defined]
    assert table["pair"] is pair
    assert table["nested"] is nested
    assert vars(owner)["function"] is method
