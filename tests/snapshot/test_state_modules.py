"""Modules: state made or written in the forward, results that they store, and hooks and gradients inside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from state_programs import (
    Holding,
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
    with_module,
)
from torch import Tensor, nn
from torch.func import functional_call

from reactivate import policies

PROGRAMS = Programs()
right, right_by, right_with, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with, PROGRAMS.loud


@pytest.mark.parametrize("program", PROGRAMS.listed, ids=str)
def test_program(program: Program) -> None:
    check_program(program)


# -- state made in the first forward ------------------------------------------------------------------------------------


def made_in_the_first_forward(wrap: Wrap, make: Callable[[], nn.Module]) -> Any:
    """The optimizer is made after the first forward and trains what that made."""
    module = make()
    checkpointed = wrap(module)
    first, *others = inputs(4)
    out = checkpointed(first)
    made = dict(module.named_parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: list[Any] = []
    for x in [*others, None]:
        backward(out)
        found.append({name: parameter.grad for name, parameter in made.items()})
        optimizer.step()
        optimizer.zero_grad()
        if x is not None:
            out = checkpointed(x)
    same = [made[name] is parameter for name, parameter in module.named_parameters()]
    return [found, same, state_of(module), [x.grad for x in [first, *others]]]


@right_by(made_in_the_first_forward)
class ChildIsMadeInTheFirstForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "proj"):
            self.proj = nn.Linear(x.shape[-1], 4)
        return curve(self.proj(x), 2)


@right_by(made_in_the_first_forward)
class ParameterIsMadeInTheFirstForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(torch.randn(x.shape[-1], 4))
        return curve(x @ self.weight, 2)


@right_by(made_in_the_first_forward)
class RegisteredNoneIsSetInTheFirstForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("w", None)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.w is None:
            self.w = nn.Parameter(torch.randn(x.shape[-1], 4))
            self.mean = x.detach().mean(0)
        return curve((x - self.mean) @ self.w, 2)


@right_by(made_in_the_first_forward)
class ParameterListGrowsInTheFirstForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList()

    def forward(self, x: Tensor) -> Tensor:
        if len(self.weights) < 2:
            self.weights.append(nn.Parameter(torch.randn(4, 4)))
            self.weights.append(nn.Parameter(torch.randn(4, 4)))
        for weight in self.weights:
            x = curve(x @ weight, 2)
        return x


@right_by(made_in_the_first_forward)
class ModuleDictGrowsInTheFirstForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        if "a" not in self.heads:
            self.heads["a"] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return curve(self.heads["a"](x), 2)


@right_by(made_in_the_first_forward)
class ChildReplacesItselfInTheFirstForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.proj, nn.Identity):
            self.proj = nn.Linear(4, 4)
        return curve(self.proj(x), 2)


PROGRAMS.rows(
    made_in_the_first_forward,
    {
        "lazy_linear": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3)),),
        "lazy_batch_norm": (lambda: nn.Sequential(nn.Tanh(), nn.LazyBatchNorm1d(), nn.Linear(4, 4)),),
    },
)


@right_by(made_in_the_first_forward)
def lazy_convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LazyConv1d(3, 1), nn.Tanh(), nn.Flatten())


@right
def lazy_child_behind_several_regions(wrap: Wrap) -> Any:
    model = nn.ModuleList([nn.LazyLinear(4), nn.Linear(4, 4), nn.LazyLinear(4)])
    regions = [wrap(layer) for layer in model]

    def step(x: Tensor) -> Tensor:
        for region in regions:
            x = curve(region(x), 2)
        return x

    return [train(step, inputs()), state_of(model)]


@right
def weight_is_initialised_from_the_first_batch(wrap: Wrap) -> Any:
    """Data-dependent initialisation, as in ActNorm: parameters are written in the first forward."""

    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
            self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                with torch.no_grad():
                    self.scale.copy_(1 / x.std(0))
                    self.shift.copy_(-x.mean(0))
                    self.ready.fill_(True)
            return curve((x + self.shift) * self.scale, 2)

    return made_in_the_first_forward(wrap, lambda: nn.Sequential(nn.Linear(4, 4), ActNorm(), nn.Tanh()))


@right_by(made_in_the_first_forward)
class WeightIsInitialisedFromDataThroughData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(4)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.scale.data = 1 / x.detach().std(0)
            self.ready = True
        return curve(x * self.scale, 2)


# -- parameters written in the forward ----------------------------------------------------------------------------------


@right_by(made_in_the_first_forward)
class WeightIsProjectedInTheForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True).clamp_min(1))
        return curve(x @ self.weight, 2)


@right_by(with_module, lambda: nn.Linear(4, 4))
def weight_is_clamped_in_the_forward(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.weight.clamp_(-0.3, 0.3)
    return curve(layer(x), 2)


@loud
def weight_is_replaced_through_data_in_the_forward(wrap: Wrap) -> Any:
    layer = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        layer.weight.data = layer.weight.data * 0.9
        return curve(layer(x), 2)

    return [train(wrap(fn), inputs()), state_of(layer)]


@right
def embedding_with_max_norm(wrap: Wrap) -> Any:
    class Embed(Holding):
        def forward(self, index: Tensor) -> Tensor:
            return curve(self.proj(self.table(index)), 2)

    module = Embed(table=nn.Embedding(1000, 8, max_norm=1.0), proj=nn.Linear(8, 4))
    checkpointed = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        backward(checkpointed(torch.randint(0, 1000, (400,))))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(module)


@right
def functional_embedding_with_max_norm(wrap: Wrap) -> Any:
    table = nn.Parameter(torch.randn(50, 8))
    checkpointed = wrap(lambda x, index: curve(F.embedding(index, table, max_norm=1.0)[:, :4] + x, 2))
    return [train(lambda x: checkpointed(x, torch.randint(0, 50, (6,))), inputs()), table, table.grad]


class Renormed(nn.Module):
    """A table of which every forward renormalises rows that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return curve(x + self.table(torch.tensor([0, 2, 2])).sum(0), 2)


@right
def rows_are_renormalised_once_more_outside_of_the_region(wrap: Wrap) -> Any:
    module = Renormed()
    x = leaf(6, 4)
    backward(module(wrap(module)(x)))
    return [x.grad, state_of(module)]


@right_with(recomputations=3)
def rows_are_renormalised_in_interleaved_microbatches(wrap: Wrap) -> Any:
    module = Renormed()
    first, second = wrap(module)(leaf(6, 4)), wrap(module)(leaf(6, 4))
    backward(first)
    third = wrap(module)(leaf(6, 4))
    backward(second, third)
    return state_of(module)


@right_with(recomputations=3)
def rows_are_renormalised_and_stepped_by_a_fused_optimizer(wrap: Wrap) -> Any:
    module = Renormed()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, fused=True)
    for _ in range(3):
        backward(wrap(module)(leaf(6, 4)))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(module)


@right
def rows_are_renormalised_where_values_are_compared(wrap: Wrap) -> Any:
    module = Renormed()
    return [train(wrap(module, check="every"), inputs()), state_of(module)]


@right_by(with_module, lambda: nn.Linear(4, 4), check="every")
def weight_is_clamped_through_data_where_values_are_compared(layer: nn.Module, x: Tensor) -> Tensor:
    layer.weight.data = layer.weight.data.clamp(-0.2, 0.2)
    return curve(layer(x), 2)


def of_a_halved_argument(
    wrap: Wrap, finish: Callable[[Tensor], Tensor], check: Any = "first", policy: Any = None
) -> Any:
    """Halve an argument that requires a gradient, of which there is no copy, and add it."""
    layer = nn.Linear(4, 4)

    def fn(x: Tensor, given: Tensor) -> Tensor:
        given.mul_(0.5)
        return finish(layer(x).sin() + given)

    def step(x: Tensor) -> Tensor:
        return wrap(fn, check=check, policy=policy)(x, x * 1.0)  # type: ignore[no-any-return]

    return [train(step, inputs()), state_of(layer)]


PROGRAMS.rows(
    of_a_halved_argument,
    {
        "halved_argument_is_only_added_to_the_output": (lambda h: h,),
        "halved_argument_is_only_added_to_the_output_where_values_are_compared": (lambda h: h, "every"),
    },
)


@loud
def halved_argument_is_read_by_a_saved_call(wrap: Wrap) -> Any:
    """The call's result is kept, so that the output does not show what the call has read."""
    other = nn.Linear(4, 4)
    return of_a_halved_argument(wrap, lambda h: other(h).tanh(), policy=policies.save_ops("linear"))


@right_with(recomputations=2)
def halved_default_is_recomputed_twice(wrap: Wrap) -> Any:
    """A default is the caller's tensor, which each recomputation halves again and gives back as it was."""
    layer, x = nn.Linear(4, 4), leaf(6, 4)
    given = x * 1.0

    def fn(y: Tensor = x, given: Tensor = given) -> Tensor:
        given.mul_(0.5)
        return layer(y).sin() + given

    out = wrap(fn)()
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    backward(gradient)
    return [gradient, x.grad, given, state_of(layer)]


@right
def zeroed_default_is_saved(wrap: Wrap) -> Any:
    def step(x: Tensor) -> Tensor:
        def fn(y: Tensor = x, given: Tensor = x * 1.0) -> Tensor:
            given.zero_()
            return y.sin() + given.sin()

        return wrap(fn)()  # type: ignore[no-any-return]

    return train(step, inputs())


@right
def rows_are_renormalised_by_two_regions_with_saved_calls_in_a_region(wrap: Wrap) -> Any:
    module, layer = Renormed(), nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        return module(layer(x).sin())  # type: ignore[no-any-return]

    def both(x: Tensor) -> Tensor:
        for _ in range(2):
            x = wrap(block, policy=policies.save_ops("linear"))(x)
        return x

    return [train(wrap(both), inputs()), state_of(module), state_of(layer)]


@right
def weight_was_cast_by_autocast_before_two_regions_in_each_other(wrap: Wrap) -> Any:
    """The outer one casts anew, and the inner one keeps as much."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def both(x: Tensor) -> Tensor:
        return wrap(module, policy=policies.save_modules("0"))(x)  # type: ignore[no-any-return]

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return wrap(both)(module(x)).float()  # type: ignore[no-any-return]

    return [train(step, inputs()), state_of(module)]


@right
def input_that_outer_hooks_copied_is_written_before_backward(wrap: Wrap) -> Any:
    """The plain model reads the copy."""
    layer, x = nn.Linear(4, 4), leaf(6, 4)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda copy: copy):
        out = wrap(lambda y: layer(y).sin(), policy=policies.save_ops("linear"))(x)
    x.detach().mul_(2)
    backward(out)
    return [x.grad, state_of(layer)]


@loud
def argument_is_turned_around(wrap: Wrap) -> Any:
    """Saved tensors have the same numbers in another order."""

    def fn(x: Tensor, given: Tensor) -> Tensor:
        given.copy_(given.detach().flip(0))
        return given * given.detach() + x.sin()

    return train(lambda x: wrap(fn)(x, x * 1.0), inputs())


@right
def hook_of_a_plain_module_counts_in_its_closure(wrap: Wrap) -> Any:
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * calls[0]

    model[0].register_forward_hook(hook)
    return [train(wrap(model), inputs()), calls]


# -- results stored in attributes ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer that stores a loss of its own, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.softmax(self.linear(x), -1)
        self.aux = gate.square().sum() * 0.1
        return curve(x, gate)


@right
def loss_in_an_attribute_joins_the_total(wrap: Wrap) -> Any:
    module = Experts()
    checkpointed = wrap(module)
    found = []
    for x in inputs():
        out = checkpointed(x)
        aux = module.aux
        (out.square().sum() + aux).backward()
        found += [x.grad, module.aux is aux, aux, module.aux.grad_fn is not None]
    return [found, gradients(module)]


@right
def losses_of_several_layers_join_the_total(wrap: Wrap) -> Any:
    layers = nn.ModuleList([Experts() for _ in range(4)])
    regions = [wrap(layer) for layer in layers]
    found = []
    for x in inputs():
        h = x
        for region in regions:
            h = region(h)
        stored = [layer.aux for layer in layers]
        (h.square().sum() + sum(stored)).backward()
        found += [x.grad, [layer.aux is aux for layer, aux in zip(layers, stored, strict=True)]]
    return [found, gradients(layers)]


@right
def loss_in_an_attribute_has_its_own_backward(wrap: Wrap) -> Any:
    module = Experts()
    checkpointed = wrap(module)
    found = []
    for x in inputs():
        out = checkpointed(x)
        module.aux.backward(retain_graph=True)
        backward(out)
        found += [x.grad, module.aux]
    return [found, gradients(module)]


@right
def loss_in_an_attribute_is_dropped_before_the_backwards(wrap: Wrap) -> Any:
    """The second forward found the loss of the first, which is gone by then: nothing is not what is gone."""
    module = Experts()
    checkpointed = wrap(module)
    xs = inputs(2)
    totals = []
    for x in xs:
        out = checkpointed(x)
        totals.append(out.square().sum() + module.aux)
    module.aux = None
    found: list[Any] = []
    while totals:
        totals.pop().backward()
        found.append(module.aux)
    return [found, [x.grad for x in xs], gradients(module)]


@right
def losses_are_appended_to_a_list(wrap: Wrap) -> Any:
    class Model(Holding):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = curve(layer(x), 2)
                self.losses.append(x.mean())
            return x

    module = Model(layers=nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), losses=[])
    checkpointed = wrap(module)
    found = []
    for x in inputs():
        out = checkpointed(x)
        stored = list(module.losses)
        (out.square().sum() + sum(stored)).backward()
        found += [x.grad, [one is other for one, other in zip(stored, module.losses, strict=True)]]
        module.losses.clear()
    return [found, gradients(module)]


@right
def attention_map_is_stored_and_read_after_backward(wrap: Wrap) -> Any:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = torch.softmax(x @ x.T, -1)
            self.last = weights
            self.detached = weights.detach()
            return curve(weights @ x, 2)

    module = Attention()
    checkpointed = wrap(module)
    found = []
    for x in inputs():
        out = checkpointed(x)
        before = (module.last, module.detached)
        backward(out)
        found += [x.grad, module.last is before[0], module.detached is before[1], module.last, module.detached]
    return found


@right
def stored_result_has_another_shape_than_the_one_before(wrap: Wrap) -> Any:
    """Early stop ends the recomputation before it stores its own."""

    class Features(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.feat = x.tanh()
            return self.feat

    module = Features(feat=torch.zeros(6, 4))
    checkpointed = wrap(module)
    found = []
    for rows in (4, 6, 4, 2, 2):
        x = leaf(rows, 4)
        out = checkpointed(x)
        backward(out)
        found += [x.grad, module.feat is out, module.feat]
    return found


@right
def state_is_restarted_at_another_batch_size(wrap: Wrap) -> Any:
    """A recurrent cell that keeps its state, and trains on the next batch from where the backward left it."""

    class Cell(Holding):
        def forward(self, x: Tensor) -> Tensor:
            if len(self.hidden) != len(x):
                self.hidden = torch.zeros(len(x), 4)
            self.hidden = self.cell(x, self.hidden.detach())
            return self.hidden

    module = Cell(cell=nn.GRUCell(4, 4), hidden=torch.zeros(6, 4))
    checkpointed = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for rows in (6, 6, 4, 4, 4, 6, 6):
        loss = checkpointed(leaf(rows, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss, module.hidden]
    return [losses, state_of(module)]


@right_with(recomputations=6)
def memory_grows_with_each_of_several_calls(wrap: Wrap) -> Any:
    """Each recomputation reads the memory of its own call, which has another shape."""

    class Memory(Holding):
        def forward(self, x: Tensor) -> Tensor:
            out = curve(self.layer(x), self.memory.sum(0))
            self.memory = torch.cat([self.memory, out[:2]])
            return out

    module = Memory(layer=nn.Linear(4, 4), memory=torch.zeros(1, 4))
    checkpointed, xs = wrap(module, check="metadata"), inputs(6)
    for calls in (xs[:3], xs[3:]):
        backward(*map(checkpointed, calls))
        module.memory = module.memory.detach()
    return [[x.grad for x in xs], module.memory, state_of(module)]


@right
def weight_of_another_shape_stands_in_for_the_forward(wrap: Wrap) -> Any:
    layer, wide = nn.Linear(4, 4), leaf(8, 4)

    def step(x: Tensor) -> Tensor:
        weights = {"weight": wide * 2, "bias": torch.zeros(8)}
        return functional_call(layer, weights, (x,)).sin()

    layer.forward = wrap(layer.forward)  # type: ignore[method-assign]
    return [train(step, inputs()), wide.grad, state_of(layer)]


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


@right_with(recomputations=20)
def twenty_nested_regions(wrap: Wrap) -> Any:
    return nested_to_the_depth(wrap, 20)


@right_with(recomputations=100)
def a_hundred_nested_regions(wrap: Wrap) -> Any:
    """At Python's own recursion limit."""
    return nested_to_the_depth(wrap, 100)


@right_with(recomputations=200)
def two_hundred_nested_regions(wrap: Wrap) -> Any:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return recursive_to_the_depth(wrap, 200)
    finally:
        sys.setrecursionlimit(limit)


def recursive_to_the_depth(wrap: Wrap, depth: int) -> Any:
    weight = leaf(4)

    def fn(x: Tensor, depth: int) -> Tensor:
        return wrap(fn)(x, depth - 1) * weight.sin() if depth > 1 else curve(x, 0.1)

    (x,) = inputs(1)
    backward(wrap(fn)(x, depth))
    return [x.grad, weight.grad]


def nested_to_the_depth(wrap: Wrap, depth: int) -> Any:
    weight = leaf(4)
    fn: Callable[[Tensor], Tensor] = wrap(lambda x: curve(x, 0.1))
    for _ in range(depth - 1):

        def outer(x: Tensor, fn: Callable[[Tensor], Tensor] = fn) -> Tensor:
            return fn(x) * weight.sin()

        fn = wrap(outer)
    (x,) = inputs(1)
    backward(fn(x))
    return [x.grad, weight.grad]


@right_with(recomputations=20)
def regions_of_twenty_blocks_over_one_model(wrap: Wrap) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(20)])
            self.register_buffer("steps", torch.zeros(1, 1))

        def step(self, index: int, x: Tensor) -> Tensor:
            self.steps.add_(1)
            return curve(self.blocks[index](x), 1 + self.steps.clone())

    model = Model()
    step = wrap(model.step)

    def forward(x: Tensor) -> Tensor:
        for index in range(len(model.blocks)):
            x = step(index, x)
        return x * 0.1

    return [train(forward, inputs(2)), state_of(model)]


# -- attributes of torch's own modules ------------------------------------------------------------------------------------


def changed_before_the_backward(wrap: Wrap, module: nn.Module, change: Callable[[int], Any], *shape: int) -> Any:
    """Two microbatches for each change."""
    found: list[Any] = []
    for step in range(4):
        microbatches = [leaf(*(shape or (6, 4))) for _ in range(2)]
        outputs = [wrap(module)(x) for x in microbatches]
        parameters = list(module.parameters())
        change(step)
        backward(*(out[0] if isinstance(out, tuple) else out for out in outputs))
        found.append([outputs, [x.grad for x in microbatches], [item.grad for item in parameters], state_of(module)])
        module.zero_grad()
    return found


def tensor_in_an_attribute(wrap: Wrap, make: Callable[[], nn.Module], name: str) -> Any:
    module, value = make(), torch.tensor(0.1)
    setattr(module, name, value)
    model = nn.Sequential(nn.Linear(4, 4), module, nn.Tanh())
    return [changed_before_the_backward(wrap, model, lambda step: value.add_(0.1)), value]


PROGRAMS.rows(
    tensor_in_an_attribute,
    {
        "slope_of_a_leaky_relu_is_a_tensor": (nn.LeakyReLU, "negative_slope"),
        "epsilon_of_a_layer_norm_is_a_tensor": (lambda: nn.LayerNorm(4), "eps"),
        "momentum_of_a_batch_norm_is_a_tensor": (lambda: nn.BatchNorm1d(4), "momentum"),
    },
    recomputations=8,
)


@right_with(recomputations=8)
def slope_is_a_tensor_in_a_large_tree(wrap: Wrap) -> Any:
    activation = nn.LeakyReLU()
    activation.negative_slope = value = torch.tensor(0.1)  # type: ignore[assignment]
    model = nn.Sequential(nn.Linear(4, 4), activation, *(nn.Tanh() for _ in range(80)))
    return changed_before_the_backward(wrap, model, lambda step: value.add_(0.1))


@right_with(recomputations=8)
def slope_becomes_a_tensor(wrap: Wrap) -> Any:
    activation = nn.LeakyReLU()
    model = nn.Sequential(nn.Linear(4, 4), activation, nn.Tanh())

    def change(step: int) -> None:
        if step == 1:
            activation.negative_slope = torch.tensor(0.3)  # type: ignore[assignment]
        else:
            activation.negative_slope += 0.2

    return changed_before_the_backward(wrap, model, change)


@right_with(recomputations=8)
def activation_of_a_transformer_layer_has_state(wrap: Wrap) -> Any:
    factor = [1.0]
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, activation=lambda x: (x * factor[0]).tanh())

    def change(step: int) -> None:
        factor[0] += 0.5

    return changed_before_the_backward(wrap, layer, change)


@right_with(recomputations=8)
def weight_of_an_lstm_is_replaced(wrap: Wrap) -> Any:
    module = nn.LSTM(4, 4, 2, dropout=0.1)
    change = lambda step: setattr(module, "weight_hh_l0", nn.Parameter(torch.randn(16, 4)))  # noqa: E731
    return [changed_before_the_backward(wrap, module, change, 3, 2, 4), module._flat_weights]


@right_with(recomputations=8)
def weight_of_a_gru_inside_is_replaced(wrap: Wrap) -> Any:
    gru = nn.GRU(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), gru)
    change = lambda step: setattr(gru, "weight_ih_l0", nn.Parameter(torch.randn(12, 4)))  # noqa: E731
    return changed_before_the_backward(wrap, model, change, 3, 2, 4)


# -- parameters under another name ------------------------------------------------------------------------------------------


class Renamed(Holding):
    """A parameter's effect depends on its name, and on its place among the parameters."""

    def rename(self, step: int) -> None:
        old, new = ("one", "last") if hasattr(self, "one") else ("last", "one")
        parameter = getattr(self, old)
        delattr(self, old)
        setattr(self, new, parameter)

    def forward(self, x: Tensor) -> Tensor:
        for name, parameter in self.named_parameters():
            x = curve(x * parameter, len(name))
        return x


@right_with(recomputations=8)
def parameter_is_renamed_before_the_backward(wrap: Wrap) -> Any:
    module = Renamed(one=nn.Parameter(torch.randn(4)), other=nn.Parameter(torch.randn(4)))
    return changed_before_the_backward(wrap, module, module.rename)


def swapped_before_the_backward(wrap: Wrap, name: str, has_bias: bool) -> Any:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=has_bias)

    def change(step: int) -> None:
        one, other = getattr(first, name), getattr(second, name)
        setattr(first, name, other)
        setattr(second, name, one)

    return changed_before_the_backward(wrap, nn.Sequential(first, nn.Tanh(), second, nn.Tanh()), change)


PROGRAMS.rows(
    swapped_before_the_backward,
    {
        "parameters_change_places_before_the_backward": ("weight", True),
        "parameter_moves_to_another_module_before_the_backward": ("bias", False),
    },
    recomputations=8,
)
