"""Code that changes between forward and backward: classes, functions, Python modules, and what these hold."""

from __future__ import annotations

import functools
import gc
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, Flag, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import code_read_by_programs as programs
import code_read_from_afar
import pytest
import torch
from code_read_by_programs import helper as helper_elsewhere
from memory import without_collector
from several import each
from state_programs import Holding, Program, Programs, Wrap, backward, check_program, curve, leaf, state_of
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import reactivate
from reactivate import policies
from reactivate._snapshot.trees import whole_trees

PROGRAMS = Programs()
right, right_by = PROGRAMS.right, PROGRAMS.right_by


@pytest.mark.parametrize("program", PROGRAMS.listed, ids=str)
def test_program(program: Program) -> None:
    check_program(program)


@contextmanager
def restored(*namespaces: Any) -> Iterator[None]:
    """Give modules, classes and functions their attributes back."""
    before = [dict(vars(item)) for item in namespaces]
    try:
        yield
    finally:
        for item, noted in zip(namespaces, before):
            for name in vars(item).keys() - noted.keys():
                delattr(item, name)
            for name, value in noted.items():
                if vars(item)[name] is not value:
                    setattr(item, name, value)


def changed_between(wrap: Wrap, fn: Callable[..., Any], change: Callable[[int], Any], read: Callable[[], Any]) -> Any:
    """Three steps, with a change between forward and backward of each; what is read afterwards is compared, too."""
    checkpointed = wrap(fn)
    found = []
    for step in range(3):
        x = leaf(6, 4)
        out = checkpointed(x)
        change(step)
        found.append(read())
        backward(out)
        found += [x.grad, read()]
    return found


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
        return changed_between(wrap, fn, lambda step: names.update(FACTOR=5.0 + step), lambda: FACTOR)
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

    return changed_between(
        wrap, fn, lambda step: setattr(Counted, "number", 7), lambda: (Counted.number, len(Counted.seen))
    )


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

    return [changed_between(wrap, module, change, lambda: (module.scale, dict(module.table))), state_of(module)]


@right
def slot_of_a_module_is_emptied(wrap: Wrap) -> Any:
    module = Slotted()

    def change(step: int) -> None:
        del module.scale

    def fn(x: Tensor) -> Tensor:
        module.scale = 3.0
        return module(x)

    return changed_between(wrap, fn, change, lambda: hasattr(module, "scale"))


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


@right
def attribute_of_a_named_enum_member_is_changed(wrap: Wrap) -> Any:
    Mode.reset()

    def fn(x: Tensor) -> Tensor:
        return curve(curve(x, Mode.A.scale), Mode.A.value["power"])  # type: ignore[attr-defined]

    return changed_between(wrap, fn, change_mode, read_mode)


@right
def attribute_of_an_enum_member_in_a_module_is_changed(wrap: Wrap) -> Any:
    Mode.reset()
    return changed_between(wrap, Moded(mode=Mode.A), change_mode, read_mode)


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

    return [changed_between(wrap, fn, lambda _: None, lambda: list(made)), (Side.LEFT | Side.RIGHT).name]


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


@right
def attributes_of_a_python_module_are_changed(wrap: Wrap) -> Any:
    programs.scale, programs.table["scale"] = 2.0, 2.0

    def fn(x: Tensor) -> Tensor:
        return curve(curve(x, programs.scale), programs.table["scale"])

    return changed_between(wrap, fn, change_programs, read_programs)


@right
def attributes_of_a_python_module_are_changed_that_a_module_names(wrap: Wrap) -> Any:
    programs.scale, programs.table["scale"] = 2.0, 2.0
    return changed_between(wrap, ReadsModule(), change_programs, read_programs)


@right
def attributes_of_a_made_python_module_are_changed(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        return curve(curve(x, settings.scale), settings.inner.scale)

    def change(step: int) -> None:
        settings.scale += 1  # type: ignore[attr-defined]
        settings.inner.scale += 1  # type: ignore[attr-defined]

    with restored(settings, settings.inner):
        return changed_between(wrap, fn, change, lambda: (settings.scale, settings.inner.scale))


@right
def attribute_of_a_closed_over_python_module_is_changed(wrap: Wrap) -> Any:
    local = ModuleType("local")
    local.scale = 2.0  # type: ignore[attr-defined]

    def change(step: int) -> None:
        local.scale += 1  # type: ignore[attr-defined]

    return changed_between(wrap, lambda x: curve(x, local.scale), change, lambda: local.scale)


@right
def python_module_counts_in_the_forward(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        programs.scale += 1
        return curve(x, programs.scale)

    with restored(programs):
        return changed_between(wrap, fn, lambda _: None, lambda: programs.scale)


# -- arrays -----------------------------------------------------------------------------------------------------------------


@right
def arrays_are_changed(wrap: Wrap) -> Any:
    closed_over, attribute = array("d", [2.0, 1.0]), SimpleNamespace(numbers=array("f", [1.0]))

    def fn(x: Tensor, given: Any) -> Tensor:
        return curve(curve(curve(x, closed_over[0]), attribute.numbers[0]), given[-1])

    checkpointed, found = wrap(fn), []
    for _ in range(3):
        x, given = leaf(6, 4), array("i", [1, 2])
        out = checkpointed(x, given)
        closed_over[0] += 1
        attribute.numbers[0] = 5.0
        given.append(7)
        backward(out)
        found += [x.grad, list(closed_over), list(attribute.numbers), list(given)]
    return found


@right
def array_of_a_module_counts_in_the_forward(wrap: Wrap) -> Any:
    class Counts(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.counts[0] += 1
            self.counts.append(1)
            return curve(x, self.counts[0])

    module = Counts(counts=array("q", [0]))
    return changed_between(wrap, module, lambda _: None, lambda: list(module.counts))


# -- attributes of tensors --------------------------------------------------------------------------------------------------


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buf", torch.ones(4))
        self.plain = torch.ones(4)
        self.buf.tag, self.plain.tag = 2.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return curve(curve(x * self.buf, self.buf.tag), self.plain.tag)


@right
def attributes_of_buffers_are_changed(wrap: Wrap) -> Any:
    module = Tagged()

    def change(step: int) -> None:
        module.buf.tag += step + 1.0
        module.plain.tag += 1.0
        module.buf.more = step

    return changed_between(wrap, module, change, lambda: (module.buf.tag, module.plain.tag, dict(vars(module.buf))))


@right
def attributes_of_buffers_are_changed_that_had_none(wrap: Wrap) -> Any:
    module = Tagged()
    del module.buf.tag, module.plain.tag
    fn = lambda x: curve(x * module.buf, getattr(module.buf, "tag", 2.0))  # noqa: E731

    def change(step: int) -> None:
        module.buf.tag = step + 3.0

    return changed_between(wrap, fn, change, lambda: module.buf.tag)


@right
def attributes_of_closed_over_tensors_are_changed(wrap: Wrap) -> Any:
    table, weight = torch.ones(4), leaf(4)
    table.tag, weight.tag = 2.0, 1.0  # type: ignore[attr-defined]

    def fn(x: Tensor) -> Tensor:
        return curve(curve(x * table, table.tag), weight.tag) * weight  # type: ignore[attr-defined]

    def change(step: int) -> None:
        table.tag += step + 1  # type: ignore[attr-defined]
        weight.tag += 1  # type: ignore[attr-defined]

    return [changed_between(wrap, fn, change, lambda: (table.tag, weight.tag)), weight.grad]  # type: ignore[attr-defined]


# -- what hooks hold --------------------------------------------------------------------------------------------------------


class Counts:
    """Hooks with state of their own."""

    def __init__(self) -> None:
        self.calls = 0

    def scale(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        self.calls += 1
        return out * self.calls

    __call__ = scale


def scale_by(counts: dict[str, int], module: nn.Module, args: Any, out: Tensor) -> Tensor:
    counts["calls"] += 1
    return out * counts["calls"]


def with_hook(wrap: Wrap, hook: Any, count: Callable[[], int]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(hook)
    region, found = wrap(model), []
    for _ in range(3):
        x = leaf(3, 4)
        backward(region(x))
        found += [x.grad, count()]
    return found


@right
def hook_is_a_bound_method(wrap: Wrap) -> Any:
    counts = Counts()
    return with_hook(wrap, counts.scale, lambda: counts.calls)


@right
def hook_is_an_object(wrap: Wrap) -> Any:
    counts = Counts()
    return with_hook(wrap, counts, lambda: counts.calls)


@right
def hook_is_a_partial(wrap: Wrap) -> Any:
    counts = {"calls": 0}
    return with_hook(wrap, functools.partial(scale_by, counts), lambda: counts["calls"])


@right
def distribution_changes_in_the_forward(wrap: Wrap) -> Any:
    class Model(Holding):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).sin()
            self.normal.loc = self.normal.loc + 1
            return y * self.normal.loc.item()

    model = Model(linear=nn.Linear(4, 4), normal=torch.distributions.Normal(0.0, 1.0))
    region, found = wrap(model), []
    for _ in range(3):
        x = leaf(3, 4)
        backward(region(x))
        found += [x.grad, model.normal.loc]
    return found


# -- hooks on all modules ---------------------------------------------------------------------------------------------------


@right
def hooks_on_all_modules_are_removed(wrap: Wrap) -> Any:
    model, steps = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [1.0]
    backward(wrap(model)(leaf(6, 4)))  # the model is remembered without them
    found = []
    for _ in range(3):
        handles = [
            register_module_forward_hook(lambda module, args, out: curve(out, steps[0])),
            register_module_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        ]
        try:
            x = leaf(6, 4)
            out = wrap(model)(x)
            steps[0] += 1
        finally:
            for handle in handles:
                handle.remove()
        backward(out)
        found += [x.grad, list(steps), hooks_on_all()]
    return [found, state_of(model)]


@right
def hooks_on_all_modules_are_added(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    handles: list[Any] = []

    def change(step: int) -> None:
        handles.append(register_module_forward_hook(lambda module, args, out: out * 3))
        handles.append(register_module_forward_pre_hook(lambda module, args: (args[0] + 1,)))

    try:
        return [changed_between(wrap, model, change, hooks_on_all), state_of(model)]
    finally:
        for handle in handles:
            handle.remove()


def hooks_on_all() -> Any:
    registries = nn.modules.module
    return len(registries._global_forward_hooks), len(registries._global_forward_pre_hooks)


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
        return changed_between(wrap, Derived(), change_classes, read_classes)


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
            return [changed_between(wrap, fn, change, lambda: (read_classes(), in_a_property)), state_of(model)]
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
            return changed_between(wrap, fn, change, lambda: (Root.scale, dict(Config.table)))
        finally:
            Config.table["scale"] = 1.0


@right
def base_of_an_objects_class_is_changed(wrap: Wrap) -> Any:
    config = Config()
    return while_config_changes(wrap, lambda x: curve(curve(x, config.scale), config.table["scale"]))


@right_by(while_config_changes)
def class_is_changed_that_code_names(x: Tensor) -> Tensor:
    return curve(curve(x, Config.scale), Config.table["scale"])


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
            return changed_between(wrap, make(), change, state_of_functions)

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
        return changed_between(wrap, Decorated(), change, lambda: (shift, dict(sizes), list(steps)))
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
        return changed_between(wrap, Own(), change, lambda: in_a_property)
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
        return changed_between(wrap, Wrapped(), change, lambda: shift)
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

    return [changed_between(wrap, Closed(), change, lambda: dict(state)), weight.grad]


@right
def hook_closes_over_a_tensor_with_a_gradient(wrap: Wrap) -> Any:
    weight, model = leaf(4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, out: out * weight)
    return [changed_between(wrap, model, lambda _: None, lambda: None), weight.grad, state_of(model)]


# -- memory -----------------------------------------------------------------------------------------------------------------


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
