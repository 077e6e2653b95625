"""Modules: state made or written in the forward, results that they store, and hooks and gradients inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from state_programs import Holding, Programs, Wrap, backward, curve, inputs, leaf, state_of, train, with_module
from torch import Tensor, nn

from reactivate import policies

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_by, right_with, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with, PROGRAMS.loud


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


# -- what hooks hold --------------------------------------------------------------------------------------------------------


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
