"""The self-check (Rule 25): what no rule puts back is an error where a backward would read it, and as in torch's checkpoint
where it would not."""

from __future__ import annotations

import ctypes
import decimal
import os
import random
import re
import struct
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from mechanisms import MECHANISMS
from oracle import Watched, assert_alike
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.check import Check
from reactivate._passes.observing import observed_by
from reactivate._region import due
from reactivate.errors import RecomputeMismatchError

Use = Callable[[], float]
STEPS = 6


def steps(block: Callable[[Tensor], Tensor], policy: Any = None, *, is_plain: bool = False) -> list[Tensor]:
    """Outputs and gradients of some steps."""
    torch.manual_seed(0)
    ran = Watched()
    region = block if is_plain else reactivate.checkpoint(block, policy=policy)
    found: list[Tensor] = []
    with observed_by(ran):
        for _ in range(STEPS):
            x = torch.randn(4, 4, requires_grad=True)
            out = region(x)
            out.sum().backward()
            assert x.grad is not None
            found += [out.detach(), x.grad]
    assert is_plain or (ran.regions == STEPS and ran.recomputations >= STEPS - 1)
    return found


def assert_exact(make: Callable[[], Callable[[Tensor], Tensor]], policy: Any = None) -> None:
    plain = steps(make(), is_plain=True)
    assert_alike(plain, steps(make(), policy), "half of a step")


# -- state that the library puts back --------------------------------------------------------------------------------


class Counting(random.Random):
    count = 0

    def random(self) -> float:
        self.count += 1
        return super().random() * self.count


class Marked(np.ndarray):
    mark = 1.0


class Failed(Exception):
    mark = 1.0


class Holder:
    mark = 1.0


HOLDER = Holder()


def marking(value: Any) -> Use:
    value.mark = 1.0

    def use() -> float:
        value.mark *= 1.3
        return value.mark  # type: ignore[no-any-return]

    return use


def growing(items: Any) -> Use:
    def use() -> float:
        items[0].append(1.0)
        return float(len(items[0]))

    return use


def parameters_that_grow() -> Use:
    items = nn.ParameterDict({"first": torch.ones(1)})

    def use() -> float:
        items[str(len(items))] = torch.ones(1)
        return float(len(items))

    return use


PUT_BACK: dict[str, Callable[[], Use]] = {
    "a bound method of a generator": lambda: random.Random(3).random,
    "another one": lambda: partial(random.Random(3).getrandbits, 3),
    "NumPy's bits": lambda: (lambda bits: lambda: bits.random_raw() / 2**64)(np.random.PCG64(3)),
    "a subclass of a generator": lambda: Counting(3).random,
    "an array of a subclass": lambda: marking(np.ones(3).view(Marked)),
    "an exception": lambda: marking(Failed()),
    "a partial": lambda: marking(partial(int)),
    "a proxy": lambda: marking(weakref.proxy(HOLDER)),
    "an array of objects": lambda: growing(np.array([[1.0], None], dtype=object)),
    "a ParameterDict": parameters_that_grow,
}


@pytest.mark.parametrize("policy", [None, policies.save_ops("mul")], ids=["full", "saved"])
@pytest.mark.parametrize("state", PUT_BACK)
def test_state_that_is_put_back(state: str, policy: Any) -> None:
    def make() -> Callable[[Tensor], Tensor]:
        use = PUT_BACK[state]()
        return lambda x: (x * use()).sin()

    assert_exact(make, policy)


# -- state that nobody sees ------------------------------------------------------------------------------------------


def scanned() -> Use:
    scanner = re.compile(r"\d").scanner("123456789" * 5)
    return lambda: float(scanner.search().group())


def unpacked() -> Use:
    numbers = struct.iter_unpack("i", bytes(range(1, 241)))
    return lambda: next(numbers)[0] / 1e9


def spawned() -> Use:
    seeds = np.random.SeedSequence(3)
    return lambda: seeds.spawn(1)[0].generate_state(1)[0] / 2**32


def counted() -> Use:
    following = struct.iter_unpack("i", bytes(range(1, 241))).__next__
    return lambda: following()[0] / 1e9


def unseen_numbers(number: int) -> Callable[[], int]:
    """Return a function that returns this number and those that follow it, from a place that no walk sees."""
    queue: SimpleQueue[int] = SimpleQueue()
    queue.put(number)

    def use() -> int:
        value = queue.get()
        queue.put(value + 1)
        return value

    return use


def queued() -> Use:
    queue: SimpleQueue[float] = SimpleQueue()
    queue.put(1.0)

    def use() -> float:
        value = queue.get() * 1.3
        queue.put(value)
        return value

    return use


def in_the_environment() -> Use:
    os.environ["REACTIVATE_TEST"] = "1"

    def use() -> float:
        os.environ["REACTIVATE_TEST"] += "1"
        return float(len(os.environ["REACTIVATE_TEST"]))

    return use


def in_the_decimal_context() -> Use:
    decimal.getcontext().prec = 2

    def use() -> float:
        decimal.getcontext().prec += 1
        return float(decimal.getcontext().prec)

    return use


def in_ctypes() -> Use:
    numbers = (ctypes.c_double * 1)(1.0)

    def use() -> float:
        numbers[0] *= 1.3
        return numbers[0]

    return use


UNSEEN: dict[str, Callable[[], Use]] = {
    "a scanner": scanned,
    "an iterator in C": unpacked,
    "NumPy's seeds": spawned,
    "a bound method of an iterator": counted,
    "a queue": queued,
    "the environment": in_the_environment,
    "the decimal context": in_the_decimal_context,
    "ctypes": in_ctypes,
}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("REACTIVATE_TEST", "1")
    monkeypatch.setattr(due, "_calls", {})  # closures of one code count together: each test has first calls
    with decimal.localcontext():
        yield


@each("state", UNSEEN)
def test_unseen_state_behind_the_last_saved_tensor(state: str) -> None:
    def make() -> Callable[[Tensor], Tensor]:
        use = UNSEEN[state]()
        return lambda x: x.sin() + use()

    assert_exact(make)  # a recomputation does not get there, with a check or without


@pytest.mark.parametrize("policy", [None, policies.save_ops("mul")], ids=["full", "saved"])
@pytest.mark.parametrize("state", UNSEEN)
def test_unseen_state_that_a_backward_reads(state: str, policy: Any) -> None:
    use = UNSEEN[state]()
    with pytest.raises(RecomputeMismatchError, match="that the library cannot see"):
        steps(lambda x: (x * use()).sin(), policy)


# -- what a difference is --------------------------------------------------------------------------------------------


def flipped(items: Tensor, turn: int) -> Tensor:
    return items.flip(0) if turn % 2 else items


def rolled(items: Tensor, turn: int) -> Tensor:
    return items.roll(turn, 1)


@pytest.mark.parametrize(
    "change", [flipped, rolled, lambda items, turn: items * (1 + turn)], ids=["flip", "roll", "scale"]
)
@pytest.mark.parametrize("beside", [0.0, 1e9, -1e9, float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_numbers_in_another_order_are_no_rounding(change: Any, beside: float, dtype: torch.dtype) -> None:
    following = unseen_numbers(0)
    weights = torch.randn(5, 4, dtype=dtype)

    def block(x: Tensor) -> Tensor:
        items = change(weights, following())
        masked = torch.cat([items, torch.full((1, 4), beside, dtype=dtype)])
        return ((x.sum() * items).exp() * x.sum()).sum() + (x.sum() * masked).tanh()[:5].sum()

    x = torch.rand(4, dtype=dtype, requires_grad=True)
    out = reactivate.checkpoint(block)(x)
    with pytest.raises(RecomputeMismatchError, match="that the library cannot see"):
        out.sum().backward()


def sums_of(tensor: Tensor) -> Check:
    found = Check()
    found.note(0, tensor.requires_grad_())
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1_100_003])
@each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_difference_of_rounding_size(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = torch.randn(size, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    unit = torch.finfo(dtype).eps
    exact[::7] *= 1e-3
    rounded, again = exact.to(dtype), (exact * (1 + unit)).to(dtype)
    assert sums_of(rounded).is_rounding(sums_of(again))
    assert not sums_of(rounded).is_rounding(sums_of((exact * 1.5).to(dtype)))
    if size > 7:
        assert not sums_of(rounded).is_rounding(sums_of(rounded.flip(0)))


# -- which calls are compared ----------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.following = types.SimpleNamespace(use=unseen_numbers(1))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (self.following.use() if self.number == 4 else 1)).sin()


class Made:
    """An object that is made for each call of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale  # type: ignore[no-any-return]


AFTERWARDS = nn.Identity()


def with_a_module_of_the_file(layer: nn.Module, x: Tensor) -> Tensor:
    return AFTERWARDS(layer(x))  # type: ignore[no-any-return]


MADE_ANEW: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "a closure": lambda layer: lambda x: layer(x),
    "a partial of a function": lambda layer: partial(type(layer).forward, layer),
    "a partial of a method": lambda layer: partial(layer.__call__),
    "a partial of a partial": lambda layer: partial(partial(nn.Module.__call__, layer)),
    "a partial of an object": lambda layer: partial(Made(layer), scale=2.0),
    "an object": Made,
    "its method": lambda layer: Made(layer).__call__,
    "a partial that leads to a second module": lambda layer: partial(with_a_module_of_the_file, layer),
}


def ops_of(step: Callable[[], Any]) -> int:
    """Count the ops of a step, those that no mode sees among them."""
    with torch.profiler.profile() as profile:
        step()
    return sum(event.name.startswith("aten::") for event in profile.events())


@pytest.mark.parametrize("make", MADE_ANEW.values(), ids=MADE_ANEW)
def test_a_function_made_anew_for_each_call_is_one_region(make: Callable[[nn.Module], Any]) -> None:
    """Compared are the first call over each module, and its 2nd, 4th and 8th: these run more ops than the others."""
    layers = nn.ModuleList(Layer(0) for _ in range(3))
    x = torch.randn(4, 4, requires_grad=True)
    ops: dict[tuple[int, int], int] = {}
    for call in range(1, 10):
        for number, layer in enumerate(layers):
            ops[number, call] = ops_of(lambda layer=layer: reactivate.checkpoint(make(layer))(x).sum().backward())
    compared = {key for key, count in ops.items() if count > min(ops.values())}
    assert compared == {(number, call) for number in range(3) for call in (1, 2, 4, 8)}


def product(weight: Tensor, x: Tensor) -> Tensor:
    return weight * x


WITHOUT_MODULES: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "a closure": lambda weight: lambda x: x * weight,
    "a partial": lambda weight: partial(product, weight),
    "a partial of a function in C": lambda weight: partial(torch.mul, weight),
    "a method in C": lambda weight: weight.mul,
}


@pytest.mark.parametrize("make", WITHOUT_MODULES.values(), ids=WITHOUT_MODULES)
def test_functions_without_a_module_count_by_their_code(make: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    ops = [ops_of(lambda: reactivate.checkpoint(make(torch.randn(4, 4)))(x).sum().backward()) for _ in range(9)]
    assert [call for call, count in enumerate(ops, 1) if count > min(ops)] == [1, 2, 4, 8]


@pytest.mark.parametrize("make", MADE_ANEW.values(), ids=MADE_ANEW)
def test_functions_over_different_modules_are_different_regions(make: Callable[[nn.Module], Any]) -> None:
    layers = nn.ModuleList(Layer(number) for number in range(6))
    x = torch.randn(4, 4, requires_grad=True)
    for layer in layers:  # the fifth is the only wrong one: the fifth call of this code
        x = reactivate.checkpoint(make(layer))(x)
    with pytest.raises(RecomputeMismatchError, match="that the library cannot see"):
        x.sum().backward()


def test_modules_and_code_made_anew_are_compared_in_their_first_call() -> None:
    """Also where they have the addresses of dead ones."""
    x = torch.randn(4, 4, requires_grad=True)
    for _ in range(6):
        names: dict[str, Any] = {"layer": Layer(4)}
        exec("def forward(x):\n    return layer(x)", names)
        for fn in (names["forward"], partial(Layer.forward, Layer(4))):
            out = reactivate.checkpoint(fn)(x).sum()
            with pytest.raises(RecomputeMismatchError, match="that the library cannot see"):
                out.backward()


@pytest.mark.parametrize("tool", ["explain", "verify", "verify of a policy", "plan"])
def test_what_a_tool_runs_is_no_step(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of training is compared, whatever has looked at the model before."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.linear(x) * float(os.environ["SCALE"])).sin().exp()

    monkeypatch.setenv("SCALE", "1")
    model, x = nn.Sequential(*(Scaled() for _ in range(3))), torch.randn(16, 8)
    policy: Any = policies.full()
    if tool == "plan":
        policy = reactivate.plan(model, x, budget="80%")
    elif tool == "verify of a policy":
        assert reactivate.verify(model, x, policy=policy)
    reactivate.apply(model, policy, check="first")
    if tool in ("explain", "verify"):
        getattr(reactivate, tool)(model, x)
    out = model(x).sum()
    monkeypatch.setenv("SCALE", "3")
    with pytest.raises(RecomputeMismatchError):
        out.backward()


# -- what a recomputation leaves behind -------------------------------------------------------------------------------


class Hooking(nn.Module):
    """Draws, has statistics, counts its calls and hooks a module; what it saves comes from none of that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.calls = nn.BatchNorm1d(8), nn.Linear(8, 8), 0
        self.best = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.linear.register_forward_hook(lambda module, args, result: None)
        with torch.no_grad():
            self.norm(x)
            torch.rand(3)
        return self.linear(x).sin().exp()


LEFT_BEHIND = {
    "small-tensors": "the buffer `norm.running_mean`",
    "parts-of-modules": "the attribute `Hooking.calls`",
    "hooks": "hooks of `linear`",
    "streams": "torch's random numbers",
}


@pytest.mark.unfenced(reason="behind a fence, the function reads aliases of buffers")
@pytest.mark.parametrize("mechanism", LEFT_BEHIND)
def test_what_a_recomputation_leaves_behind_is_an_error(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mechanism is taken out: what it should have put back is named."""
    for change in MECHANISMS[mechanism]:
        monkeypatch.setattr(*change)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever other tests have left running
    with pytest.raises(RecomputeMismatchError) as found:
        reactivate.checkpoint(Hooking())(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert LEFT_BEHIND[mechanism] in str(found.value)


@pytest.mark.parametrize("threads", [(2, 1), (1, 2), (2, 2)])
def test_there_is_no_second_look_where_other_threads_run(
    threads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the recomputation, after it, or all the time."""
    for change in MECHANISMS["parts-of-modules"]:
        monkeypatch.setattr(*change)
    model, counts = Hooking(), iter(threads)
    monkeypatch.setattr(threading, "active_count", lambda: next(counts))
    reactivate.checkpoint(model)(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert model.calls == 2


@pytest.mark.parametrize("guard", ["modules", "rng"])
def test_what_is_not_to_be_restored_may_be_left_behind(guard: str) -> None:
    model, ran = Hooking(), Watched()
    guards = reactivate.guards.DEFAULT.without(guard)
    with observed_by(ran):
        reactivate.checkpoint(model, guards=guards)(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert ran.recomputations == 1
    assert model.calls == (2 if guard == "modules" else 1)
