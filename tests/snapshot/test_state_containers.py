"""Containers: the recomputation sees the very ones of the forward, with the contents that they had."""

from __future__ import annotations

import contextlib
import enum
import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from several import each
from state_programs import (
    Holding,
    Program,
    Programs,
    Wrap,
    backward,
    check_program,
    curve,
    gradients,
    leaf,
    mutated,
    train,
    vectors,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import reactivate

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_by, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.loud


# -- lists, dicts, sets ------------------------------------------------------------------------------------------------


def compared_with_is(wrap: Wrap, make: Callable[[], Any]) -> Any:
    """Pass the object that the function captures, too, and ask whether they are one."""
    config, weight = make(), leaf(4)

    def fn(x: Tensor, given: Any) -> Tensor:
        return curve(x * weight, 2 if given is config else 3)

    return [train(wrap(fn), vectors(), config), weight.grad]


PROGRAMS.rows(
    compared_with_is,
    {
        "list_argument_is_the_captured_list": (lambda: [1, 2],),
        "dict_argument_is_the_captured_dict": (lambda: {"a": 1},),
        "set_argument_is_the_captured_set": (lambda: {1, 2},),
        "tuple_argument_with_a_tensor_is_the_captured_tuple": (lambda: (torch.ones(2), 1),),
        "list_argument_with_a_leaf_is_the_captured_list": (lambda: [leaf(2), 1],),
        "object_argument_is_the_captured_object": (lambda: SimpleNamespace(width=4, weight=torch.ones(2)),),
        "array_argument_is_the_captured_array": (lambda: numpy.arange(3.0),),
        "bytearray_argument_is_the_captured_one": (lambda: bytearray(b"abc"),),
    },
)


@right
def nested_containers_are_the_captured_ones(wrap: Wrap) -> Any:
    inner = {"layers": [leaf(4), {"w": leaf(4)}]}

    def fn(x: Tensor, given: dict[str, Any]) -> Tensor:
        same = given["config"] is inner and given["config"]["layers"][1] is inner["layers"][1]
        return curve(x * inner["layers"][0], 2 if same else 3)

    checkpointed = wrap(fn)
    return [train(lambda x: checkpointed(x, {"config": inner}), vectors()), inner["layers"][0].grad]


@right
def sentinel_and_enum_arguments_are_themselves(wrap: Wrap) -> Any:
    missing = object()

    class Mode(enum.Enum):
        FAST = 1

    def fn(x: Tensor, given: Any, mode: Mode) -> Tensor:
        return curve(x, (2 if given is missing else 3) + (5 if mode is Mode.FAST else 7))

    return train(wrap(fn), vectors(), missing, Mode.FAST)


@right
def argument_holds_one_tensor_twice(wrap: Wrap) -> Any:
    def fn(pair: list[Tensor], other: Tensor) -> Tensor:
        same = (pair[0] is pair[1]) + 2 * (pair[0] is other)
        return curve(pair[0], 1 + same) * pair[1]

    checkpointed = wrap(fn)
    return train(lambda x: checkpointed([x, x], x), vectors())


@right
def argument_holds_one_list_twice(wrap: Wrap) -> Any:
    def fn(x: Tensor, first: list[int], second: dict[str, list[int]]) -> Tensor:
        first.append(3)
        return curve(x, sum(second["a"]))

    checkpointed = wrap(fn)

    def step(x: Tensor) -> Tensor:
        shared = [1, 2]
        return checkpointed(x, shared, {"a": shared})

    return train(step, vectors())


@right
def list_contains_itself(wrap: Wrap) -> Any:
    items: list[Any] = [1]
    items.append(items)
    return train(wrap(lambda x, items: curve(x, 2 if items[1] is items else 3)), vectors(), items)


PROGRAMS.rows(mutated, {"list_is_popped": (list.pop, lambda: [1.0, 2.0, 3.0], list)})


@right_by(mutated, lambda: [1, 2], list)
def list_is_appended_and_reversed(items: list[int]) -> float:
    items.append(len(items))
    items.reverse()
    return 1 + items[0] + len(items)


@right_by(mutated, dict, dict)
def dict_item_is_counted_up(items: dict[str, int]) -> float:
    items["n"] = items.get("n", 0) + 1
    return items["n"]


@right_by(mutated, lambda: {"a": 1, "b": 2, "c": 4}, lambda items: list(items.items()))
def dict_order_changes(items: dict[str, int]) -> float:
    first = next(iter(items))
    items[first] = items.pop(first)
    return items[first]


@right_by(mutated, set, sorted)
def set_is_added_to(items: set[int]) -> float:
    items.add(len(items))
    return 1 + len(items)


@right_by(mutated, lambda: deque([1, 2, 4], maxlen=3), lambda items: [list(items), items.maxlen])
def deque_with_a_limit_rotates(items: deque[int]) -> float:
    items.rotate(1)
    items.append(items[0] + 3)
    return items[0]


@right_by(
    mutated, lambda: OrderedDict(a=1, b=2, c=4), lambda items: [list(items.items()), list(reversed(items)), len(items)]
)
def ordered_dict_moves_to_end(items: OrderedDict[str, int]) -> float:
    first = next(iter(items))
    items.move_to_end(first)
    items["new"] = items.get("new", 0) + 1
    return items[first] + items["new"]


@right_by(mutated, lambda: defaultdict(list), dict)
def defaultdict_makes_its_entries(items: defaultdict[str, list[int]]) -> float:
    items["a"].append(1)
    return len(items["a"])


@right_by(mutated, Counter, dict)
def counter_counts(items: Counter[str]) -> float:
    items.update(["a"])
    return items["a"]


# -- containers that are no lists ---------------------------------------------------------------------------------------


@right_by(mutated, lambda: bytearray(2), list)
def bytearray_grows(items: bytearray) -> float:
    items[0] += 1
    items.append(1)
    return items[0] * len(items)


@right_by(mutated, lambda: memoryview(bytearray(2)), list)
def memoryview_is_written_to(items: memoryview) -> float:
    items[0] += 1
    return items[0]


@right
def bytearray_in_an_attribute(wrap: Wrap) -> Any:
    class Block(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.seen[0] += 1
            return curve(x, self.seen[0])

    block = Block(seen=bytearray(2))
    return [train(wrap(block), vectors(3)), list(block.seen)]


@right_by(mutated, lambda: io.StringIO(newline="\r\n"), lambda items: [items.getvalue(), items.tell()])
def stream_is_written_to(items: io.StringIO) -> float:
    items.write("a\n")
    return len(items.getvalue())


class Slotted:
    @staticmethod
    def of(kind: Any) -> Any:
        return type("Slotted", (kind,), {"__slots__": ("count",)})


@pytest.mark.parametrize("kind", [list, dict, deque, set, OrderedDict], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("has_slots", [False, True])
def test_attributes_of_a_container(kind: Any, has_slots: bool) -> None:
    def run(wrap: Wrap) -> Any:
        def make() -> Any:
            found = (Slotted.of(kind) if has_slots else type("Open", (kind,), {}))()
            found.count = 0
            return found

        def mutate(items: Any) -> float:
            items.count += 1
            if isinstance(items, dict):
                items[items.count] = 1
            elif isinstance(items, set):
                items.add(len(items))
            else:
                items.append(items.count)
            return items.count + len(items)

        return mutated(wrap, mutate, make, lambda items: [list(items), items.count])

    check_program(Program(run, recomputations=3))


class Pair(tuple[int, ...]):
    count = 0


@right_by(mutated, lambda: Pair((1, 2)), lambda items: items.count)
def attribute_of_a_tuple(items: Pair) -> float:
    items.count += 1
    return items.count


class Raising:
    """Objects of these classes raise where a walk asks them for what they hold."""

    class Length(list[Any]):
        def __len__(self) -> int:
            raise OSError("length")

        def __iter__(self) -> Any:
            raise OSError("iter")

    class Keys(dict[str, Any]):
        def __len__(self) -> int:
            raise OSError("length")

        def __iter__(self) -> Any:
            raise OSError("iter")

    class Members(set[Any]):
        def __len__(self) -> int:
            raise OSError("length")

        def __iter__(self) -> Any:
            raise OSError("iter")

    class Row(tuple[Any, ...]):
        def __iter__(self) -> Any:
            raise OSError("iter")

    class Namespace:
        @property
        def __dict__(self) -> Any:
            raise OSError("dict")

    class Slot:
        __slots__ = ("empty",)

        def __getattr__(self, name: str) -> Any:
            raise OSError(name)


RAISING: dict[str, Callable[[], Any]] = {
    "list": lambda: Raising.Length([1]),
    "dict": lambda: Raising.Keys(a=1),
    "set": lambda: Raising.Members([1]),
    "tuple": lambda: Raising.Row((1, 2)),
    "object": Raising.Namespace,
    "slots": Raising.Slot,
}


@each("policy", [None, "mul"])
@each("name", RAISING)
def test_objects_that_raise_are_held(name: str, policy: str | None) -> None:
    options = {} if policy is None else {"policy": reactivate.policies.save_ops(policy)}

    def run(wrap: Wrap) -> Any:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.held = RAISING[name]()

            def forward(self, x: Tensor) -> Tensor:
                return curve(x, 2)

        closed_over = RAISING[name]()

        def fn(x: Tensor, given: Any) -> Tensor:
            return curve(x, 3 if given is closed_over else 2)

        checkpointed, given = wrap(fn, **options), RAISING[name]()
        return [train(wrap(Block(), **options), vectors()), train(lambda x: checkpointed(x, given), vectors())]

    check_program(Program(run, recomputations=4))


# -- attributes of tensors ------------------------------------------------------------------------------------------------


@right
def list_in_an_attribute_of_a_parameter(wrap: Wrap) -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.layer.weight.seen = []  # type: ignore[assignment]
            self.register_buffer("state", torch.ones(4))
            self.state.meta = SimpleNamespace(count=0, scale=torch.ones(4))
            self.state.meta.scale.marks = []

        def forward(self, x: Tensor) -> Tensor:
            self.layer.weight.seen.append(1)  # type: ignore[operator]
            self.state.meta.count += 1
            self.state.meta.scale.mul_(1.5)
            self.state.meta.scale.marks.append(1)
            factor = len(self.layer.weight.seen) * self.state.meta.count  # type: ignore[arg-type]
            y = curve(self.layer(x), factor + len(self.state.meta.scale.marks))
            return curve(y, self.state.meta.scale.clone())

    block = Block()
    meta = block.state.meta
    grads = train(wrap(block), vectors(4))
    return [grads, gradients(block), block.layer.weight.seen, meta.count, meta.scale, meta.scale.marks]


@right
def list_in_an_attribute_of_an_argument(wrap: Wrap) -> Any:
    mark, weight = torch.ones(4), leaf(4)
    mark.seen, weight.meta = [], SimpleNamespace(scale=torch.ones(4))  # type: ignore[attr-defined]
    weight.meta.scale.marks, weight.meta.scale.count = [], 0  # type: ignore[attr-defined]

    def fn(x: Tensor, given: Tensor) -> Tensor:
        given.seen.append(1)  # type: ignore[attr-defined]
        scale = weight.meta.scale  # type: ignore[attr-defined]
        scale.mul_(1.5)
        scale.marks.append(1)
        scale.count += 3
        return curve(curve(x, len(given.seen) + len(scale.marks) * scale.count), scale.clone() * weight)  # type: ignore[attr-defined]

    checkpointed = wrap(fn)
    grads = train(lambda x: checkpointed(x, mark), vectors(4))
    return [grads, weight.grad, mark.seen, weight.meta.scale]  # type: ignore[attr-defined]


# -- arrays -------------------------------------------------------------------------------------------------------------


@loud
def captured_array_is_added_to(wrap: Wrap) -> Any:
    seen = numpy.zeros(2)

    def fn(x: Tensor) -> Tensor:
        seen[0] += 1
        return curve(x, float(seen[0]))

    return [train(wrap(fn), vectors(3)), seen.tolist()]


# -- changed between forward and backward -------------------------------------------------------------------------------


def changed_between(
    wrap: Wrap, make: Callable[[], Any], read: Callable[[Any], float], change: Callable[[Any], Any]
) -> Any:
    """A value that the caller changes after the forward, as an argument and as a captured value."""
    as_argument, captured = make(), make()
    fn = wrap(lambda x, given: curve(curve(x, read(given)), read(captured)))
    grads = train(fn, vectors(1), as_argument, between=lambda: [change(as_argument), change(captured)])
    return [grads, read(as_argument), read(captured)]


PROGRAMS.rows(
    changed_between,
    {
        "list_is_changed_before_backward": (
            lambda: [1.0, 2.0],
            lambda items: items[-1],
            lambda items: items.append(3.0),
        ),
        "dict_is_cleared_before_backward": (
            lambda: {"a": 2.0},
            lambda items: items.get("a", 5.0),
            lambda items: items.clear(),
        ),
        "ordered_dict_is_cleared_before_backward": (
            lambda: OrderedDict(a=2.0, b=3.0),
            lambda items: next(iter(items.values()), 5.0) + len(list(reversed(items))),
            lambda items: items.clear(),
        ),
        "configuration_object_is_changed_before_backward": (
            lambda: SimpleNamespace(factor=2.0),
            lambda config: config.factor,
            lambda config: setattr(config, "factor", 3.0),
        ),
    },
)


@right
def captured_number_is_changed_before_backward(wrap: Wrap) -> Any:
    factor = 2.0
    (x,) = vectors(1)
    out = wrap(lambda x: curve(x, factor))(x)
    factor = 3.0
    backward(out)
    return [x.grad, factor]


@right
def equal_one_element_tensors_are_told_apart(wrap: Wrap) -> Any:
    """Two tensors of one element compare equal, and are two keys of a table."""
    first, second = torch.ones(1), torch.ones(1)
    state = SimpleNamespace(current=first)
    table = {first: 2.0, second: 3.0}
    fn = wrap(lambda x: curve(x, table[state.current]))
    return [train(fn, vectors(1), between=lambda: setattr(state, "current", second)), state.current is second]


class FailsAtTanh(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.tanh.default:
            raise RuntimeError("stop")
        return func(*args, **(kwargs or {}))


@right
def recomputation_fails_and_backward_is_tried_again(wrap: Wrap) -> Any:
    seen: list[int] = []
    state = SimpleNamespace(step=0)

    def fn(x: Tensor, seen: list[int]) -> Tensor:
        seen.append(1)
        state.step += 1
        return curve(curve(x, len(seen)), state.step)

    (x,) = vectors(1)
    loss = wrap(fn)(x, seen).square().sum()
    with contextlib.suppress(RuntimeError), FailsAtTanh():
        loss.backward(retain_graph=True)
    between = [list(seen), state.step]
    x.grad = None
    loss.backward()
    return [x.grad, seen, state.step, between]
