"""Limits of state in Python objects: how far it is looked for, and what no look finds or puts back."""

from __future__ import annotations

import csv
import functools
import io
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from limit_cases import NEVER, Fn, is_right, leaf, ours, plain, shows, torchs
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import reactivate
from reactivate.errors import RecomputeMismatchError
from reactivate.guards import DEFAULT, ContextPair


class Link:
    """A chain of objects; the last one counts."""

    def __init__(self, length: int) -> None:
        self.count = 1.0
        self.next = Link(length - 1) if length else None

    @property
    def last(self) -> Link:
        return self if self.next is None else self.next.last


def counts(holder: Any, find: Fn) -> tuple[Any, ...]:
    def fn(x: Tensor, holder: Any) -> Tensor:
        found = find(holder)
        y = (x.sin() * found.count).exp()
        found.count += 1
        return y

    return fn, holder


def counts_in_a_list(items: Any) -> tuple[Any, ...]:
    def fn(x: Tensor, items: Any) -> Tensor:
        y = (x.sin() * float(items[0])).exp()
        items[0] += 1
        return y

    return fn, items


def reads_lines(lines: Any) -> tuple[Any, ...]:
    return lambda x, lines: (x.sin() * float(next(lines)[0])).exp(), lines


def counts_in_a_cached_tensor() -> tuple[Any, ...]:
    def fn(x: Tensor, cached: Any) -> Tensor:
        y = (x.sin() * float(cached())).exp()
        cached().add_(1)
        return y

    cached = functools.cache(lambda: torch.ones(()))
    cached()
    return fn, cached


class Base:
    """A class without state."""


class State(Base):
    """A count in a class."""

    count = 1


def counts_in_a_class(holder: Any, find: Fn) -> tuple[Any, ...]:
    State.count = 1
    return counts(holder, find)


FAR: dict[str, Callable[[], tuple[Any, ...]]] = {
    "deep": lambda: counts(Link(6), lambda link: link.last),
    "many": lambda: counts([Link(0) for _ in range(400)], lambda links: links[-1]),
    "item of a large list": lambda: counts_in_a_list([1.0] * 5_000),
    "large array": lambda: counts_in_a_list(numpy.ones(5_000)),
    "large bytearray": lambda: counts_in_a_list(bytearray([1]) * 20_000),
    "large stream": lambda: reads_lines(io.StringIO("".join(f"{number}\n" for number in range(1, 5_000)))),
    "reader of a file": lambda: reads_lines(csv.reader(str(number) for number in range(1, 100))),
}


HIDDEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "class in a union": lambda: counts_in_a_class(State | None, lambda union: union.__args__[0]),
    "subclass": lambda: counts_in_a_class(Base, lambda base: base.__subclasses__()[0]),
    "cached tensor": counts_in_a_cached_tensor,
    "mapping proxy": lambda: counts(MappingProxyType({"link": Link(0)}), lambda links: links["link"]),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_objects_are_not_looked_into(name: str) -> None:
    make = HIDDEN[name]
    assert is_right(torchs, make) == is_right(ours(check="metadata"), make) == NEVER
    assert is_right(ours(check="every"), make) == [RecomputeMismatchError] * 3


@shows("The depth of the search for state")
def test_how_far_objects_are_looked_into() -> None:
    for make in FAR.values():
        assert is_right(torchs, make) == NEVER
        assert is_right(ours(check="metadata"), make) == NEVER
        assert RecomputeMismatchError in is_right(ours(), make)
    assert is_right(ours(), lambda: counts(Link(2), lambda link: link.last)) == [True] * 3


def test_what_is_taken_from_a_large_list_is_taken_once() -> None:
    def fn(x: Tensor, items: list[float]) -> Tensor:
        items.pop()
        return x.sin().exp()

    items = [1.0] * 5_000
    assert is_right(ours(), lambda: (fn, items)) == [True] * 3
    assert len(items) == 5_000 - 2 * 3, "three calls of the plain function, and three of ours"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0


class LargeTree(nn.Module):
    """Takes a module from `_modules`, and changes it without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(100))

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self._modules["blocks"]._modules["3"]  # type: ignore[union-attr]
        y = (x.sin() * found.scale).exp()
        found.scale += 1
        return y


@shows("Trees of more than 64 modules")
def test_trees_of_more_than_64_modules() -> None:
    assert is_right(torchs, lambda: (LargeTree(),)) == NEVER
    assert is_right(ours(check="metadata"), lambda: (LargeTree(),)) == [
        True,
        False,
        False,
    ]  # at first all are noted
    assert is_right(ours(), lambda: (LargeTree(),))[1] is RecomputeMismatchError


@shows("Side effects happen again")
def test_side_effects_happen_again(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Tensor) -> Tensor:
        print("here")
        return x.sin().exp()

    for wrap in (torchs, ours()):
        wrap(fn)(leaf()).sum().backward()
        assert capsys.readouterr().out == "here\n" * 2


@shows("Threads that share state")
def test_threads_that_share_state() -> None:
    items: list[str] = []
    hidden = MappingProxyType({"recomputing": threading.Event(), "appended": threading.Event()})

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        if not items:
            items.append("mine")
        if reactivate.is_recomputing():
            hidden["recomputing"].set()
            hidden["appended"].wait(10)
        return y.exp()

    def append() -> None:
        hidden["recomputing"].wait(10)
        items.append("from another thread")
        hidden["appended"].set()

    thread = threading.Thread(target=append)
    thread.start()
    reactivate.checkpoint(fn)(leaf()).sum().backward()
    thread.join()
    assert items == ["mine"], "the recomputation's own items are taken off again, and these with them"


class CountsCalls(Tensor):
    """Multiplies sines by how many functions were called."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is Tensor.sin:
            cls.count += 1
            return result * cls.count
        return result


@shows("State on tensor subclasses")
def test_state_on_tensor_subclasses() -> None:
    def of_class(wrap: Callable[[Fn], Fn]) -> list[Tensor]:
        CountsCalls.count, found = 0, []
        for _ in range(2):
            x = torch.ones(4, requires_grad=True)
            wrap(lambda x: x.sin().tanh())(x.as_subclass(CountsCalls)).sum().backward()
            found.append(x.grad.as_subclass(Tensor))  # type: ignore[union-attr]
        return found

    right = of_class(plain)
    assert not torch.equal(of_class(torchs)[1], right[1])
    with pytest.raises(RecomputeMismatchError):
        of_class(ours())


@shows("State that Python code cannot read")
def test_state_that_python_code_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REACTIVATE_TEST", "1")

    def longer() -> int:
        os.environ["REACTIVATE_TEST"] += "1"
        return len(os.environ["REACTIVATE_TEST"])

    region = reactivate.checkpoint(lambda x: (x * longer()).sin())
    with pytest.raises(RecomputeMismatchError, match="that the library cannot see"):
        region(torch.ones(2, requires_grad=True)).sum().backward()
    length = len(os.environ["REACTIVATE_TEST"])
    reactivate.checkpoint(lambda x: x.sin() + longer())(torch.ones(2, requires_grad=True)).sum().backward()
    assert len(os.environ["REACTIVATE_TEST"]) == length + 1


@shows("Caches with a `maxsize`")
@pytest.mark.parametrize("determinism", ["first", "every"])
def test_caches_and_values(determinism: Any) -> None:
    table = functools.lru_cache(maxsize=8)(lambda length: torch.arange(length).float().cos())
    out = reactivate.checkpoint(lambda x: (x * table(len(x))).sin(), check=determinism)(leaf(4))
    with pytest.raises(RecomputeMismatchError, match="Op 1") if determinism == "every" else nullcontext():
        out.sum().backward()
    reactivate.checkpoint(lambda x: (x * table(len(x))).sin(), check=determinism)(leaf(4)).sum().backward()


@shows("Queues of states for recomputations")
def test_queues_of_states_for_recomputations() -> None:
    queue: deque[Tensor] = deque()

    class Layer(nn.Module):
        phase = "none"

        def forward(self, x: Tensor) -> Tensor:
            if type(self).phase == "forward":
                queue.append(x.detach().abs().amax())
            largest = queue.popleft() if type(self).phase == "recomputation" else x.detach().abs().amax()
            return (x / largest).sin().exp()

    class Phase:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            Layer.phase = self.name

        def __exit__(self, *error: object) -> None:
            Layer.phase = "none"

    def phases() -> Any:
        return Phase("forward"), Phase("recomputation")

    layer, x = Layer(), leaf()
    for out in [torchs_checkpoint(layer, x * scale, use_reentrant=False, context_fn=phases) for scale in (1, 2)]:
        out.sum().backward()
    assert not queue
    expected, x.grad = x.grad, None
    guards = DEFAULT.adding(ContextPair(phases))
    outs = [reactivate.checkpoint(layer, guards=guards)(x * scale) for scale in (1, 2)]
    with pytest.raises(IndexError, match="pop from an empty deque"):
        outs[0].sum().backward()
    with pytest.raises(RecomputeMismatchError, match="other values"):
        outs[1].sum().backward()
    for out in [reactivate.checkpoint(layer)(x * scale) for scale in (1, 2)]:
        out.sum().backward()
    assert x.grad is not None and expected is not None
    assert torch.equal(x.grad, expected)


@shows("A double backward under autocast")
def test_a_double_backward_under_autocast_is_as_with_hooks_that_do_nothing() -> None:
    """A leaf that two ops read is cast once by autocast, but for each of them where there are hooks."""

    def hooked(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return fn(x)

        return call

    def once(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(3)
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        x = torch.randn(3, 4, requires_grad=True)
        loss = wrap(lambda x: one(x).sin() + other(x))(x).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            leaves = [x, *one.parameters(), *other.parameters()]
            gradients = torch.autograd.grad(loss, leaves, create_graph=True)
            sum(gradient.float().square().sum() for gradient in gradients).backward()
        return [*(gradient.detach() for gradient in gradients), x.grad]

    plain, ours, theirs = once(lambda fn: fn), once(reactivate.checkpoint), once(hooked)
    assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(plain[-1], ours[-1])
