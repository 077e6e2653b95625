"""State of classes that a region does not name: they are bound to a method, in a container, in an attribute.

Each program changes the state in calls that the self-check does not compare, in the forward or between forward and backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from several import check_each
from state_programs import Programs, Wrap, backward, check_program, curve, leaf
from torch import Tensor, nn

PROGRAMS = Programs()
STEPS = 6
UNCOMPARED = (3, 5, 6)

Fn = Callable[..., Any]

calls = [0]


def add(kind: Any) -> float:
    """Count in an attribute of a class, if this call is not compared."""
    kind.number = kind.number + (calls[0] in UNCOMPARED)
    return kind.number


def trained(wrap: Wrap, fn: Fn, classes: tuple[Any, ...], *, by_forward: bool) -> Any:
    """Train a function that reads a number of each class: `fn` changes it, or the code behind the forward."""
    checkpointed = wrap(fn)
    found: list[Any] = []
    for step in range(STEPS):
        calls[0] = step + 1 if by_forward else 0
        x = leaf(6, 4)
        out = checkpointed(x)
        found.append([kind.number for kind in classes])
        if not by_forward and step + 1 in UNCOMPARED:
            for kind in classes:
                kind.number += 2.0
        backward(out)
        found += [x.grad, [kind.number for kind in classes]]
    return found


def made() -> Any:
    """Return new classes."""

    class Base:
        number = 1.0

        @classmethod
        def scaled(cls, x: Tensor) -> Tensor:
            return curve(x, add(cls))

        @classmethod
        def number_of(cls) -> float:
            return add(cls)

        def __class_getitem__(cls, x: Tensor) -> Tensor:
            return curve(x, add(cls))

        def __new__(cls, x: Tensor) -> Any:
            return curve(x, add(cls))

    class Heir(Base):
        @classmethod
        def of_base(cls, x: Tensor) -> Tensor:
            return super().scaled(x)

        @staticmethod
        def static(x: Tensor) -> Tensor:
            return curve(x, add(Heir))

    class Meta(type):
        number = 1.0

        def of_class(cls, x: Tensor) -> Tensor:
            return curve(curve(x, add(cls)), add(Meta))

    class Made(metaclass=Meta):
        number = 1.0

    class Member(Enum):
        ONE = Base

    @dataclass
    class Data:
        factor: float = field(default_factory=Base.number_of)

    class Pair(NamedTuple):
        kind: Any = Base

        @classmethod
        def scaled(cls, x: Tensor) -> Tensor:
            return curve(x, add(Base))

    return SimpleNamespace(**locals())


BOUND: dict[str, Callable[[Any], Fn]] = {
    "class_method": lambda kinds: kinds.Base.scaled,
    "inherited_class_method": lambda kinds: kinds.Heir.scaled,
    "class_method_that_calls_that_of_a_base": lambda kinds: kinds.Heir.of_base,
    "class_method_found_by_super": lambda kinds: super(kinds.Heir, kinds.Heir).scaled,
    "static_method": lambda kinds: kinds.Heir.static,
    "method_of_a_metaclass": lambda kinds: kinds.Made.of_class,
    "function_of_a_class_method": lambda kinds: functools.partial(kinds.Base.scaled.__func__, kinds.Base),
    "class_method_without_a_name": lambda kinds: kinds.Base.__class_getitem__,
    "function_bound_to_a_class": lambda kinds: MethodType(lambda kind, x: curve(x, add(kind)), kinds.Heir),
    "builtin_bound_to_a_class": lambda kinds: type.__call__.__get__(kinds.Base),
    "builtin_given_a_class": lambda kinds: functools.partial(type.__call__, kinds.Heir),
    "class": lambda kinds: kinds.Base,
    "cached_class_method": lambda kinds: functools.lru_cache(maxsize=0)(kinds.Base.scaled),
    "dispatching_class_method": lambda kinds: functools.singledispatch(kinds.Base.scaled),
    "class_method_of_a_named_tuple": lambda kinds: kinds.Pair.scaled,
    "super_object": lambda kinds: (lambda parent: lambda x: parent.scaled(x))(super(kinds.Heir, kinds.Heir)),
    "class_in_an_enum": lambda kinds: (lambda member: lambda x: member.value.scaled(x))(kinds.Member.ONE),
    "class_in_a_named_tuple": lambda kinds: (lambda pair: lambda x: pair.kind.scaled(x))(kinds.Pair()),
    "factory_of_a_field": lambda kinds: (lambda data: lambda x: curve(x, data().factor))(kinds.Data),
}
"""Ways to call a method of a class that the caller does not name."""


class Holds(nn.Module):
    """A module with an attribute."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        held = self.held[0] if isinstance(self.held, list) else self.held
        return held(x)


def as_argument(*place: Any) -> Callable[[Fn], Callable[[Wrap], Fn]]:
    def hold(bound: Fn) -> Callable[[Wrap], Fn]:
        def wrapped(wrap: Wrap) -> Fn:
            checkpointed = wrap(lambda x, given: (given[place[0]] if place else given)(x))
            given = {place[0]: bound} if place else bound
            return lambda x: checkpointed(x, given)

        return wrapped

    return hold


def as_default(bound: Fn) -> Fn:
    def fn(x: Tensor, method: Fn = bound) -> Tensor:
        return method(x)

    return fn


def as_attribute_of_a_function(bound: Fn) -> Fn:
    def fn(x: Tensor) -> Tensor:
        return fn.method(x)  # type: ignore[attr-defined]

    fn.method = bound  # type: ignore[attr-defined]
    return fn


def as_name(bound: Fn) -> Fn:
    names: dict[str, Any] = {"method": bound, "__name__": __name__}
    exec("def fn(x): return method(x)", names)
    return names["fn"]


def as_attribute_of_a_class(bound: Fn) -> Fn:
    holder = type("Holder", (), {"methods": (bound,)})
    return lambda x: holder.methods[0](x)  # type: ignore[attr-defined]


def as_attribute_of_a_tensor(bound: Fn) -> Fn:
    tensor = torch.ones(4)
    tensor.method = bound  # type: ignore[attr-defined]
    return lambda x: tensor.method(x) * tensor  # type: ignore[attr-defined]


def in_a_context(bound: Fn) -> Fn:
    variable: ContextVar[Fn] = ContextVar("variable")
    variable.set(bound)
    return lambda x: variable.get()(x)


def as_hook(bound: Fn) -> nn.Module:
    model = nn.Sequential(nn.Identity())
    model[0].register_forward_hook(lambda module, args, out: bound(out))
    return model


HELD: dict[str, Fn] = {
    "closed_over": lambda bound: lambda x: bound(x),
    "the_function_itself": lambda bound: bound,
    "in_a_closed_over_list": lambda bound: (lambda held: lambda x: held[0](x))([bound]),
    "in_a_partial": lambda bound: functools.partial(lambda method, x: method(x), bound),
    "a_default": as_default,
    "a_name": as_name,
    "an_attribute_of_a_function": as_attribute_of_a_function,
    "in_an_attribute_of_a_class": as_attribute_of_a_class,
    "an_attribute_of_a_tensor": as_attribute_of_a_tensor,
    "an_attribute_of_a_module": Holds,
    "in_a_list_of_a_module": lambda bound: Holds([bound]),
    "in_a_large_tree": lambda bound: nn.Sequential(*(nn.Identity() for _ in range(70)), Holds(bound)),
    "in_a_hook": as_hook,
    "in_a_context_variable": in_a_context,
}
GIVEN = {"an_argument": as_argument(), "in_an_argument": as_argument("method")}


def held(wrap: Wrap, hold: Fn, bound: Callable[[Any], Fn], by_forward: bool) -> Any:
    kinds = made()
    classes = kinds.Base, kinds.Heir, kinds.Made, kinds.Meta
    return trained(wrap, hold(bound(kinds)), classes, by_forward=by_forward)


def given(wrap: Wrap, hold: Fn, bound: Callable[[Any], Fn], by_forward: bool) -> Any:
    kinds = made()
    return trained(hold(bound(kinds)), wrap, (kinds.Base, kinds.Heir), by_forward=by_forward)


def rows(held: dict[str, Fn], bound: dict[str, Callable[[Any], Fn]]) -> dict[str, tuple[Any, ...]]:
    return {
        f"{name}_{how}_changes_{'in_the_forward' if by_forward else 'behind_it'}": (hold, way, by_forward)
        for how, hold in held.items()
        for name, way in bound.items()
        for by_forward in (True, False)
    }


SOME = {name: BOUND[name] for name in ("class_method", "class")}
PROGRAMS.rows(held, rows({"closed_over": HELD["closed_over"]}, BOUND), recomputations=STEPS)
PROGRAMS.rows(held, rows({how: HELD[how] for how in HELD if how != "closed_over"}, SOME), recomputations=STEPS)
PROGRAMS.rows(given, rows(GIVEN, SOME), recomputations=STEPS)


# -- other objects that builtins and `super()` are bound to ------------------------------------------------------------------


@PROGRAMS.right_with(recomputations=STEPS)
def module_behind_super(wrap: Wrap) -> Any:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("number", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            add(self)
            return curve(x, self.number.clone())

    class Heir(Scale):
        def forward(self, x: Tensor) -> Tensor:
            parent = super()
            return wrap(lambda x: parent.forward(x))(x)

    model = Heir()
    return trained(lambda fn: fn, model, (model,), by_forward=True)


numbers = SimpleNamespace(number=1.0)
history = [1.0]
append, pop = history.append, history.pop


def scale_by_history(x: Tensor) -> Tensor:
    last = pop()
    append(last + (calls[0] in UNCOMPARED))
    return curve(x, last)


cached = functools.lru_cache(maxsize=0)(functools.partial(add, numbers))


def scale_by_cached(x: Tensor) -> Tensor:
    return curve(x, cached())


def cached_in_a_closure() -> Fn:
    kind = numbers
    return functools.lru_cache(maxsize=0)(lambda: add(kind))


cached_closure = cached_in_a_closure()


def scale_by_cached_closure(x: Tensor) -> Tensor:
    return curve(x, cached_closure())


class Names(nn.Module):
    """A module whose forward names builtins and cached functions that are bound to objects."""

    def forward(self, x: Tensor) -> Tensor:
        return scale_by_cached_closure(scale_by_cached(scale_by_history(x)))


def named(wrap: Wrap, make: Callable[[], Fn]) -> Any:
    numbers.number, history[:] = 1.0, [1.0]
    return [trained(wrap, make(), (numbers,), by_forward=True), list(history)]


PROGRAMS.rows(
    named,
    {
        "name_of_a_builtin_that_is_bound_to_a_list": (lambda: scale_by_history,),
        "name_of_a_cached_partial": (lambda: scale_by_cached,),
        "name_of_a_cached_function_with_a_closure": (lambda: scale_by_cached_closure,),
        "names_of_bound_functions_in_a_module": (Names,),
    },
    recomputations=STEPS,
)


# -- modules that only functions lead to, which a module's forward names -----------------------------------------------------


class Average(nn.Module):
    """A module with state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.number += calls[0] in UNCOMPARED
        return curve(x, self.number.clone())


def helper_around(module: nn.Module) -> Fn:
    return lambda x: module(x)


class NamesHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x)


class Holder:
    act: Any = None


class NamesHolder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Holder.act(x)


helper = helper_around(Average())


def around_a_module(wrap: Wrap, kind: type[nn.Module], count: int) -> Any:
    global helper
    average = Average()
    helper, Holder.act = helper_around(average), staticmethod(average)
    model = nn.Sequential(*(nn.Identity() for _ in range(count)), kind())
    return trained(wrap, model, (), by_forward=True), average.number


PROGRAMS.rows(
    around_a_module,
    {
        "module_that_a_named_function_closes_over": (NamesHelper, 0),
        "module_that_a_named_class_holds": (NamesHolder, 0),
        "module_in_a_large_tree_that_a_named_function_closes_over": (NamesHelper, 70),
    },
    recomputations=STEPS,
)


def test_programs() -> None:
    check_each({str(program): functools.partial(check_program, program) for program in PROGRAMS.listed})
