"""Objects whose contents can change: what each tells of whether it holds what it held."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from reactivate._snapshot.holders import ClassHolder, DictHolder


def a_class() -> Any:
    return type("Made", (), {"a": 1, "b": 2})


def change(target: Any) -> None:
    target["a"] = object()


def order_again(target: Any) -> None:
    target["a"] = target.pop("a")


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "an item": (lambda: {"a": 1, "b": 2}, change),
    "another item": (lambda: {"a": 1, "b": 2}, lambda target: target.update(c=3)),
    "one less": (lambda: {"a": 1, "b": 2}, lambda target: target.clear()),
    "the order": (lambda: {"a": 1, "b": 2}, order_again),
    "the order, in a dict of a subclass": (lambda: OrderedDict(a=1, b=2), lambda target: target.move_to_end("a")),
    "an iterator that goes on": (lambda: {"a": iter([1, 2])}, lambda target: next(target["a"])),
    "an attribute": (a_class, lambda target: setattr(target, "a", object())),
    "a new attribute": (a_class, lambda target: setattr(target, "c", 3)),
    "no attribute": (a_class, lambda target: delattr(target, "a")),
}


NEVER_AT = {"an iterator that goes on", "no attribute"}
"""What is put back each time: an iterator is copied, and an attribute of a class comes back behind the others."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_and_put_back(change: str) -> None:
    make, write = CHANGES[change]
    target = make()
    holder: Any = ClassHolder(target) if isinstance(target, type) else DictHolder(target)
    first = holder.record()
    assert holder.is_at(first) or change in NEVER_AT
    for _ in range(2):  # the second time from contents that were compared
        write(target)
        assert not holder.is_at(first)
        assert not holder.is_at(first), "a look changes nothing"
        holder.put(first)
        assert holder.is_at(first) or change in NEVER_AT


def test_what_is_written_again_is_the_same() -> None:
    item = object()
    target = {"a": item}
    holder = DictHolder(target)
    contents = holder.record()
    target["a"] = item
    assert holder.is_at(contents)
    target["a"] = object()
    assert not holder.is_at(contents)


def test_contents_of_an_earlier_moment_are_compared() -> None:
    target: dict[str, Any] = {"a": object()}
    holder = DictHolder(target)
    first = holder.record()
    change(target)
    second = holder.record()
    assert holder.is_at(second)
    assert not holder.is_at(first)
    holder.put(first)
    assert holder.is_at(first)
    assert not holder.is_at(second)
