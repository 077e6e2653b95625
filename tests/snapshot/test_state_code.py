"""Functions that change between forward and backward, and code that is made by `exec`; neither is kept alive."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Flag, auto
from typing import Any

import code_read_by_programs as programs
import code_read_from_afar
import pytest
import torch
from code_read_by_programs import helper as helper_elsewhere
from memory import without_collector
from several import each
from state_programs import Program, Programs, Wrap, backward, check_program, curve, leaf, restored, with_changes
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import reactivate
from reactivate import policies
from reactivate._snapshot.trees import whole_trees

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right = PROGRAMS.right


FACTOR = 2.0


@right
def name_that_only_a_nested_function_reads(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return y * FACTOR

        return inner(x).sin()

    names = globals()
    before = names["FACTOR"]
    try:
        return with_changes(wrap, fn, lambda step: names.update(FACTOR=5.0 + step), lambda: FACTOR)
    finally:
        names["FACTOR"] = before


@right
def class_in_a_closure(wrap: Wrap) -> Any:
    class Counted:
        number = 0
        seen: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        Counted.number += 1
        Counted.seen.append(x.detach() * 2)
        return (x * Counted.number + sum(Counted.seen)).sin()

    return with_changes(
        wrap, fn, lambda step: setattr(Counted, "number", 7), lambda: (Counted.number, len(Counted.seen))
    )


# -- functions --------------------------------------------------------------------------------------------------------------


shift = 1.0
sizes = {"a": 1.0}


def helper(factor: float = 2.0, *, power: float = 1.0, cache: dict[str, float] = {"size": 1.0}) -> float:  # noqa: B006
    return factor + power + cache["size"] + getattr(helper, "more", 0.0)


def another_helper(factor: float = 9.0) -> float:
    return factor


def outer() -> float:
    return middle()


def middle() -> float:
    return helper() + helper_elsewhere() + programs.reads_scale()


activation = torch.sin


class Helped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return activation(curve(x, outer()))


def change_defaults(step: int) -> None:
    helper.__defaults__ = (3.0 + step,)
    assert helper.__kwdefaults__ is not None
    helper.__kwdefaults__["power"] += 1.0
    helper.__kwdefaults__["cache"]["size"] += 1.0
    helper.more = step + 1.0  # type: ignore[attr-defined]


def change_defaults_elsewhere(step: int) -> None:
    helper_elsewhere.__defaults__ = (3.0 + step,)
    helper_elsewhere.__kwdefaults__ = {"shift": 1.0}


def rebind(step: int) -> None:
    global helper
    helper = another_helper if step == 0 else lambda: 5.0 + step  # type: ignore[assignment]


def rebind_middle(step: int) -> None:
    global middle
    middle = lambda: 7.0 + step  # type: ignore[assignment]  # noqa: E731


def rebind_librarys(step: int) -> None:
    global activation
    activation = [torch.cos, torch.tanh, torch.sin][step]


def remove(step: int) -> None:
    globals().pop("activation")


def change_elsewhere(step: int) -> None:
    programs.scale += 1


def recode(step: int) -> None:
    others: list[Any] = [
        lambda factor=2.0, *, power=1.0, cache=None: factor * 3.0,
        lambda factor=2.0, *, power=1.0, cache=None: power * 4.0,
        lambda factor=2.0, *, power=1.0, cache=None: factor * sizes["a"],
    ]
    helper.__code__ = others[step].__code__


CHANGES_OF_CODE = [
    change_defaults,
    change_defaults_elsewhere,
    rebind,
    rebind_middle,
    rebind_librarys,
    change_elsewhere,
    recode,
]


def state_of_functions() -> Any:
    own = [name for name in ("helper", "middle", "activation") if name in globals()]
    functions = [globals()[name] for name in own if name != "activation"]
    fixed = [(fn.__defaults__, repr(fn.__kwdefaults__), fn.__code__.co_names) for fn in (*functions, helper_elsewhere)]
    return [own, getattr(globals().get("activation"), "__name__", ""), fixed, programs.scale, repr(vars(functions[0]))]


@contextmanager
def functions_restored() -> Iterator[None]:
    global helper, middle, activation
    before = helper, middle, activation
    fixed = [(fn, fn.__code__, fn.__defaults__, dict(fn.__kwdefaults__ or {})) for fn in (helper, helper_elsewhere)]
    try:
        with restored(programs):
            yield
    finally:
        helper, middle, activation = before
        for fn, code, defaults, keywords in fixed:
            fn.__code__, fn.__defaults__, fn.__kwdefaults__ = code, defaults, keywords
            vars(fn).clear()
        before[0].__kwdefaults__["cache"]["size"] = 1.0  # type: ignore[index]


def plain_function(x: Tensor) -> Tensor:
    return activation(curve(x, outer()))


@pytest.mark.parametrize("make", [Helped, lambda: plain_function, lambda: lambda x: activation(curve(x, outer()))])
@pytest.mark.parametrize("change", CHANGES_OF_CODE, ids=lambda change: change.__name__)
def test_functions_change_that_code_names(change: Callable[[int], None], make: Callable[[], Any]) -> None:
    def program(wrap: Wrap) -> Any:
        with functions_restored():
            return with_changes(wrap, make(), change, state_of_functions)

    check_program(Program(program))


def test_a_name_is_removed_and_there_again() -> None:
    def program(wrap: Wrap) -> Any:
        global activation
        with functions_restored():
            x = leaf(6, 4)
            out = wrap(Helped())(x)
            remove(0)
            backward(out)
            return [x.grad, state_of_functions()]

    check_program(Program(program))


def test_the_next_step_reads_other_code() -> None:
    """A name in a helper is found again when it stands for another function."""

    def reads_sizes() -> float:
        return sizes["a"]

    def program(wrap: Wrap) -> Any:
        global helper
        found = []
        with functions_restored():
            fn = wrap(Helped())
            for _ in range(4):
                x = leaf(6, 4)
                out = fn(x)
                sizes["a"] += 1
                backward(out)
                helper = reads_sizes  # type: ignore[assignment]
                found += [x.grad, dict(sizes)]
            sizes["a"] = 1.0
            return found

    check_program(Program(program))


def test_helpers_are_followed_into_one_more_python_module() -> None:
    def fn(x: Tensor) -> Tensor:
        return curve(x, programs.reads_from_afar())

    def changed(change: Callable[[], None]) -> Callable[[Wrap], Any]:
        def program(wrap: Wrap) -> Any:
            with restored(code_read_from_afar):
                try:
                    x = leaf(6, 4)
                    out = wrap(fn)(x)
                    change()
                    backward(out)
                    return x.grad
                finally:
                    code_read_from_afar.distant.__defaults__ = (1.0,)

        return program

    def defaults() -> None:
        code_read_from_afar.distant.__defaults__ = (5.0,)

    check_program(Program(changed(defaults)))


# -- memory -----------------------------------------------------------------------------------------------------------------


class Side(Flag):
    LEFT = auto()


def scaled(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(self: Any, x: Tensor) -> Tensor:
        return curve(fn(self, x), shift)

    return wrapper


class Remembered(nn.Module):
    """Reads code in every way of which a tree is remembered."""

    table = {"scale": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mode = Side.LEFT

    @scaled
    def forward(self, x: Tensor) -> Tensor:
        return curve(curve(self.linear(x), outer()), self.table["scale"])


def test_a_tree_whose_code_names_helpers_is_remembered() -> None:
    module = Remembered()
    for _ in range(2):
        reactivate.checkpoint(module)(leaf(6, 4)).sum().backward()
    assert id(module) in whole_trees.kept


@functools.cache
def cached() -> list[Tensor]:
    return []


collect: Any = None


class Collects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        collect(x.shape)
        return curve(x, 2 + len(cached()))


def test_a_tree_that_names_what_holds_something_is_not_remembered() -> None:
    """The list of a bound method may hold anything; a cache goes with its Python module."""
    global collect
    for named, is_remembered in ((len, True), ([].append, False)):
        collect, module = named, Collects()
        reactivate.checkpoint(module)(leaf(6, 4)).sum().backward()
        assert (id(module) in whole_trees.kept) is is_remembered


def test_hooks_on_all_modules_are_not_remembered() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    hook = lambda module, args, out: None  # noqa: E731
    reference = weakref.ref(hook)
    handle = register_module_forward_hook(hook)
    del hook
    reactivate.checkpoint(module)(leaf(6, 4)).sum().backward()
    handle.remove()
    gc.collect()
    assert reference() is None


def test_nothing_is_kept_alive_by_what_is_known_of_code() -> None:
    """A module, a tensor and a function that a name stood for go when the name stands for something else."""
    global helper

    def make(model: nn.Module, table: Tensor) -> Any:
        def reads_model(table: Tensor = table) -> Tensor:
            return model(torch.ones(4)).sum() * table.sum()

        references.extend([weakref.ref(model), weakref.ref(table)])
        return reads_model

    references: list[Any] = []
    with functions_restored():
        helper = make(nn.Linear(4, 4), torch.ones(4))
        module = Remembered()
        with without_collector():
            reactivate.checkpoint(lambda x: curve(x, helper()))(leaf(6, 4)).sum().backward()
            reactivate.checkpoint(module)(leaf(6, 4)).sum().backward()
            helper = another_helper  # type: ignore[assignment]
            assert [item() for item in references] == [None, None]


# -- code that is made by `exec`, as in notebooks and templates ---------------------------------------------------------


TEMPLATE = compile(
    """
from torch import nn

factors = [1.0]


def scaled(x):
    return x * factors[0]


class Counter:
    def __init__(self):
        self.count = 1.0

    def step(self):
        self.count += 1
        return self.count


class Model(nn.Module):
    counters = {"a": Counter()}

    def __init__(self):
        super().__init__()
        self.linear, self.counter = nn.Linear(4, 4), Counter()

    def forward(self, x):
        factors[0] += 0.5
        return scaled(self.linear(x)).sin() * self.counter.step() * self.counters["a"].step()


model = Model()


def fn(x):
    return model(x).sin()
""",
    "<template>",
    "exec",
)


def made_by_exec(name: str | None) -> dict[str, Any]:
    namespace: dict[str, Any] = {} if name is None else {"__name__": name}
    exec(TEMPLATE, namespace)
    return namespace


def applied(namespace: dict[str, Any]) -> Any:
    reactivate.apply(namespace["model"], policies.recompute_modules("linear"))
    return namespace["model"]


WAYS_TO_A_REGION: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a module": lambda namespace: reactivate.checkpoint(namespace["model"]),
    "a function": lambda namespace: reactivate.checkpoint(namespace["fn"]),
    "a closure": lambda namespace: reactivate.checkpoint(lambda x: namespace["model"](x)),
    "saved calls": lambda namespace: reactivate.checkpoint(namespace["model"], policy=policies.save_modules("linear")),
    "a policy": applied,
}


@each("name", [None, __name__, "gone"])
@each("way", WAYS_TO_A_REGION)
def test_what_is_made_by_exec_dies(way: str, name: str | None) -> None:
    namespace = made_by_exec(name)
    references = [weakref.ref(namespace[item]) for item in ("model", "Model", "fn", "Counter", "scaled")]
    region = WAYS_TO_A_REGION[way](namespace)
    for _ in range(3):
        region(leaf(6, 4)).sum().backward()
    del namespace, region
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


@pytest.mark.parametrize("name", ["model", "fn"])
def test_code_that_is_run_in_two_namespaces_has_names_in_each(name: str) -> None:
    """The functions share their code objects."""

    def program(wrap: Wrap) -> Any:
        namespaces = [made_by_exec(None) for _ in range(2)]
        namespaces[1]["factors"][0] = 5.0
        regions = [wrap(namespace[name], check="metadata") for namespace in namespaces]
        xs = [leaf(6, 4) for _ in range(6)]
        for number, x in enumerate(xs):
            backward(regions[number % 2](x))
        return [x.grad for x in xs], [namespace["factors"] for namespace in namespaces]

    check_program(Program(program, recomputations=6))


def test_a_class_made_by_a_function_dies_with_what_it_closes_over() -> None:
    def make() -> tuple[nn.Module, weakref.ref[nn.Module]]:
        table = nn.Linear(4, 4)

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return curve(table(x), 2)

        return Model(), weakref.ref(table)

    module, table = make()
    reactivate.checkpoint(module)(leaf(6, 4)).sum().backward()
    del module
    gc.collect()
    assert table() is None
