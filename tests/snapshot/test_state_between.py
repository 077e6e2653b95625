"""Modules that change between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from state_programs import Holding, Programs, Wrap, backward, curve, gradients, inputs, leaf, state_of, train
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import remove_parametrizations

import reactivate

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_by, right_with, loud = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with, PROGRAMS.loud


def test_a_layer_frozen_before_backward_is_named_as_such() -> None:
    """A refusal says that `requires_grad` changed, and not that something was written in place."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    out = reactivate.checkpoint(model)(leaf(6, 4))
    model[2].requires_grad_(False)
    message = ""
    try:
        backward(out)
    except reactivate.errors.ReactivateError as error:
        message = str(error)
    assert not message or "requires_grad" in message


# -- changed between forward and backward -------------------------------------------------------------------------------


def tanh() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def changed_between(
    wrap: Wrap,
    change: Callable[[Any], Any],
    make: Callable[[], Any] = tanh,
    show: Callable[[Any], Any] = lambda model: None,
    steps: int = 2,
) -> Any:
    """Train a model that `change` changes between forward and backward; what `show` shows of it is compared, too."""
    model = make()
    first = dict(model.named_parameters())
    grads = train(wrap(model), inputs(steps), between=lambda: change(model))
    return [grads, state_of(model), [parameter.grad for parameter in first.values()], show(model)]


@right
def forward_hook_is_removed_before_backward(wrap: Wrap) -> Any:
    model = tanh()
    handle = model[0].register_forward_hook(lambda module, args, out: out * 3)
    return changed_between(
        wrap, lambda model: handle.remove(), lambda: model, lambda model: len(model[0]._forward_hooks)
    )


@right_by(changed_between, show=lambda model: len(model[0]._forward_hooks))
def forward_hook_is_added_before_backward(model: Any) -> None:
    model[0].register_forward_hook(lambda module, args, out: out * 3)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))


@right
def hook_removes_itself_in_the_forward(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def once(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        handle.remove()
        return out * 3

    handle = model[0].register_forward_hook(once)
    return [train(wrap(model), inputs()), gradients(model), len(model[0]._forward_hooks)]


@right
def hook_of_a_child_in_a_list_is_removed(wrap: Wrap) -> Any:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    handle = layers[1].register_forward_hook(lambda module, args, out: out * 3)

    def fn(x: Tensor) -> Tensor:
        for layer in layers:
            x = curve(layer(x), 2)
        return x

    return [train(wrap(fn), inputs(1), between=handle.remove), [gradients(layer) for layer in layers]]


@right_by(changed_between, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
def child_is_replaced_before_backward(model: Any) -> None:
    model[0] = nn.Linear(4, 4)
    model[1] = nn.Sigmoid()


@right_by(changed_between, show=len)
def child_is_appended_before_backward(model: Any) -> None:
    model.append(nn.Tanh())


@right_by(changed_between, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid(), nn.Tanh()), len)
def child_is_deleted_before_backward(model: Any) -> None:
    if len(model) > 2:
        del model[2]


@right_by(changed_between)
def parameter_is_replaced_before_backward(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.randn(4, 4))


@right_by(changed_between, lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh()), lambda model: model[1].p)
def dropout_probability_is_changed_before_backward(model: Any) -> None:
    model[1].p += 0.3


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drops = [nn.Dropout(0.2), nn.Dropout(0.3)]
        self.by_name = {"act": SimpleNamespace(drop=nn.Dropout(0.4))}

    def forward(self, x: Tensor) -> Tensor:
        for drop in self.drops:
            x = drop(curve(self.linear(x), 2))
        return self.by_name["act"].drop(x).tanh()


@right_by(changed_between, Drops, lambda model: model.drops[0].training)
def dropout_of_a_plain_list_is_changed_before_backward(model: Any) -> None:
    model.drops[0].eval()
    model.drops[1].p = 0.6
    model.by_name["act"].drop.train(False)


@right
def modules_in_plain_containers_have_buffers(wrap: Wrap) -> Any:
    norms = {"a": [nn.BatchNorm1d(4)], "b": (nn.BatchNorm1d(4, momentum=None),)}

    def fn(x: Tensor) -> Tensor:
        x = curve(norms["a"][0](x), norms["a"][0].running_mean.clone())
        return curve(norms["b"][0](x), norms["b"][0].running_var.clone())

    checkpointed = wrap(fn)
    found = []
    for x in inputs():
        norms["a"][0].train()
        found.append(train(checkpointed, [x], between=norms["a"][0].eval))
    return [found, state_of(norms["a"][0]), state_of(norms["b"][0])]


@right_by(
    changed_between,
    lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh()),
    lambda model: [model.training, model[2].training],
)
def module_goes_to_eval_mode_before_backward(model: Any) -> None:
    model.eval()


@right_by(
    changed_between,
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()).eval(),
    lambda model: model.training,
    steps=4,
)
def module_goes_to_training_mode_before_backward(model: Any) -> None:
    model.train(not model.training)


@right_by(changed_between)
def forward_method_is_replaced_before_backward(model: Any) -> None:
    model[1].forward = torch.sin


@loud
def weight_norm_is_removed_before_backward(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())
    leaves = list(model.parameters())
    found = train(wrap(model), inputs(1), between=lambda: remove_parametrizations(model[0], "weight"))
    return [found, [parameter.grad for parameter in leaves], [name for name, _ in model.named_parameters()]]


@right_by(changed_between, steps=1)
def layer_is_pruned_before_backward(model: Any) -> None:
    prune.random_unstructured(model[0], "weight", 0.5)


@loud
def gradient_is_switched_off_before_backward(wrap: Wrap) -> Any:
    """A layer is frozen after the forward; the graph of the forward still has it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    found = train(wrap(model), inputs(1), between=lambda: model[2].requires_grad_(False))
    return [found, gradients(model), model[2].weight.requires_grad]


@loud
def gradient_is_switched_on_before_backward(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return [train(wrap(model), inputs(1), between=lambda: model[0].requires_grad_(True)), gradients(model)]


class Configured(Holding):
    def forward(self, x: Tensor) -> Tensor:
        return curve(curve(x, self.config.factor), self.config.nested["sizes"][0])


@right_by(
    changed_between,
    lambda: Configured(config=SimpleNamespace(factor=2.0, nested={"sizes": [3.0]})),
    lambda model: [model.config.factor, model.config.nested],
)
def configuration_of_a_module_is_changed_before_backward(model: Any) -> None:
    model.config.factor += 1
    model.config.nested["sizes"][0] += 1


@right
def configuration_is_shared_by_modules_and_counts(wrap: Wrap) -> Any:
    class Layer(nn.Module):
        def __init__(self, config: SimpleNamespace) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: Tensor) -> Tensor:
            self.config.calls += 1
            return curve(x, self.config.calls)

    config = SimpleNamespace(calls=0)
    model = nn.Sequential(Layer(config), Layer(config))
    first, second = wrap(model[0]), wrap(model[1])
    return [train(lambda x: second(first(x)), inputs()), config.calls]


# -- optimizer steps ----------------------------------------------------------------------------------------------------


def with_optimizer(wrap: Wrap, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    checkpointed, optimizer = wrap(model), make(model.parameters())
    found = []
    for x in inputs(4):
        backward(checkpointed(x))
        optimizer.step()
        optimizer.zero_grad()
        found.append(x.grad)
    return [found, state_of(model)]


PROGRAMS.rows(
    with_optimizer,
    {
        "fused_adamw_trains": (lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),),
        "fused_sgd_trains": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),),
    },
)


def stepped_before_backward(wrap: Wrap, fused: bool) -> Any:
    """The optimizer steps between a forward and its backward; the plain backward reads the tanh only."""
    weight = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=fused)
    (x,) = inputs(1)
    out = wrap(lambda x: (x + weight).tanh())(x)
    weight.grad = torch.ones(4)
    optimizer.step()
    weight.grad = None
    backward(out)
    return [x.grad, weight, weight.grad]


@loud
def optimizer_steps_between_forward_and_backward(wrap: Wrap) -> Any:
    return stepped_before_backward(wrap, fused=False)


@loud
def fused_optimizer_steps_between_forward_and_backward(wrap: Wrap) -> Any:
    return stepped_before_backward(wrap, fused=True)


@right
def fused_optimizer_without_gradients_steps_before_backward(wrap: Wrap) -> Any:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)
    return [train(wrap(layer), inputs(1), between=optimizer.step), state_of(layer)]


@loud
def input_is_written_between_forward_and_backward(wrap: Wrap) -> Any:
    shift = torch.ones(4)
    fn = wrap(lambda x, shift: curve(x + shift, 2))
    return [train(fn, inputs(1), shift, between=lambda: shift.mul_(3)), shift]


@loud
def parameter_is_written_through_data_before_backward(wrap: Wrap) -> Any:
    weight = nn.Parameter(torch.randn(4))
    fn = wrap(lambda x: (x + weight).tanh())
    return [train(fn, inputs(1), between=lambda: weight.data.mul_(3)), weight, weight.grad]


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
