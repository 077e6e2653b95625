"""Identity: the recomputation sees the very functions, keys and tensors of the forward."""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from state_programs import Holding, Programs, Wrap, backward, curve, gradients, leaf, train, vectors, with_changes
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right = PROGRAMS.right


# -- functions ----------------------------------------------------------------------------------------------------------


@right
def forward_compares_itself_with_the_forward_of_its_type(wrap: Wrap) -> Any:
    class Layer(nn.Module):
        pass

    weight, options = leaf(4), {"width": 4}

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return curve(x * weight, 2 if type(self).forward is forward and options else 3)

    Layer.forward = forward
    return [train(wrap(Layer()), vectors()), weight.grad]


@right
def decorated_forward_compares_itself_with_the_forward_of_its_type(wrap: Wrap) -> Any:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    def decorated(original: Callable[..., Any], weight: Tensor) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return curve(original(self, x) * weight, 2 if type(self).forward is forward else 3)

        return forward

    weight = leaf(4)
    Layer.forward = decorated(Layer.forward, weight)
    layer = Layer()
    return [train(wrap(functools.partial(Layer.forward, layer)), vectors()), weight.grad]


@right
def bound_method_compares_its_function_with_that_of_the_type(wrap: Wrap) -> Any:
    class Block:
        def step(self, x: Tensor) -> Tensor:
            return curve(x, 2 if self.step.__func__ is Block.step else 3)

    return train(wrap(Block().step), vectors())


@right
def closure_compares_itself_with_a_table(wrap: Wrap) -> Any:
    table: dict[Callable[..., Any], float] = {}

    def make(factor: float) -> Callable[..., Any]:
        def fn(x: Tensor) -> Tensor:
            return curve(x, table.get(fn, 9.0) + factor)

        table[fn] = factor
        return fn

    return train(wrap(make(2.0)), vectors())


@right
def function_argument_is_compared_with_is(wrap: Wrap) -> Any:
    weight = leaf(4)

    def gelu(x: Tensor) -> Tensor:
        return x * weight

    return train(wrap(lambda x, act: curve(act(x), 2 if act is gelu else 3)), vectors(), gelu)


@right
def mutable_default_grows(wrap: Wrap) -> Any:
    def fn(x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(len(seen))
        return curve(x, 1 + len(seen))

    return [train(wrap(fn), vectors(3)), fn.__defaults__]


@right
def defaults_are_replaced_before_backward(wrap: Wrap) -> Any:
    def fn(x: Tensor, factor: float = 2.0) -> Tensor:
        return curve(x, factor)

    (x,) = vectors(1)
    out = wrap(fn)(x)
    fn.__defaults__ = (3.0,)
    backward(out)
    return [x.grad, fn.__defaults__]


@right
def function_attribute_counts_calls(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        fn.calls += 1
        return curve(x, fn.calls)

    fn.calls = 0
    return [train(wrap(fn), vectors(3)), fn.calls]


@right
def nonlocal_counter(wrap: Wrap) -> Any:
    calls = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return curve(x, calls)

    return [train(wrap(fn), vectors(3)), calls]


@right
def two_functions_share_a_cell(wrap: Wrap) -> Any:
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return curve(x, calls)

    first, second = wrap(count), wrap(lambda x: curve(x, 1 + calls))
    leaves = vectors(3)
    backward(*[second(first(x)) for x in leaves])
    return [[x.grad for x in leaves], calls]


@right
def loop_variable_is_bound_late(wrap: Wrap) -> Any:
    (x,) = vectors(1)
    outputs = []
    for factor in (1.0, 2.0, 3.0):
        outputs.append(wrap(lambda x: curve(x, factor))(x))
    backward(*outputs)
    return x.grad


@right
def partial_with_a_list_that_grows(wrap: Wrap) -> Any:
    seen: list[int] = []

    def fn(seen: list[int], x: Tensor) -> Tensor:
        seen.append(1)
        return curve(x, len(seen))

    return [train(wrap(functools.partial(fn, seen)), vectors(3)), seen]


class Step:
    calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return curve(x, self.calls)


class SlottedStep:
    __slots__ = ("calls",)
    __call__ = Step.__call__

    def __init__(self) -> None:
        self.calls = 0


def counting(wrap: Wrap, make: Callable[[], Any]) -> Any:
    step = make()
    return [train(wrap(step), vectors(3)), step.calls]


PROGRAMS.rows(counting, {"callable_object_counts_calls": (Step,), "callable_with_slots_counts_calls": (SlottedStep,)})


# -- keys ---------------------------------------------------------------------------------------------------------------


@right
def object_is_a_key(wrap: Wrap) -> Any:
    class Token:
        pass

    token, table = Token(), {}
    table[token] = 2.0
    return train(wrap(lambda x, given: curve(x, table.get(given, 3.0))), vectors(), token)


@right
def object_is_a_weak_key(wrap: Wrap) -> Any:
    class Token:
        weight = 1

    token = Token()
    table: weakref.WeakKeyDictionary[Token, float] = weakref.WeakKeyDictionary({token: 2.0})

    def fn(x: Tensor, given: Token) -> Tensor:
        table[given] = table.get(given, 5.0) + 1
        return curve(x, table[given])

    return [train(wrap(fn), vectors(3), token), table[token], len(table)]


@right
def tensor_argument_is_a_key(wrap: Wrap) -> Any:
    checkpointed = wrap(lambda x, table: curve(x, table.get(x, 3.0)))
    return train(lambda x: checkpointed(x, {x: 2.0}), vectors())


@right
def float_vector_argument_is_found_by_its_id(wrap: Wrap) -> Any:
    """A one-dimensional tensor that needs no gradient, as rotary tables and masks are."""
    table: dict[int, float] = {}

    def fn(x: Tensor, frequencies: Tensor) -> Tensor:
        return curve(x * frequencies, table.get(id(frequencies), 3.0))

    frequencies = torch.rand(4)
    table[id(frequencies)] = 2.0
    return train(wrap(fn), vectors(), frequencies)


@right
def parameter_is_found_by_its_id(wrap: Wrap) -> Any:
    layer = nn.Linear(4, 4)
    table = {id(parameter): 1.0 + index for index, parameter in enumerate(layer.parameters())}

    def fn(x: Tensor) -> Tensor:
        return curve(layer(x), sum(table.get(id(parameter), 9.0) for parameter in layer.parameters()))

    return [train(wrap(fn), vectors()), gradients(layer)]


@right
def tensor_is_a_weak_key(wrap: Wrap) -> Any:
    frequencies = torch.rand(4)
    scales, versions = WeakTensorKeyDictionary(), WeakIdKeyDictionary()
    scales[frequencies] = 2.0
    versions[frequencies] = 5.0

    def fn(x: Tensor, given: Tensor) -> Tensor:
        return curve(x, scales.get(given, 3.0) + versions.get(given, 1.0))

    return train(wrap(fn), vectors(), frequencies)


@right
def weak_reference_argument(wrap: Wrap) -> Any:
    weight = leaf(4)
    checkpointed = wrap(lambda x, reference: curve(x * reference(), 2 if reference() is weight else 3))
    return [train(lambda x: checkpointed(x, weakref.ref(weight)), vectors()), weight.grad]


@right
def tensors_of_a_set_are_looked_up(wrap: Wrap) -> Any:
    weights = [leaf(4), leaf(4)]
    frozen = {weights[0]}

    def fn(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            x = curve(x * weight, 2 if weight in frozen else 3)
        return x

    return [train(wrap(fn), vectors(), weights), [weight.grad for weight in weights]]


# -- tensors with Python attributes -------------------------------------------------------------------------------------


@right
def argument_has_an_attribute(wrap: Wrap) -> Any:
    leaves = vectors()
    for x in leaves:
        x.factor = 2.0
    return train(wrap(lambda x: curve(x, getattr(x, "factor", 3.0))), leaves)


@right
def intermediate_argument_has_an_attribute(wrap: Wrap) -> Any:
    def fn(h: Tensor, others: list[Tensor]) -> Tensor:
        return curve(h * others[0], getattr(h, "factor", 3.0) + getattr(others[0], "factor", 3.0))

    checkpointed = wrap(fn)

    def step(x: Tensor) -> Tensor:
        h, other = x.sin(), x.cos()
        h.factor = other.factor = 2.0
        return checkpointed(h, [other])

    return train(step, vectors())


@right
def captured_tensor_has_an_attribute_that_the_function_changes(wrap: Wrap) -> Any:
    weight = leaf(4)
    weight.calls = 0

    def fn(x: Tensor) -> Tensor:
        weight.calls += 1
        return curve(x * weight, weight.calls)

    return [train(wrap(fn), vectors(3)), weight.calls, weight.grad]


@right
def parameter_attribute_is_set_on_first_use(wrap: Wrap) -> Any:
    layer = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        first = not hasattr(layer.weight, "seen")
        layer.weight.seen = True
        return curve(layer(x), 2 if first else 3)

    return [train(wrap(fn), vectors()), layer.weight.seen, gradients(layer)]


@right
def argument_attribute_is_set_by_the_function(wrap: Wrap) -> Any:
    def fn(x: Tensor) -> Tensor:
        x.calls = getattr(x, "calls", 0) + 1
        return curve(x, x.calls)

    leaves = vectors()
    return [train(wrap(fn), leaves), [x.calls for x in leaves]]


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
    return with_changes(wrap, module, lambda _: None, lambda: list(module.counts))


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

    return with_changes(wrap, module, change, lambda: (module.buf.tag, module.plain.tag, dict(vars(module.buf))))


@right
def attributes_of_buffers_are_changed_that_had_none(wrap: Wrap) -> Any:
    module = Tagged()
    del module.buf.tag, module.plain.tag
    fn = lambda x: curve(x * module.buf, getattr(module.buf, "tag", 2.0))  # noqa: E731

    def change(step: int) -> None:
        module.buf.tag = step + 3.0

    return with_changes(wrap, fn, change, lambda: module.buf.tag)


@right
def attributes_of_closed_over_tensors_are_changed(wrap: Wrap) -> Any:
    table, weight = torch.ones(4), leaf(4)
    table.tag, weight.tag = 2.0, 1.0  # type: ignore[attr-defined]

    def fn(x: Tensor) -> Tensor:
        return curve(curve(x * table, table.tag), weight.tag) * weight  # type: ignore[attr-defined]

    def change(step: int) -> None:
        table.tag += step + 1  # type: ignore[attr-defined]
        weight.tag += 1  # type: ignore[attr-defined]

    return [with_changes(wrap, fn, change, lambda: (table.tag, weight.tag)), weight.grad]  # type: ignore[attr-defined]
