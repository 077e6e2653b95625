"""Hooks, and gradients that a region asks for: what hooks hold is rewound, and each fires as often as in the plain model."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from several import each
from state_programs import (
    Program,
    Programs,
    Wrap,
    backward,
    check_program,
    curve,
    gradients,
    inputs,
    leaf,
    state_of,
    train,
    with_changes,
    with_module,
)
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

PROGRAMS = Programs()


test_program = PROGRAMS.test()
right, right_by, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.loud


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


def with_hook(wrap: Wrap, make: Callable[[], Any], hook_of: Callable[[Any], Any], count: Callable[[Any], int]) -> Any:
    model, counts = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), make()
    model[0].register_forward_hook(hook_of(counts))
    return with_changes(wrap, model, lambda step: None, lambda: count(counts))


PROGRAMS.rows(
    with_hook,
    {
        "hook_is_a_bound_method": (Counts, lambda counts: counts.scale, lambda counts: counts.calls),
        "hook_is_an_object": (Counts, lambda counts: counts, lambda counts: counts.calls),
        "hook_is_a_partial": (
            lambda: {"calls": 0},
            lambda counts: functools.partial(scale_by, counts),
            lambda counts: counts["calls"],
        ),
    },
)


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
        return [with_changes(wrap, model, change, hooks_on_all), state_of(model)]
    finally:
        for handle in handles:
            handle.remove()


def hooks_on_all() -> Any:
    registries = nn.modules.module
    return len(registries._global_forward_hooks), len(registries._global_forward_pre_hooks)


# -- gradients inside ---------------------------------------------------------------------------------------------------


@right_by(with_module, lambda: nn.Linear(4, 4), show=lambda layer: len(layer.weight._backward_hooks))
def hook_on_a_parameter_is_registered_inside(layer: nn.Module, x: Tensor) -> Tensor:
    """The hook fires once in backward, and the recomputation does not register it again."""
    if not getattr(layer, "hooked", False):
        layer.hooked = True
        layer.weight.register_hook(lambda grad: grad * 2)
    return curve(layer(x), 2)


@right_by(with_module, lambda: nn.Linear(4, 4), show=lambda layer: len(layer.weight._backward_hooks))
def hook_on_a_parameter_is_registered_in_every_call(layer: nn.Module, x: Tensor) -> Tensor:
    layer.weight.register_hook(lambda grad: grad * 1.5)
    return curve(layer(x), 2)


def hooked_inside(wrap: Wrap, on_argument: bool) -> Any:
    calls: list[float] = []

    def fn(x: Tensor) -> Tensor:
        h = curve(x, 2)
        (x if on_argument else h).register_hook(lambda grad: calls.append(float(grad.sum())))
        return curve(h, 3)

    return [train(wrap(fn), inputs()), calls]


PROGRAMS.rows(
    hooked_inside,
    {
        "hook_on_an_intermediate_is_registered_inside": (False,),
        "hook_on_an_argument_is_registered_inside": (True,),
    },
)


@right_by(with_module, lambda: nn.Linear(4, 4))
def backward_into_grad_inside(layer: nn.Module, x: Tensor) -> Tensor:
    """The region runs a backward that adds to `.grad` of a parameter, once."""
    with torch.enable_grad():
        layer(x.detach()).square().sum().backward()
    return curve(layer(x), layer.weight.grad.sum())


@loud
def gradient_is_read_by_the_region(wrap: Wrap) -> Any:
    """The forward reads `.grad`, which the backward of an earlier microbatch changes before the recomputation."""
    layer = nn.Linear(4, 4)
    layer.weight.grad = torch.ones(4, 4)
    checkpointed, leaves = wrap(lambda x: curve(layer(x), layer.weight.grad.sum().clone())), inputs()
    for output in [checkpointed(x) for x in leaves]:
        backward(output)
    return [[x.grad for x in leaves], gradients(layer)]


@right_by(with_module, lambda: nn.Linear(4, 4))
def adaptation_inside(layer: nn.Module, x: Tensor) -> Tensor:
    """One inner gradient step on fast weights, as in meta-learning."""
    loss = F.linear(x, layer.weight).square().mean()
    (grad,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    return curve(F.linear(x, layer.weight - 0.1 * grad), 2)


@right
def two_backwards_inside_of_which_the_second_recomputes_the_first(wrap: Wrap) -> Any:
    scale, layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
    scale.grad = None

    def fn(x: Tensor) -> Tensor:
        h = layer(x).sin()
        (scale.sin() * h.detach()).sum().backward()
        (inner,) = torch.autograd.grad(h.sin().sum(), x, retain_graph=True)
        return h + inner.detach()

    return [train(wrap(fn), inputs()), scale.grad, state_of(layer)]


# -- hooks on unusual inputs, deep nesting ------------------------------------------------------------------------------


@right
def hook_on_a_sparse_input(wrap: Wrap) -> Any:
    calls: list[tuple[int, ...]] = []
    dense = leaf(4, 3)
    index = torch.tensor([[0, 1, 2], [1, 3, 0]])
    checkpointed = wrap(lambda values, sparse: torch.sparse.mm(sparse, dense).tanh() + values.sum())
    values = leaf(3)
    for _ in range(2):
        sparse = torch.sparse_coo_tensor(index, values, (4, 4))
        sparse.register_hook(lambda grad: calls.append(tuple(grad.shape)))
        backward(checkpointed(values, sparse))
    return [values.grad, dense.grad, calls]


@right
def hook_on_a_jagged_input(wrap: Wrap) -> Any:
    calls: list[bool] = []
    parts = [leaf(2, 4), leaf(3, 4)]
    checkpointed = wrap(lambda nested: (nested * 2).tanh().sin().values())
    for _ in range(2):
        nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        nested.register_hook(lambda grad: calls.append(grad.is_nested))
        backward(checkpointed(nested))
    return [[part.grad for part in parts], calls]


@right
def hook_on_a_masked_input(wrap: Wrap) -> Any:
    calls: list[str] = []
    checkpointed = wrap(lambda masked: (masked * 2).sin().exp())
    x = leaf(6)
    masked = torch.masked.masked_tensor(x.detach().clone(), torch.arange(6) % 2 == 0, requires_grad=True)
    masked.register_hook(lambda grad: calls.append(type(grad).__name__))
    checkpointed(masked).sum().backward()
    return [masked.grad.get_data(), masked.grad.get_mask(), calls]


# -- properties and decorators ----------------------------------------------------------------------------------------------


@right
def hook_closes_over_a_tensor_with_a_gradient(wrap: Wrap) -> Any:
    weight, model = leaf(4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, out: out * weight)
    return [with_changes(wrap, model, lambda _: None, lambda: None), weight.grad, state_of(model)]


# -- parts of a module that no forward calls --------------------------------------------------------------------------------


class Registering(nn.Module):
    """Registers hooks of state dicts in its first forward, and in each a buffer that every other state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_ready = nn.Linear(4, 4), False
        self.register_buffer("noted", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.is_ready = True
            self._register_load_state_dict_pre_hook(self.double)
            self.register_state_dict_post_hook(self.halve)
            self.register_load_state_dict_post_hook(lambda module, keys: None)
            self.register_state_dict_pre_hook(lambda module, prefix, keep: None)
        self.register_buffer("noted", self.noted + 1, persistent="noted" in self._non_persistent_buffers_set)
        return self.linear(x).tanh()

    @staticmethod
    def double(state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "linear.weight"] = state[prefix + "linear.weight"] * 2

    @staticmethod
    def halve(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "linear.weight"] = state[prefix + "linear.weight"] / 2


@right
def what_a_forward_changes_for_state_dicts(wrap: Wrap) -> Any:
    module = Registering()

    def counts() -> list[Any]:
        named = vars(module)
        hooks = [name for name in named if "state_dict" in name]
        return [*(len(named[name]) for name in hooks), [*module._non_persistent_buffers_set]]

    return [*with_changes(wrap, module, lambda step: None, counts), *module.state_dict().values()]


class InOrder(nn.Module):
    """Reads attributes and buffers in their order."""

    def __init__(self, registry: type[dict[str, Any]]) -> None:
        super().__init__()
        self.first, self.second = 1.1, 1.7
        self.__dict__["_buffers"] = registry()
        for number, name in enumerate("abc", 1):
            self.register_buffer(name, torch.full((4,), float(number)))

    def forward(self, x: Tensor) -> Tensor:
        for name, value in vars(self).items():
            if name in ("first", "second"):
                x = (x * value).tanh()
        for buffer in self._buffers.values():
            x = (x - buffer).sin()  # type: ignore[operator]
        return x * self.a


def _in_order(wrap: Wrap, before: Callable[[Any], Any], after: Callable[[Any], Any]) -> Any:
    module = InOrder(OrderedDict if before is _reordered else dict)
    before(module)
    x = leaf(3, 4)
    out = wrap(module)(x)
    after(module)
    out.square().sum().backward()
    return [out.detach(), x.grad, *module.state_dict().values(), [*module.state_dict()], [*vars(module)]]


def _nothing(module: Any) -> None:
    pass


def _first_anew(module: Any) -> None:
    value = module.first
    del module.first
    module.first = value


def _buffer_anew(module: Any) -> None:
    value = module.a
    del module.a
    module.register_buffer("a", value)


def _reordered(module: Any) -> None:
    module._buffers.move_to_end("a")


def _noted(module: Any) -> None:
    module.note = 1


@each(
    "before, after",
    [
        *((_nothing, _first_anew), (_nothing, _buffer_anew)),
        *((_reordered, change) for change in (_nothing, _first_anew, _buffer_anew, _reordered, _noted)),
    ],
)
def test_parts_in_another_order(before: Any, after: Any) -> None:
    check_program(Program(functools.partial(_in_order, before=before, after=after), name=after.__name__))
