"""docs/limits.md: a test that shows each entry, and where torch's checkpoint runs the same program, that it is not right."""

from __future__ import annotations

import copy
import csv
import functools
import gc
import io
import math
import os
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import code_read_from_afar
import numpy
import pytest
import torch
import torch.nn.functional as F
from code_read_by_programs import reads_from_afar
from count_ops import CountOps
from journal import Journal
from memory import allocated_by
from oracle import Ran, assert_bitwise
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.dropin.megatron import CheckpointWithoutOutput
from reactivate.errors import MutationError, RecomputeMismatchError, UnsupportedError, UsageError
from reactivate.guards import DEFAULT, ContextPair

ENTRIES = re.findall(r"^### (.+)$", (Path(__file__).parents[2] / "docs/limits.md").read_text(), re.MULTILINE)
shown: dict[str, Any] = {"XLA": "tests_xla"}

Fn = Callable[..., Any]


def shows(entry: str) -> Callable[[Fn], Fn]:
    """The test shows the entry of docs/limits.md with this heading."""

    def note(test: Fn) -> Fn:
        shown[entry] = test
        return test

    return note


def test_each_entry_is_shown() -> None:
    assert sorted(shown) == sorted(ENTRIES)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 4)), requires_grad=True)


def plain(fn: Fn) -> Fn:
    return fn


def torchs(fn: Fn) -> Fn:
    return lambda *args: torchs_checkpoint(fn, *args, use_reentrant=False)


def ours(**options: Any) -> Callable[[Fn], Fn]:
    return lambda fn: reactivate.checkpoint(fn, **options)


def gradients(wrap: Callable[[Fn], Fn], make: Callable[[], tuple[Any, ...]], steps: int = 3) -> list[Any]:
    """Return the gradient in each of some calls of what `make` returns with its arguments, or the kind of its error."""
    torch.manual_seed(0)
    fn, *args = make()
    call = wrap(fn)
    found: list[Any] = []
    for _ in range(steps):
        x = leaf()
        try:
            call(x, *args).sum().backward()
            found.append(x.grad)
        except (RuntimeError, NotImplementedError) as error:
            found.append(type(error))
    return found


def is_right(wrap: Callable[[Fn], Fn], make: Callable[[], tuple[Any, ...]]) -> list[Any]:
    """Return for each call whether its gradient is that of the plain function, or the kind of its error."""
    pairs = zip(gradients(plain, make), gradients(wrap, make))
    return [torch.equal(expected, got) if isinstance(got, Tensor) else got for expected, got in pairs]


NEVER = [False] * 3


# -- state ------------------------------------------------------------------------------------------------------------


def written_unseen() -> tuple[Any, ...]:
    table = torch.ones(100, 4)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * table[:4]
        getattr(table, "data").add_(1)  # noqa: B009 - so that the code does not name it
        return y.exp()

    return (fn,)


def written_through_data() -> tuple[Any, ...]:
    table = torch.ones(5000, 4)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * table[:4]
        table.data.add_(1)
        return y.exp()

    return (fn,)


def long_statistics() -> tuple[Any, ...]:
    mean, variance = torch.zeros(1 << 17), torch.ones(1 << 17)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() + mean[:4]
        F.batch_norm(torch.ones(2, 1 << 17), mean, variance, training=True)
        return y.exp()

    return (fn,)


@shows("Writes that no version counter sees")
def test_writes_that_no_version_counter_sees() -> None:
    assert is_right(torchs, written_unseen) == NEVER
    assert is_right(ours(check="metadata"), written_unseen) == NEVER
    assert is_right(ours(), written_unseen) == [RecomputeMismatchError, RecomputeMismatchError, False]
    assert is_right(ours(check="every"), written_unseen) == [RecomputeMismatchError] * 3
    assert is_right(ours(check="metadata"), written_through_data) == NEVER
    assert is_right(ours(), written_through_data) == [MutationError, True, True]
    assert is_right(torchs, long_statistics) == NEVER
    assert is_right(ours(), long_statistics)[0] is RecomputeMismatchError
    assert other_memory_between(torchs) == NEVER
    assert other_memory_between(ours()) == [RecomputeMismatchError, RecomputeMismatchError, False]


def other_memory_between(wrap: Callable[[Fn], Fn]) -> list[Any]:
    """Return for three calls whether the gradient is plain's, or what it raised."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    fn, weight = wrap(module), module[0].weight

    def gradient(call: Fn, x: Tensor) -> Tensor:
        out = call(x).sum()
        before, weight.data = weight.data, weight.data * 3
        try:
            return torch.autograd.grad(out, x)[0]
        finally:
            weight.data = before

    found: list[Any] = []
    for _ in range(3):
        x = leaf()
        try:
            found.append(torch.equal(gradient(fn, x), gradient(module, x)))
        except RecomputeMismatchError as error:
            found.append(type(error))
    return found


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


class Inside:
    """A count where a cached function returns it."""

    def __init__(self) -> None:
        self.cached = functools.cache(lambda: Link(0))


class Bytes(bytearray):
    """A subclass."""


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
    "cached": lambda: counts(Inside(), lambda inside: inside.cached()),
    "mapping proxy": lambda: counts(MappingProxyType({"link": Link(0)}), lambda links: links["link"]),
    "subclass of bytearray": lambda: counts_in_a_list(Bytes([1])),
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


def adds_to(table: Tensor) -> tuple[Any, ...]:
    def fn(x: Tensor, table: Tensor) -> Tensor:
        y = x.sin() + table[:4]
        table.add_(1)
        return y.exp()

    return fn, table


class Coded(nn.Module):
    functions: dict[str, Fn] = {"size": lambda size=1.0: size}

    def __init__(self) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        scale = self.read() * self.functions["size"]() * self.made.size
        late = getattr(code_read_from_afar, "late", 1.0)
        return (x * scale * reads_from_afar() * math.e * late).sin()

    def read(self, scale: float = 1.0) -> float:
        return scale


made = ModuleType("made")
made.size = 1.0  # type: ignore[attr-defined]


def another_default_of_a_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coded.read, "__defaults__", (5.0,))


def another_default_in_a_container(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coded.functions["size"], "__defaults__", (5.0,))


def another_value_in_a_python_module_that_is_an_attribute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coded().made, "size", 5.0)


def another_value_that_is_read_by_getattr(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_read_from_afar, "late", 5.0, raising=False)


def another_value_two_python_modules_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_read_from_afar, "scale", 5.0)


def another_constant_of_a_library(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(math, "e", 5.0)


def another_library(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "math", SimpleNamespace(e=5.0))


CHANGES_OF_CODE = [
    another_default_of_a_method,
    another_default_in_a_container,
    another_value_in_a_python_module_that_is_an_attribute,
    another_value_that_is_read_by_getattr,
    another_value_two_python_modules_away,
    another_constant_of_a_library,
    another_library,
]


@shows("Code that changes between forward and backward")
@pytest.mark.parametrize("change", CHANGES_OF_CODE)
@pytest.mark.parametrize("wrap", [torchs, reactivate.checkpoint(check="metadata")], ids=["torch", "ours"])
def test_code_that_changes_between_forward_and_backward(
    change: Callable[[pytest.MonkeyPatch], None], wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = (gradient_of_coded(way, lambda: None) for way in (plain, wrap))
    assert torch.equal(expected, found)
    assert not torch.equal(expected, gradient_of_coded(wrap, lambda: change(monkeypatch)))


def gradient_of_coded(wrap: Callable[[Fn], Fn], change: Callable[[], None]) -> Tensor:
    torch.manual_seed(0)
    x = leaf()
    out = wrap(Coded())(x)
    change()
    return torch.autograd.grad(out.sum(), x)[0]


@shows("Two constants in one memory that become part of the graph")
def test_two_constants_in_one_memory_are_read_as_they_are_now() -> None:
    weight, constant, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4), leaf(4, 4)
    view = constant.view(4, 4)

    @reactivate.checkpoint
    def reads_both(x: Tensor) -> Tensor:
        view.sin()
        constant.copy_(weight)
        return x.sin()

    @reactivate.checkpoint
    def reads_one(x: Tensor) -> Tensor:
        other.view(4, 4).sin()
        other.copy_(weight)
        return x.sin()

    with pytest.raises(RecomputeMismatchError, match="saves more than"):
        reads_both(x).sum().backward()
    other = torch.randn(4, 4)
    reads_one(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@shows("Tensors without a copy")
def test_tensors_without_a_copy() -> None:
    assert True not in is_right(torchs, lambda: adds_to(torch.ones(2_000, 4)))
    assert is_right(ours(), lambda: adds_to(torch.ones(2_000, 4))) == [MutationError, True, True]
    assert is_right(ours(), lambda: adds_to(torch.ones(1_000, 4))) == [True] * 3

    def writes_to_its_input(wrap: Callable[[Fn], Fn]) -> Callable[[Fn], Fn]:
        return lambda fn: lambda x: wrap(fn)(x * 1)

    def make() -> tuple[Any, ...]:
        return (lambda h: h.mul_(2).sin().exp(),)

    expected = gradients(writes_to_its_input(plain), make)
    for wrap in (torchs, ours()):
        assert gradients(writes_to_its_input(wrap), make) == [MutationError if wrap is not torchs else RuntimeError] * 3
    assert all(isinstance(gradient, Tensor) for gradient in expected)


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


@shows("Side effects happen again")
def test_side_effects_happen_again(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Tensor) -> Tensor:
        print("here")
        return x.sin().exp()

    for wrap in (torchs, ours()):
        wrap(fn)(leaf()).sum().backward()
        assert capsys.readouterr().out == "here\n" * 2


# -- early stop -------------------------------------------------------------------------------------------------------


@shows("A function that swallows exceptions")
def test_a_function_that_swallows_exceptions() -> None:
    seen = Journal()

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        try:
            y = y.cos()
        except:  # noqa: E722
            seen.append("swallowed")
        return y * 2

    assert is_right(ours(), lambda: (fn,)) == [True] * 3
    assert len(seen) == 3
    seen.clear()
    assert is_right(ours(early_stop=False), lambda: (fn,)) == [True] * 3
    assert not len(seen)


@shows("Recomputations that save more tensors")
def test_more_tensors_than_before() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        return y.cos() if reactivate.is_recomputing() else y

    x = leaf()
    reactivate.checkpoint(fn, check="metadata")(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    with pytest.raises(RecomputeMismatchError, match="more"):
        reactivate.checkpoint(fn, check="metadata", early_stop=False)(leaf()).sum().backward()


# -- threads ----------------------------------------------------------------------------------------------------------


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


# -- where there are no regions ---------------------------------------------------------------------------------------


@shows("`torch.func`")
def test_torch_func() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin().exp()

    for wrap, error in ((torchs, RuntimeError), (ours(), UnsupportedError)):
        with pytest.raises(error):
            torch.func.grad(lambda x: wrap(fn)(x).sum())(leaf())
    with pytest.warns(UserWarning, match="keeps its activations"):
        out = torch.func.vmap(ours()(fn))(leaf())
    assert out.shape == (4, 4)


@pytest.mark.gpu
@shows("`torch.func.grad` inside of a region")
def test_a_derivative_inside_of_a_region() -> None:
    def of_torch_func(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: y.sin().sum())(x) * x

    def of_autograd(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0] * x

    plainly = gradients(plain, lambda: (of_torch_func,))
    assert gradients(torchs, lambda: (of_torch_func,)) == [RuntimeError] * 3
    for other in (ours(), ours(check="every"), ours(policy=policies.save_ops("sin"))):
        with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad\(.*outside of the region"):
            other(of_torch_func)(leaf())
        assert all(map(torch.equal, plainly, gradients(other, lambda: (of_autograd,))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: not run")
@shows("CUDA graphs")
def test_cuda_graphs() -> None:
    x = torch.randn(4, 4, device="cuda", requires_grad=True)
    reactivate.checkpoint(torch.sin)(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="captur"), torch.cuda.graph(graph):
        reactivate.checkpoint(torch.sin)(x)


@shows("Jagged nested tensors")
def test_jagged_nested_tensors() -> None:
    def fn(x: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = torch.nested.nested_tensor_from_jagged(x, offsets).sin().exp().values()
        return found

    def inside(x: Tensor) -> Tensor:
        return fn(x, torch.tensor([0, 2, 4]))

    for wrap, error in ((torchs, RuntimeError), (ours(), RecomputeMismatchError)):
        with pytest.raises(error):
            wrap(inside)(leaf()).sum().backward()
    assert is_right(ours(), lambda: (fn, torch.tensor([0, 2, 4]))) == [True] * 3


def first_scripted(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x * 0.7 + bias) * x


def second_scripted(x: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(x * 0.7 + bias) * x


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
@shows("Dispatch modes that count the ops inside of a region")
def test_a_detach_of_autograds_own_is_not_made_in_a_region() -> None:
    def make() -> tuple[Any, ...]:
        mode = CountOps()

        def fn(x: Tensor) -> Tensor:
            with mode:
                y = x.sin().exp()  # which saves its result
            return (y * torch.full((4,), float(mode.ops["detach"]))).sin()

        return (fn,)

    for wrap in (torchs, ours(), ours(check="every"), ours(policy=policies.save_ops("sin"))):
        assert not any(found is True for found in is_right(wrap, make))
    assert is_right(ours(), make) == NEVER


@shows("TorchScript")
def test_torchscript() -> None:
    found = torch.jit.script(first_scripted)
    with pytest.warns(UserWarning, match="keeps its activations"):
        reactivate.checkpoint(lambda x, bias: found(x.sin(), bias))(leaf(), leaf())
    hidden: SimpleQueue[Any] = SimpleQueue()
    hidden.put(torch.jit.script(second_scripted))

    def fn(x: Tensor, bias: Tensor) -> Tensor:
        last = hidden.get()
        hidden.put(last)
        out: Tensor = last(x.sin(), bias)
        return out

    with pytest.raises(UnsupportedError, match="Call the scripted function"):
        reactivate.checkpoint(fn)(leaf(), leaf())


@shows("`torch.fx.symbolic_trace`")
def test_symbolic_trace() -> None:
    """Without a word: that a policy has matched nothing is said of the first call that computes something."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.linear(x))

    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4)
    parameters = list(model.parameters())
    for policy, is_right in ((policies.full(save=["linear"]), True), (policies.full(save=["conv2d"]), False)):
        regions = Ran()
        reactivate.apply(model, policy, replace=True)
        with warnings.catch_warnings(), observed_by(regions):
            warnings.simplefilter("error")
            traced = torch.fx.symbolic_trace(model)
            expected = [traced(x), *torch.autograd.grad(traced(x).sum(), parameters)]
        assert {node.op for node in traced.graph.nodes} == {"placeholder", "call_module", "call_function", "output"}
        assert not regions.recomputations
        with (
            nullcontext() if is_right else pytest.warns(UserWarning, match="matches nothing so far"),
            observed_by(regions),
        ):
            result = model(x)
            found = [result, *torch.autograd.grad(result.sum(), parameters)]
        assert regions.recomputations == 2
        for one, other in zip(expected, found, strict=True):
            assert_bitwise(one, other, "result or gradient")


# -- policies, hooks, parameters --------------------------------------------------------------------------------------


@shows("Saved calls")
def test_saved_calls() -> None:
    entered = Journal()

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *details: object) -> None:
            pass

    inner = ours(guards=DEFAULT.adding(ContextPair(lambda: (Context("forward"), Context("recomputation")))))(torch.sin)

    def fn(x: Tensor) -> Tensor:
        out: Tensor = reactivate.site(inner, name="saved")(x.cos()).exp()
        return out

    reactivate.checkpoint(fn, policy=policies.save_names("saved"))(leaf()).sum().backward()
    assert entered == ["forward", "recomputation"], "for the backward of the saved call, and for no recomputation of fn"


@shows("Shallow copies of a model with a policy")
def test_a_shallow_copy_runs_the_module_that_it_is_a_copy_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    reactivate.apply(model, policies.recompute_modules("0"))
    replica: Any = model[0]._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(4, 4), torch.zeros(4)
    assert replica(leaf()).any(), "it ran with the parameters of the original"

    shallow, deep = copy.copy(model[0]), copy.deepcopy(model[0])
    del model
    gc.collect()
    with pytest.raises(UsageError, match="copy.deepcopy"):
        shallow(leaf())
    assert deep(leaf()).any()


@shows("Pack hooks that return their tensor")
def test_hooks_that_keep_a_tensor_as_it_is() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        with save_on_cpu():
            y = y.tanh().exp()
        return y.cos().sin()

    def leaked(wrap: Callable[[Fn], Fn]) -> int:
        def step() -> None:
            x = leaf(64, 64)
            torch.autograd.grad(wrap(fn)(x).sum(), x)

        step()
        gc.collect()
        gc.disable()
        try:
            return allocated_by(step).left_bytes
        finally:
            gc.enable()

    assert leaked(plain) == 0
    assert 0 < leaked(ours()) <= leaked(torchs)


class Steps(nn.Module):
    def __init__(self, read: Fn) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(x, self.weight)


def stepped_before_backward(wrap: Callable[[Fn], Fn], read: Fn) -> Any:
    torch.manual_seed(0)
    model, x = Steps(read), leaf()
    out = wrap(model)(x)
    with torch.no_grad():
        model.weight.mul_(2)
    return torch.autograd.grad(out.sum(), x)[0]


@shows("Parameters that change between forward and backward")
def test_parameters_that_change_between_forward_and_backward() -> None:
    def saves(x: Tensor, weight: Tensor) -> Tensor:
        return (x + weight).exp()

    def saves_not(x: Tensor, weight: Tensor) -> Tensor:
        return x.sin().exp() + (x + weight)

    def decides(x: Tensor, weight: Tensor) -> Tensor:
        return x.sin().exp() if weight.sum().item() < 20 else x.cos().tanh()

    expected = stepped_before_backward(plain, saves)
    assert not torch.equal(stepped_before_backward(torchs, saves), expected)
    for read in (saves, decides):
        with pytest.raises(MutationError, match="weight"):
            stepped_before_backward(ours(), read)
    assert not torch.equal(stepped_before_backward(torchs, decides), stepped_before_backward(plain, decides))
    assert torch.equal(stepped_before_backward(ours(), saves_not), stepped_before_backward(plain, saves_not))


@shows("Hooks that turn the version check off")
def test_hooks_that_turn_the_version_check_off() -> None:
    def gradient(wrap: Callable[[Fn], Fn]) -> Tensor:
        torch.manual_seed(0)
        x = leaf()
        with save_on_cpu():
            y = wrap(lambda x: x.sin().exp())(x)
        with torch.no_grad():
            y.mul_(2)
        return torch.autograd.grad(y, x, torch.ones(4, 4))[0]

    expected, found = gradient(plain), gradient(ours())
    assert torch.equal(expected, 2 * found), "the plain model reads the result that was written to"
    assert torch.equal(found, gradient(torchs))


class DifferentiatesInside(torch.autograd.Function):
    """Differentiates in its backward what its forward recorded."""

    ended: Journal

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.inference_mode(False):
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.sin()
        DifferentiatesInside.ended.append("forward")
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.autograd.grad(ctx.y, ctx.x, gradient)


@shows("`torch.inference_mode(False)` inside the forward of a custom Function")
def test_inference_mode_inside_the_forward_of_a_custom_function() -> None:
    for early_stop, count in ((True, 1), (False, 2)):
        DifferentiatesInside.ended = Journal()
        x = leaf()
        wrap = reactivate.checkpoint(check="metadata", early_stop=early_stop)
        wrap(lambda x: DifferentiatesInside.apply(x))(x).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
        assert len(DifferentiatesInside.ended) == count


@shows("torch 2.9 and `torch.compile` inside a region")
def test_torch_2_9_and_compile_inside_a_region() -> None:
    """Between forward and backward another version is compiled, which fits as well."""
    runs: list[int] = []
    hidden = MappingProxyType({"runs": runs})

    def count(module: Any, inputs: Any) -> Fn:
        number = len(runs)
        runs.append(0)

        def run(*args: Any) -> Any:
            hidden["runs"][number] += 1
            return module(*args)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.sin().cos(), backend=count)
    out = reactivate.checkpoint(lambda x: compiled(x.tanh()).exp())(leaf())
    for rows in (5, 6):
        compiled(leaf(rows, 4).tanh())
    assert runs == [1, 2]
    out.sum().backward()
    assert runs == ([1, 3] if torch.__version__.startswith("2.9.") else [2, 2])
    torch._dynamo.reset()


@shows("A buffer in the memory of a parameter")
def test_a_buffer_in_the_memory_of_a_parameter() -> None:
    """The plain model multiplies by what was written, the region by what its forward read."""

    class Model(nn.Module):
        buffer: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("buffer", self.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            out = x * self.weight
            self.buffer.mul_(2)
            return out

    for wrap, factor in ((plain, 2.0), (reactivate.checkpoint, 1.0)):
        x = leaf()
        wrap(Model())(x).sum().backward()
        assert torch.equal(x.grad, torch.full((4, 4), factor))


@shows("Cached parametrizations")
def test_cached_parametrizations() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    for wrap in (reactivate.checkpoint, torchs):
        with nn.utils.parametrize.cached():
            outputs = [wrap(module)(leaf()) for _ in range(2)]
        with pytest.raises(RuntimeError):
            sum(outputs).sum().backward()

    def inside(x: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return module(x) + module(x).sin()

    found = []
    for wrap in (plain, reactivate.checkpoint):
        x = torch.ones(4, 4, requires_grad=True)
        wrap(inside)(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@shows("Swapped tensors")
def test_swapped_tensors() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("mask", torch.ones(5_000))
    reactivate.checkpoint(module)(leaf()).sum().backward()
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(module.mask, torch.zeros(5_000))
    module.mask.data = torch.zeros(5_000)


@shows("Checkpointed modules")
def test_a_module_under_two_names_and_a_class_with_slots() -> None:
    class Slotted(nn.Linear):
        __slots__ = ("extra",)

    linear = nn.Linear(4, 4)
    both = nn.ModuleDict({"block": linear, "fast": reactivate.checkpoint(linear)})
    assert list(both.state_dict()) == ["block.weight", "block.bias", "fast.weight", "fast.bias"]
    assert len(list(both.parameters())) == 2
    slotted = reactivate.checkpoint(Slotted(4, 4))
    assert not isinstance(slotted, nn.Module)
    slotted(leaf()).sum().backward()


@shows("Tensors made in inference mode")
def test_tensors_made_in_inference_mode_are_copied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.teacher = nn.Linear(300, 300).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.teacher.weight[0, 0].item()
            return x.sin() * scale

    fn, size = reactivate.checkpoint(Model()), 4 * 300 * 300
    fn(leaf()).sum().backward()
    allocated = allocated_by(lambda: [fn(leaf()) for _ in range(3)])
    assert allocated.left_bytes >= 3 * size


class Swaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.5
        return self.linear(x).sin()  # type: ignore[no-any-return]


@shows("Parameters whose memory the forward replaces")
def test_parameters_that_the_forward_gives_other_memory() -> None:
    def in_closure() -> tuple[Fn]:
        weight = nn.Parameter(torch.rand(4, 4))

        def fn(x: Tensor) -> Tensor:
            weight.data = weight.data * 0.5
            return F.linear(x, weight).sin()

        return (fn,)

    expected = gradients(plain, lambda: (Swaps(),))
    for determinism in ("first", "metadata", "none", "every"):
        first, *others = gradients(ours(check=determinism), lambda: (Swaps(),))
        assert first is MutationError and all(map(torch.equal, others, expected[1:]))
    assert gradients(torchs, lambda: (Swaps(),))[0] is not MutationError
    assert gradients(ours(), in_closure)[0] is RecomputeMismatchError
    wrong = gradients(ours(check="metadata"), in_closure)
    assert not torch.equal(wrong[0], gradients(plain, in_closure)[0])
    assert torch.equal(wrong[0], gradients(torchs, in_closure)[0])


class CountsSines(torch.overrides.TorchFunctionMode):
    """Multiplies sines by how many there were."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.sin:
            self.count += 1
            return result * self.count
        return result


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


@shows("State on tensor subclasses and function modes")
def test_state_on_tensor_subclasses_and_function_modes() -> None:
    def under_mode(wrap: Callable[[Fn], Fn]) -> tuple[Tensor, int]:
        x, mode = torch.ones(4, requires_grad=True), CountsSines()
        with mode:
            out = wrap(lambda x: x.sin().tanh())(x)
        out.sum().backward()
        return x.grad, mode.count  # type: ignore[return-value]

    def of_class(wrap: Callable[[Fn], Fn]) -> list[Tensor]:
        CountsCalls.count, found = 0, []
        for _ in range(2):
            x = torch.ones(4, requires_grad=True)
            wrap(lambda x: x.sin().tanh())(x.as_subclass(CountsCalls)).sum().backward()
            found.append(x.grad.as_subclass(Tensor))  # type: ignore[union-attr]
        return found

    with pytest.raises(RecomputeMismatchError):
        under_mode(ours())
    assert under_mode(ours(check="metadata"))[1] == 2 and under_mode(plain)[1] == 1
    right = of_class(plain)
    assert not torch.equal(of_class(torchs)[1], right[1])
    with pytest.raises(RecomputeMismatchError):
        of_class(ours())


@shows("Gradients that the forward reads")
def test_gradients_that_the_forward_reads() -> None:
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        return (linear(x) * linear.weight.grad.sum()).sin()  # type: ignore[union-attr]

    for wrap in (ours(), torchs, plain):
        linear.weight.grad = torch.ones(4, 4)
        outputs = [wrap(fn)(leaf()).sum() for _ in range(2)]
        outputs[0].backward()
        if wrap is torchs or wrap is plain:
            outputs[1].backward()  # torch's checkpoint is silently wrong
        else:
            with pytest.raises(RecomputeMismatchError):
                outputs[1].backward()


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


@shows('Caches and `check="every"`')
@pytest.mark.parametrize("determinism", ["first", "every"])
def test_caches_and_values(determinism: Any) -> None:
    table = functools.cache(lambda length: torch.arange(length).float().cos())
    out = reactivate.checkpoint(lambda x: (x * table(len(x))).sin(), check=determinism)(leaf(4))
    with pytest.raises(RecomputeMismatchError, match="Op 1") if determinism == "every" else nullcontext():
        out.sum().backward()
    reactivate.checkpoint(lambda x: (x * table(len(x))).sin(), check=determinism)(leaf(4)).sum().backward()


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@shows("Effects of saved modules")
@pytest.mark.parametrize("is_saved", [False, True])
def test_effects_of_saved_modules(is_saved: bool) -> None:
    class Compares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Sine()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.child(x)
            return (hidden.exp() if type(hidden.grad_fn).__name__ == "SinBackward0" else hidden).cos()

    policy = policies.save_modules("child") if is_saved else None
    out = reactivate.checkpoint(Compares(), policy=policy)(leaf(4))
    with pytest.raises(RecomputeMismatchError) if is_saved else nullcontext():
        out.sum().backward()


@shows("Hooks that change values")
@pytest.mark.parametrize("changes", [False, True])
def test_hooks_that_change_values(changes: bool) -> None:
    dtype = torch.bfloat16 if changes else torch.float64
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.to(dtype), lambda x: x.float()):
        out = reactivate.checkpoint(lambda x: (x * 3).exp().sin())(leaf(4).tanh())
    with pytest.raises(RecomputeMismatchError, match="return the bits") if changes else nullcontext():
        out.sum().backward()


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


@shows("Discarded outputs")
@pytest.mark.parametrize("is_region", [False, True])
def test_discarded_outputs(is_region: bool) -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(norm, leaf(4, 8))
    out = (reactivate.checkpoint(linear) if is_region else linear)(hidden)
    memory = StorageWeakRef(hidden.untyped_storage())
    checkpoint.discard_output_and_register_recompute(out)
    del hidden
    assert memory.expired() is not is_region


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
