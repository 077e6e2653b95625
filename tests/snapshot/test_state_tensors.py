"""Tensor state beside buffers, batch norm, and the kinds of backward that meet changed state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from state_programs import (
    Holding,
    Programs,
    Scale,
    Wrap,
    as_region,
    backward,
    curve,
    gradients,
    inputs,
    leaf,
    state_of,
    train,
    with_module,
)
from torch import Tensor, nn

from reactivate import policies

PROGRAMS = Programs()
test_program = PROGRAMS.test()
right, right_by, right_with = PROGRAMS.right, PROGRAMS.right_by, PROGRAMS.right_with


# -- tensors outside of modules -----------------------------------------------------------------------------------------


def written(x: Tensor, amax: Tensor) -> Tensor:
    """Read a tensor, write to it and read it again."""
    out = curve(x, amax.clone())
    with torch.no_grad():
        amax.mul_(0.5).add_(x.amax(0))
    return curve(out, amax.clone())


def in_plain_container(wrap: Wrap, place: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> Any:
    state = place(torch.ones(1, 4))
    return [train(wrap(lambda x: written(x, read(state))), inputs()), read(state)]


PROGRAMS.rows(
    in_plain_container,
    {
        "state_in_a_captured_tensor": (lambda tensor: tensor, lambda state: state),
        "state_in_a_list": (lambda tensor: [tensor], lambda state: state[0]),
        "state_in_a_dict_of_an_object": (
            lambda tensor: SimpleNamespace(stats={"amax": tensor}),
            lambda state: state.stats["amax"],
        ),
    },
)


@right_by(
    as_region,
    show=lambda module: [module.means, module.peaks],
    means=lambda: [torch.ones(1, 4) for _ in range(2)],
    peaks=lambda: {"amax": torch.ones(1, 4)},
)
class StateInAListOfAModule(Holding):
    def forward(self, x: Tensor) -> Tensor:
        out = curve(x, self.means[0].clone() + self.peaks["amax"])
        with torch.no_grad():
            self.means[0].add_(x.mean(0))
            self.means[1] = self.means[1] + 1
            self.peaks["amax"].copy_(x.amax(0))
        return curve(out, self.means[1] + self.peaks["amax"].clone())


@right
def state_in_an_argument_object(wrap: Wrap) -> Any:
    def fn(x: Tensor, state: SimpleNamespace) -> Tensor:
        out = curve(x, state.amax.clone())
        with torch.no_grad():
            state.amax.mul_(0.5).add_(x.amax(0))
        state.steps += 1
        return curve(out, state.amax.clone() * state.steps)

    state = SimpleNamespace(amax=torch.ones(1, 4), steps=0)
    return [train(wrap(fn), inputs(), state), state.amax, state.steps]


@right
def state_tensor_argument_is_written(wrap: Wrap) -> Any:
    amax = torch.ones(1, 4)
    return [train(wrap(written), inputs(), amax), amax]


def with_log(wrap: Wrap, write: Callable[[Any, int, Tensor], Any], make: Callable[[], Any], is_argument: bool) -> Any:
    """Three regions write to a log, which is their argument or closed over."""
    log = make()

    def block(index: int, x: Tensor, given: Any = None) -> Tensor:
        out = curve(x, 1.0 + index)
        write(log if given is None else given, index, out.detach())
        return out.sin()

    checkpointed, given = wrap(block), [log] * is_argument

    def step(x: Tensor) -> Tensor:
        for index in range(3):
            x = checkpointed(index, x, *given)
        return x

    return [train(step, inputs()), log]


@right_by(with_log, lambda: torch.zeros(3), True)
def log_argument_is_written_by_slices(log: Tensor, index: int, out: Tensor) -> None:
    log[index] = out.mean()


@right_by(with_log, lambda: torch.zeros(3, 2), False)
def captured_log_is_written_by_slices(log: Tensor, index: int, out: Tensor) -> None:
    log[index] = torch.stack([out.mean(), out.amax()])


@right_by(with_log, lambda: [torch.zeros(4) for _ in range(3)], True)
def list_of_logs_is_written(logs: list[Tensor], index: int, out: Tensor) -> None:
    logs[index].copy_(out.mean(0))


@right
def mask_argument_is_filled(wrap: Wrap) -> Any:
    """A write that gives equal bytes in every call."""

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        mask.fill_(float("-inf")).triu_(1)
        return torch.softmax(x @ x.t() + mask, -1) @ x

    mask = torch.empty(6, 6)
    return [train(wrap(fn), inputs(), mask), mask]


@right
def scratch_tensor_is_overwritten(wrap: Wrap) -> Any:
    scratch = torch.zeros(6, 4)

    def fn(x: Tensor) -> Tensor:
        torch.mul(x.detach(), 2, out=scratch)
        return curve(x, scratch.clone())

    checkpointed = wrap(fn)
    leaves = inputs()
    backward(*[checkpointed(x) for x in leaves])
    return [[x.grad for x in leaves], scratch]


@right_by(
    as_region, show=lambda module: module.hidden, linear=lambda: nn.Linear(4, 4), hidden=lambda: torch.zeros(6, 4)
)
class RecurrentStateIsCarriedDetached(Holding):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.linear(x) + self.hidden)
        self.hidden = out.detach()
        return out.square()


@right
def recurrent_state_is_carried_with_its_graph(wrap: Wrap) -> Any:
    class Cell(Holding):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = torch.tanh(self.linear(x) + self.hidden)
            return self.hidden.square()

    module, leaves = Cell(linear=nn.Linear(4, 4), hidden=torch.zeros(6, 4)), inputs()
    checkpointed = wrap(module)
    backward(*[checkpointed(x) for x in leaves])
    return [[x.grad for x in leaves], module.hidden, gradients(module)]


# -- batch norm and modules of torch ------------------------------------------------------------------------------------


@right_by(with_module, lambda: nn.BatchNorm1d(4))
def functional_batch_norm_on_the_buffers_of_a_module(norm: nn.Module, x: Tensor) -> Tensor:
    before = norm.running_mean.clone()
    out = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
    return curve(out + before, norm.running_var.clone())


@right
def functional_batch_norm_on_tensors_of_a_list(wrap: Wrap) -> Any:
    stats = [torch.zeros(4), torch.ones(4)]

    def fn(x: Tensor) -> Tensor:
        out = F.batch_norm(x, *stats, training=True)
        return curve(out, stats[0].clone() + stats[1])

    return [train(wrap(fn), inputs()), stats]


@right_by(as_region, norm=lambda: nn.BatchNorm1d(4))
class RunningStatisticsAreRead(Holding):
    def forward(self, x: Tensor) -> Tensor:
        out = curve(x, self.norm.running_var.clone())
        out = self.norm(out)
        return curve(out, self.norm.running_mean.clone() + self.norm.num_batches_tracked)


@right_by(with_module, lambda: nn.BatchNorm1d(4, momentum=None), count=4)
def num_batches_tracked_decides(norm: nn.Module, x: Tensor) -> Tensor:
    return curve(norm(x), 2.0 if int(norm.num_batches_tracked) % 2 else 3.0) * norm.running_mean.clone()


@right
def num_batches_tracked_is_none(wrap: Wrap) -> Any:
    norm = nn.BatchNorm1d(4, momentum=0.3)
    norm.num_batches_tracked = None

    def fn(x: Tensor) -> Tensor:
        return curve(norm(x), norm.running_mean.clone())

    return [train(wrap(fn), inputs()), norm.running_mean, norm.running_var, gradients(norm)]


@right_by(as_region, norm=lambda: nn.BatchNorm1d(4))
class BatchNormChildByItsForward(Holding):
    def forward(self, x: Tensor) -> Tensor:
        out = self.norm.forward(x)
        return curve(out, self.norm.running_mean.clone())


@right_by(with_module, lambda: nn.Sequential(nn.Linear(4, 4), Scale()))
def buffer_of_a_child_is_written_before_its_call(model: nn.Module, x: Tensor) -> Tensor:
    h = model[0](x)
    with torch.no_grad():
        model[1].amax.mul_(0.5)
    return model[1](h)


@right_by(with_module, lambda: nn.ModuleDict({"linear": nn.Linear(4, 4), "scale": Scale()}))
def buffer_of_a_child_is_written_without_a_call(model: nn.Module, x: Tensor) -> Tensor:
    out = curve(model["linear"](x), model["scale"].amax.clone())
    model["scale"].update(x)
    return curve(out, model["scale"].amax.clone())


@right_by(with_module, lambda: nn.Sequential(nn.Linear(4, 4), Scale()))
def buffers_are_reached_through_the_registries(model: nn.Module, x: Tensor) -> Tensor:
    out = model._modules["0"](x)
    for buffer in model.buffers():
        out = curve(out, buffer.clone())
        with torch.no_grad():
            buffer.add_(x.amax(0))
    for child in model.children():
        out = child(out)
    return out


@right
def spectral_norm_by_its_parametrization(wrap: Wrap) -> Any:
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), Scale())
    return [train(wrap(module), inputs()), state_of(module)]


@right
def scripted_child_with_a_buffer(wrap: Wrap) -> Any:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            out = (x * self.steps.clone()).tanh()
            self.steps.add_(1)
            return out

    module = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Counted()))
    return [train(wrap(module), inputs()), state_of(module)]


# -- kinds of backward --------------------------------------------------------------------------------------------------


def stateful() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Scale(), nn.BatchNorm1d(4), nn.Tanh())


@right_with(recomputations=6)
def graph_is_retained(wrap: Wrap) -> Any:
    model = stateful()
    checkpointed = wrap(model)
    leaves = inputs(2)
    losses = [checkpointed(x).square().sum() for x in leaves]
    for _ in range(2):
        for loss in losses:
            loss.backward(retain_graph=True)
    sum(losses).backward()
    return [[x.grad for x in leaves], state_of(model)]


@right
def gradient_penalty(wrap: Wrap) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Tanh())
    checkpointed = wrap(model)
    found = []
    for x in inputs():
        (grad,) = torch.autograd.grad(checkpointed(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found += [grad, x.grad]
    return [found, state_of(model)]


@right_with(recomputations=4)
def nested_regions_write(wrap: Wrap) -> Any:
    inner, outer = stateful(), Scale()
    nested = wrap(inner)
    return [train(wrap(lambda x: outer(nested(outer(x)))), inputs()), state_of(inner), state_of(outer)]


@right_with(recomputations=4)
def nested_regions_share_a_buffer(wrap: Wrap) -> Any:
    scale = Scale()
    nested = wrap(scale)

    def fn(x: Tensor) -> Tensor:
        out = curve(nested(x), scale.amax.clone())
        return nested(out)

    return [train(wrap(fn), inputs()), state_of(scale)]


@right_by(with_module, Scale)
def backward_inside_the_region(scale: nn.Module, x: Tensor) -> Tensor:
    """The region takes a gradient of its own while its buffer is in flux."""
    with torch.enable_grad():
        probe = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(scale(probe).sum(), probe)
    return curve(scale(x), grad)


@right_with(recomputations=4)
def backward_of_a_region_inside_a_region(wrap: Wrap) -> Any:
    scale = Scale()
    nested = wrap(scale)

    def fn(x: Tensor) -> Tensor:
        probe = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(nested(probe).sum(), probe)
        return curve(nested(x), grad)

    return [train(wrap(fn), inputs()), state_of(scale)]


@right_with(recomputations=6)
def backward_between_the_regions_of_one_forward(wrap: Wrap) -> Any:
    scale = Scale()
    checkpointed = wrap(scale)
    found = []
    for x in inputs():
        first = checkpointed(x)
        (grad,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        second = checkpointed(first * grad)
        backward(second, first)
        found.append(x.grad)
    return [found, state_of(scale)]


@right
def backward_of_one_input_only(wrap: Wrap) -> Any:
    model = stateful()
    checkpointed = wrap(model)
    found = []
    for x in inputs():
        checkpointed(x).square().sum().backward(inputs=[x])
        found.append(x.grad)
    return [found, state_of(model)]


@right
def forwards_that_have_no_backward(wrap: Wrap) -> Any:
    model = stateful()
    checkpointed = wrap(model)
    first, *others, last = inputs(5)
    out = checkpointed(first)
    for x in others:
        checkpointed(x)
    backward(out)
    backward(checkpointed(last))
    return [first.grad, last.grad, state_of(model)]


# -- tensors that a kept one is taken for -------------------------------------------------------------------------------


def with_weight(wrap: Wrap, fn: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Any:
    weight = leaf(4, 4)
    return [train(wrap(fn, **options), inputs(), weight), weight.grad]


@right_by(with_weight)
def copy_of_an_argument_is_written(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 2
    z = w.t().contiguous()
    z.mul_(3)
    return (y.tanh() * y) @ z


@right_by(with_weight, policy=policies.save_ops("matmul"))
def copy_of_a_kept_result_is_written(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    y = h.clone()
    y.mul_(2)
    z = h.to(torch.float64)
    z[0] = 1
    return (y.tanh() * y + (z * z.sin()).to(torch.float32) * h).square()


@right_by(with_weight, policy=policies.save_ops("matmul"))
def kept_result_is_written(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    y = h.t().contiguous()
    y.add_(1)
    h = h.relu_()
    return (y.t() * h).tanh() * h


@right
def copy_of_an_argument_is_written_when_it_holds_equal_values(wrap: Wrap) -> Any:
    """The copy equals the argument when it is saved first, and no longer when it is saved again."""

    def fn(x: Tensor) -> Tensor:
        y = x.detach().clone()
        first = x * y
        with contextlib.suppress(RuntimeError):
            y = y.clone()
            y.mul_(2)
        return (first + x * y).tanh()

    return train(wrap(fn), inputs())
