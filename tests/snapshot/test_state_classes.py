"""Classes, enums, properties and Python modules that change between forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, Flag, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import code_read_by_programs as programs
import torch
from state_programs import Holding, Programs, Wrap, backward, curve, leaf, restored, state_of, with_changes
from torch import Tensor, nn

PROGRAMS = Programs()


test_program = PROGRAMS.test()
right, right_by = PROGRAMS.right, PROGRAMS.right_by


shift = 1.0


sizes = {"a": 1.0}


# -- slots ----------------------------------------------------------------------------------------------------------------


class Slotted(nn.Module):
    __slots__ = ("__hidden", "scale", "table")

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0
        self.table = {"scale": 1.0}
        self.__hidden = 1.0

    def hide(self, value: float) -> None:
        self.__hidden = value

    def forward(self, x: Tensor) -> Tensor:
        return curve(curve(curve(self.linear(x), self.scale), self.table["scale"]), self.__hidden)


@right
def slot_of_a_module_is_changed(wrap: Wrap) -> Any:
    module = Slotted()

    def change(step: int) -> None:
        module.scale += step + 1
        module.table["scale"] += 1
        module.hide(step + 2.0)

    return [with_changes(wrap, module, change, lambda: (module.scale, dict(module.table))), state_of(module)]


@right
def slot_of_a_module_is_emptied(wrap: Wrap) -> Any:
    module = Slotted()

    def change(step: int) -> None:
        del module.scale

    def fn(x: Tensor) -> Tensor:
        module.scale = 3.0
        return module(x)

    return with_changes(wrap, fn, change, lambda: hasattr(module, "scale"))


# -- enums ----------------------------------------------------------------------------------------------------------------


class Mode(Enum):
    A = {"power": 2.0}
    B = "b"

    @classmethod
    def reset(cls) -> None:
        cls.A.scale = 1.0  # type: ignore[attr-defined]
        cls.A.value["power"] = 2.0


class Moded(Holding):
    def forward(self, x: Tensor) -> Tensor:
        return curve(curve(x, self.mode.scale), self.mode.value["power"])  # type: ignore[attr-defined]


def change_mode(step: int) -> None:
    Mode.A.scale += step + 1  # type: ignore[attr-defined]
    Mode.A.value["power"] += 1


def read_mode() -> Any:
    return Mode.A.scale, dict(Mode.A.value)  # type: ignore[attr-defined]


def while_mode_changes(wrap: Wrap, make: Callable[[], Any]) -> Any:
    Mode.reset()
    return with_changes(wrap, make(), change_mode, read_mode)


PROGRAMS.rows(
    while_mode_changes,
    {
        "attribute_of_a_named_enum_member_is_changed": (
            lambda: lambda x: curve(curve(x, Mode.A.scale), Mode.A.value["power"]),
        ),
        "attribute_of_an_enum_member_in_a_module_is_changed": (lambda: Moded(mode=Mode.A),),
    },
)


@right
def attribute_of_an_enum_member_is_changed_that_is_an_argument(wrap: Wrap) -> Any:
    Mode.reset()
    checkpointed = wrap(lambda x, mode: curve(x, mode.scale))
    x = leaf(6, 4)
    out = checkpointed(x, Mode.A)
    change_mode(3)
    backward(out)
    return [x.grad, read_mode()]


class Side(Flag):
    LEFT = auto()
    RIGHT = auto()


@right
def flags_are_combined_in_the_forward(wrap: Wrap) -> Any:
    made = []

    def fn(x: Tensor) -> Tensor:
        both = Side.LEFT | Side.RIGHT
        made.append(both is made[-1] if made else True)
        return curve(x, both.value)

    return [with_changes(wrap, fn, lambda _: None, lambda: list(made)), (Side.LEFT | Side.RIGHT).name]


# -- Python modules ---------------------------------------------------------------------------------------------------------


settings = ModuleType("settings")


settings.scale, settings.inner = 2.0, ModuleType("inner")  # type: ignore[attr-defined]


settings.inner.scale = 1.0  # type: ignore[attr-defined]


def change_programs(step: int) -> None:
    programs.scale += step + 1
    programs.table["scale"] += 1


def read_programs() -> Any:
    return programs.scale, dict(programs.table)


class ReadsModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return curve(curve(x, programs.scale), programs.table["scale"])


def while_programs_change(wrap: Wrap, make: Callable[[], Any]) -> Any:
    programs.scale, programs.table["scale"] = 2.0, 2.0
    return with_changes(wrap, make(), change_programs, read_programs)


PROGRAMS.rows(
    while_programs_change,
    {
        "attributes_of_a_python_module_are_changed": (
            lambda: lambda x: curve(curve(x, programs.scale), programs.table["scale"]),
        ),
        "attributes_of_a_python_module_are_changed_that_a_module_names": (ReadsModule,),
    },
)


@right
def attributes_of_a_made_python_module_are_changed(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        return curve(curve(x, settings.scale), settings.inner.scale)

    def change(step: int) -> None:
        settings.scale += 1  # type: ignore[attr-defined]
        settings.inner.scale += 1  # type: ignore[attr-defined]

    with restored(settings, settings.inner):
        return with_changes(wrap, fn, change, lambda: (settings.scale, settings.inner.scale))


@right
def attribute_of_a_closed_over_python_module_is_changed(wrap: Wrap) -> Any:
    local = ModuleType("local")
    local.scale = 2.0  # type: ignore[attr-defined]

    def change(step: int) -> None:
        local.scale += 1  # type: ignore[attr-defined]

    return with_changes(wrap, lambda x: curve(x, local.scale), change, lambda: local.scale)


@right
def python_module_counts_in_the_forward(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        programs.scale += 1
        return curve(x, programs.scale)

    with restored(programs):
        return with_changes(wrap, fn, lambda _: None, lambda: programs.scale)


# -- classes ----------------------------------------------------------------------------------------------------------------


class Root:
    scale = 2.0


class Base(Root, nn.Module):
    power = 1.0
    table: dict[str, Any] = {"scale": 2.0, "inner": [1.0]}
    config = SimpleNamespace(scale=1.0)


class Mixin:
    shift = 1.0

    @property
    def shifted(self) -> float:
        return self.shift + shift


class Derived(Base, Mixin):
    def forward(self, x: Tensor) -> Tensor:
        x = curve(curve(curve(x, self.scale), self.power), self.shifted)
        return curve(curve(curve(x, self.table["scale"]), self.table["inner"][0]), self.config.scale)


def change_classes(step: int) -> None:
    Root.scale += step + 1
    Base.power += 1
    Mixin.shift += 1
    Base.table["scale"] += 1
    Base.table["inner"][0] += 1
    Base.config.scale += 1


def read_classes() -> Any:
    return Root.scale, Base.power, Mixin.shift, dict(Base.table), list(Base.table["inner"]), Base.config.scale


@contextmanager
def classes_restored() -> Iterator[None]:
    with restored(Root, Base, Mixin):
        yield
    Base.table["scale"], Base.table["inner"][0], Base.config.scale = 2.0, 1.0, 1.0


@right
def bases_of_a_modules_class_are_changed(wrap: Wrap) -> Any:
    with classes_restored():
        return with_changes(wrap, Derived(), change_classes, read_classes)


@right
def code_of_a_large_tree_is_changed(wrap: Wrap) -> Any:
    """Each module is noted when the forward reaches it."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(70)), Derived(), Slotted(), Own())

    def fn(x: Tensor) -> Tensor:
        return model[72](model[71](model[70](model[0](x))))

    def change(step: int) -> None:
        global in_a_property
        change_classes(step)
        in_a_property += 1
        model[71].scale += 1

    backward(wrap(fn)(leaf(6, 4)))  # now it is known to be large
    try:
        with classes_restored():
            return [with_changes(wrap, fn, change, lambda: (read_classes(), in_a_property)), state_of(model)]
    finally:
        change_back()


class Config(Root):
    table = {"scale": 1.0}


def while_config_changes(wrap: Wrap, fn: Callable[[Tensor], Tensor]) -> Any:
    def change(step: int) -> None:
        Root.scale += 1
        Config.table["scale"] += 1

    with restored(Root):
        try:
            return with_changes(wrap, fn, change, lambda: (Root.scale, dict(Config.table)))
        finally:
            Config.table["scale"] = 1.0


@right
def base_of_an_objects_class_is_changed(wrap: Wrap) -> Any:
    config = Config()
    return while_config_changes(wrap, lambda x: curve(curve(x, config.scale), config.table["scale"]))


@right_by(while_config_changes)
def class_is_changed_that_code_names(x: Tensor) -> Tensor:
    return curve(curve(x, Config.scale), Config.table["scale"])


# -- properties and decorators ----------------------------------------------------------------------------------------------


def scaled(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(self: Any, x: Tensor) -> Tensor:
        return curve(fn(self, x), shift)

    return wrapper


def scaled_by(steps: list[float]) -> Callable[[Any], Any]:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(self: Any, x: Tensor) -> Tensor:
            return curve(fn(self, x), steps[0])

        return wrapper

    return decorate


steps = [2.0]


class Decorated(nn.Module):
    @scaled
    @scaled_by(steps)
    def forward(self, x: Tensor, *, limits: list[float] = [1.0]) -> Tensor:  # noqa: B006
        return curve(curve(x, sizes["a"]), self.size)

    @property
    def size(self) -> float:
        return sizes["b"]


@right
def what_decorators_and_properties_name_is_changed(wrap: Wrap) -> Any:
    global shift
    sizes["b"] = 2.0

    def change(step: int) -> None:
        global shift
        shift += step + 1
        sizes["a"] += 1
        sizes["b"] += 1
        steps[0] += 1

    try:
        return with_changes(wrap, Decorated(), change, lambda: (shift, dict(sizes), list(steps)))
    finally:
        shift, sizes["a"], steps[0] = 1.0, 1.0, 2.0
        del sizes["b"]


class Own(nn.Module):
    """One name for each way, so that nothing else reads it."""

    @property
    def read(self) -> float:
        return in_a_property

    @functools.cached_property
    def kept(self) -> float:
        return 1.0

    @scaled
    def forward(self, x: Tensor) -> Tensor:
        return curve(x, self.read)


in_a_property = 2.0


@right
def name_in_a_property_alone_is_changed(wrap: Wrap) -> Any:
    def change(step: int) -> None:
        global in_a_property
        in_a_property += 1

    try:
        return with_changes(wrap, Own(), change, lambda: in_a_property)
    finally:
        change_back()


def change_back() -> None:
    global in_a_property, shift
    in_a_property, shift = 2.0, 1.0


class Wrapped(nn.Module):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return curve(x, shift)


@right
def name_inside_of_a_librarys_decorator_is_changed(wrap: Wrap) -> Any:
    def change(step: int) -> None:
        global shift
        shift += 1

    try:
        return with_changes(wrap, Wrapped(), change, lambda: shift)
    finally:
        change_back()


@right
def method_closes_over_what_changes(wrap: Wrap) -> Any:
    state, weight = {"scale": 2.0}, leaf(4)

    class Closed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return curve(x, state["scale"]) * weight

    def change(step: int) -> None:
        state["scale"] += 1

    return [with_changes(wrap, Closed(), change, lambda: dict(state)), weight.grad]
