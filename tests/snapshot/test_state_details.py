"""Details of state, each seen by no other test: that is what mutants of the core have shown."""

from __future__ import annotations

import collections
from functools import partial
from typing import Any

import torch
from oracle import assert_bitwise
from several import each
from state_programs import Program, Programs, Wrap, backward, curve, gradients, leaf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import reactivate
from reactivate import guards
from reactivate._snapshot.ambient import AmbientState
from reactivate._snapshot.holders import SlotsHolder
from reactivate._snapshot.kinds import is_users_class, slots_of
from reactivate._snapshot.region_calls import RegionCall, is_of_call
from reactivate._snapshot.tensor_states import TensorStates
from reactivate._snapshot.trees import _leads_nowhere
from reactivate._torch.flags import FLAGS, GUARDED, Flag
from reactivate.guards.ambient import Ambient

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right = PROGRAMS.right


class Counts(nn.Module):
    """Counts in a buffer of another module, which is in a plain list and is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.BatchNorm1d(4)]

    def forward(self, x: Tensor) -> Tensor:
        number = self.others[0].num_batches_tracked.add_(1)
        return curve(x, number)


@right
def large_tree_with_a_module_in_a_list(wrap: Wrap) -> Any:
    """More than 64 modules are noted one by one as they are reached; this one is reached by no call."""
    model = nn.Sequential(*(nn.Identity() for _ in range(70)), nn.Linear(4, 4), Counts())
    checkpointed, x = wrap(model), leaf(6, 4)
    for _ in range(2):
        backward(checkpointed(x))
    return [x.grad, gradients(model), model[-1].others[0].num_batches_tracked]


@right
def hook_that_is_registered_and_removed_before_the_backward(wrap: Wrap) -> Any:
    """The recomputation registers it once more, on a tensor without hooks: it goes, and does not fire."""
    layer, x, fired = nn.Linear(4, 4), leaf(6, 4), []
    handles: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        handles.append(layer.weight.register_hook(fired.append))
        return curve(layer(x), 2)

    out = wrap(fn)(x)
    handles[0].remove()
    backward(out)
    return [x.grad, layer.weight.grad, len(fired), len(layer.weight._backward_hooks or ())]


# -- parts of the walk ------------------------------------------------------------------------------------------------


def in_its_module() -> None:
    """A function that is there for good."""


def noted() -> None:
    """A function with an attribute."""


noted.attribute = [1]  # type: ignore[attr-defined]


def test_a_function_leads_nowhere_if_it_is_there_for_good_and_holds_nothing() -> None:
    held = torch.ones(2)
    made_here = lambda: None  # noqa: E731
    elsewhere = type(in_its_module)(in_its_module.__code__, {"__name__": "nowhere"}, "elsewhere")
    assert _leads_nowhere(in_its_module)
    assert not any(map(_leads_nowhere, (lambda: held, made_here, noted, elsewhere)))


def test_an_entry_is_of_a_call_by_its_key() -> None:
    call = RegionCall()
    assert is_of_call(call) and is_of_call(("name", call)) and is_of_call(call.inner(0))
    assert not any(map(is_of_call, ("name", ("name", 0), 0, partial(is_of_call, call))))


def test_what_is_held_is_what_has_been_copied() -> None:
    large, small = torch.ones(32, 32), torch.ones(2)
    state = TensorStates((large, small))
    assert [tensor.shape for tensor in state.held()] == [large.shape, (small.nbytes,)]
    weight, other = nn.Parameter(torch.ones(3, 3)), torch.ones(3, 3)
    state.note_writes([(weight, 0), (other, 0)])
    assert [tensor.shape for tensor in state.held()] == [large.shape, weight.shape, (small.nbytes,)]


def test_a_tensor_that_was_written_to_since_is_put_aside() -> None:
    large = torch.zeros(64, 64)
    state = TensorStates((large,))
    assert not [*state.put_aside()]
    large.add_(1)
    assert [item is large for item in state.put_aside()] == [True]


# -- arguments, classes and settings ----------------------------------------------------------------------------------


@right
def a_tensor_that_is_passed_twice(wrap: Wrap) -> Any:
    x = leaf(4)

    def fn(one: Tensor, other: Tensor) -> Tensor:
        return (one * other).exp() if one is other else (one + other).sin()

    backward(wrap(fn)(x, x), wrap(fn)(x, leaf(4)))
    return x.grad


@right
def another_dtype_of_autocast_around_the_backward(wrap: Wrap) -> Any:
    layer, x = nn.Linear(4, 4), leaf(6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = wrap(lambda x: curve(layer(x), 2))(x)
    with torch.autocast("cpu", dtype=torch.float16):
        backward(out.float())
    return [x.grad, gradients(layer)]


class Slotted:
    __slots__ = ("one", "other")


def test_the_items_of_slots_are_named() -> None:
    value = Slotted()
    value.one = 1
    holder = SlotsHolder(value, slots_of(Slotted))
    assert list(holder.items(holder.get())) == [(".one", 1)]


def test_guards_are_counted() -> None:
    assert len(guards.DEFAULT) == len(list(guards.DEFAULT)) > len(guards.DEFAULT.without("rng")) > 0


def test_a_class_of_a_script_is_the_users_and_one_of_a_library_is_not() -> None:
    of_script = type("OfScript", (), {"__module__": "__main__"})
    assert is_users_class(of_script) and is_users_class(Counts)
    assert not any(map(is_users_class, (collections.OrderedDict, nn.Linear, Program.__class__)))


class _Named(type):
    """A metaclass whose classes have something else in the place of the name of their module, as Cython's on Python 3.10."""

    def __getattribute__(cls, name: str) -> Any:
        return 3 if name == "__module__" else super().__getattribute__(name)


class Nameless(metaclass=_Named):
    def __init__(self) -> None:
        self.step = 0


def test_a_class_without_the_name_of_its_module() -> None:
    """A region that reaches NumPy's functions meets such classes."""
    state, found = Nameless(), []

    def fn(x: torch.Tensor) -> torch.Tensor:
        state.step += 1
        return curve(x, state.step)

    for wrap in (lambda fn: fn, reactivate.checkpoint):
        state.step, x = 0, torch.linspace(0, 1, 4, requires_grad=True)
        for _ in range(2):
            wrap(fn)(x).sum().backward()
        found.append((state.step, x.grad))
    assert found[0][0] == found[1][0] == 2
    assert_bitwise(found[0][1], found[1][1], "gradient")


def test_settings_are_the_same_with_the_same_autocast_only() -> None:
    plain = AmbientState()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = AmbientState()
        assert state.is_set()
    with torch.autocast("cpu", dtype=torch.float16):
        assert not state.is_set()
    assert plain.is_set() and not state.is_set()


@each("flag", [flag for flag in FLAGS if flag.name in GUARDED])
def test_each_flag_that_the_guard_compares_is_seen_when_it_changes(flag: Flag) -> None:
    state, before = AmbientState(), flag.read()
    others = (
        {"ieee", "tf32"} if before in ("none", "ieee", "tf32") else {not before, 2, 3, torch.float64, torch.float16}
    )
    other = next(item for item in others if type(item) is type(before) and item != before)
    try:
        flag.write(other)
        assert flag.read() == other and not state.is_set()
    finally:
        flag.write(before)
    assert state.is_set()


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_snapshot_of_settings_is_shared_and_holds_no_mode() -> None:
    guard: Any = Ambient()
    assert guard.before(None) is guard.before(None)
    with Mode():
        with_mode = guard.before(None)
        assert with_mode is not guard._last
    assert guard.before(None) is not with_mode
