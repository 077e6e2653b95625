"""Caches of classes and code: right answers beyond their bound, and nothing held for good."""

from __future__ import annotations

import gc
import inspect
import sys
from typing import Any

import oracle
import pytest
import torch
from state_programs import Holding
from torch import nn

import reactivate
from reactivate import policies
from reactivate._passes import places
from reactivate._region import due
from reactivate._snapshot import caches, facts
from reactivate._snapshot.bindings import CACHED
from reactivate._snapshot.caches import BoundedCache
from reactivate.storage import Host


def test_the_oldest_entry_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST", 3)
    found: BoundedCache[int, str] = BoundedCache()
    for number in range(5):
        found[number] = str(number)
    assert dict(found) == {2: "2", 3: "3", 4: "4"}
    found[2] = "two"
    assert dict(found) == {2: "two", 3: "3", 4: "4"}


def made_anew(number: int) -> nn.Module:
    class Made(Holding):
        def forward(self, x: Any) -> Any:
            self.calls += 1
            return self.inner(x).sin() * (number + self.calls)

    return Made(inner=nn.Linear(4, 4), calls=0)


def caches_of_package() -> set[Any]:
    rooms = [
        name
        for name in sys.modules
        if name.startswith(("reactivate._region", "reactivate._snapshot", "reactivate._saved_calls"))
    ]
    return {
        value
        for room in rooms
        for value in vars(sys.modules[room]).values()
        if isinstance(value, CACHED) and value.__module__ == room and inspect.signature(value).parameters
    }


def test_what_is_known_of_classes_and_code_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST", 8)
    for number in range(20):
        oracle.check(lambda: oracle.Case(made_anew(number), (torch.randn(2, 4, requires_grad=True),)))
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    before = len(due._calls)
    for number in range(20):  # of code and policies that are made anew
        names: dict[str, Any] = {"layer": layer}
        exec(f"def forward(x):\n    return layer(x).sin() * {number}", names)
        reactivate.checkpoint(names["forward"])(x).sum().backward()
        policy = policies.save_ops("linear", storage=Host(least_bytes=number))
        reactivate.checkpoint(layer, policy=policy)(x).sum().backward()
        del names
    for cache in caches_of_package():
        cache.cache_clear()
    gc.collect()
    assert len(due._calls) <= before + 10
    assert max(len(item.counts) for owner, _, item in due._calls.values() if owner() is layer) == 8
    assert len(facts.facts_of_code) <= 8 and len(places._known) <= 8
    names_now = [kind().__qualname__ for _, kind in facts._facts_of_class.values()]
    assert names_now and "made_anew.<locals>.Made" not in names_now, "classes that are gone"


def test_every_cache_with_arguments_is_bounded() -> None:
    found = caches_of_package()
    assert len(found) >= 3
    unbounded = {f"{cache.__module__}.{cache.__name__}" for cache in found if cache.cache_info().maxsize is None}
    assert not unbounded


def test_two_classes_in_turn_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST", 1)
    blocks = [made_anew(0), made_anew(1)]
    x = torch.randn(2, 4, requires_grad=True)
    for step in range(3):
        for number, block in enumerate(blocks):
            found = reactivate.checkpoint(block)(x)
            (gradient,) = torch.autograd.grad(found.sum(), x)
            plain = block.inner(x).sin() * (number + step + 1)
            assert torch.equal(found, plain) and torch.equal(gradient, torch.autograd.grad(plain.sum(), x)[0])
            assert block.calls == step + 1
