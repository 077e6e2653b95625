"""Rule 12: modules are seen as they were, and are not advanced twice."""

from __future__ import annotations

import copy
import functools
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Case, check, compare, flatten, leaf
from several import each
from state_programs import Holding
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import reactivate
from reactivate.errors import MutationError
from reactivate.guards import DEFAULT


def state_of(module: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    state |= {f"grad {name}": parameter.grad for name, parameter in module.named_parameters()}
    for name, child in module.named_modules():
        state |= {
            f"{name}.{key}": copy.copy(value)
            for key, value in vars(child).items()
            if isinstance(value, (int, float, Tensor, list, dict)) and not key.startswith("_")
        }
    return state


def in_training(make: Callable[[], nn.Module], scenario: Callable[[nn.Module, Any], Any]) -> None:
    """`scenario(module, fn)` with fn the module, and with fn the checkpointed module: results and state are the same."""

    def once(wrap: Any) -> list[Any]:
        module = make()
        return [*scenario(module, wrap(module)), *flatten(state_of(module)), torch.get_rng_state()]

    compare(once)


def inputs(count: int, *shape: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [leaf(*shape) for _ in range(count)]


# -- scenarios ----------------------------------------------------------------------------------------------------------


def one_step(module: nn.Module, fn: Any) -> Any:
    (x,) = inputs(1, 8, 16)
    fn(x).sum().backward()
    return [x.grad]


def five_steps(module: nn.Module, fn: Any) -> Any:
    found = []
    for x in inputs(5, 8, 16):
        fn(x).square().sum().backward()
        found.append(x.grad)
    return found


def two_microbatches_interleaved(module: nn.Module, fn: Any) -> Any:
    """1F1B: fwd A, fwd B, bwd A, bwd B."""
    a, b = inputs(2, 8, 16)
    out_a, out_b = fn(a), fn(b)
    out_a.square().sum().backward()
    out_b.square().sum().backward()
    return [a.grad, b.grad]


def forward_without_a_backward(module: nn.Module, fn: Any) -> Any:
    a, b, c = inputs(3, 8, 16)
    out_a = fn(a)
    fn(b)
    out_a.square().sum().backward()
    fn(c).square().sum().backward()
    return [a.grad, c.grad]


def in_eval_mode(module: nn.Module, fn: Any) -> Any:
    a, b = inputs(2, 8, 16)
    fn(a).square().sum().backward()
    module.eval()
    fn(b).square().sum().backward()
    return [a.grad, b.grad]


def called_twice(module: nn.Module, fn: Any) -> Any:
    (x,) = inputs(1, 8, 16)
    fn(fn(x)).square().sum().backward()
    return [x.grad]


def backward_twice(module: nn.Module, fn: Any) -> Any:
    (x,) = inputs(1, 8, 16)
    out = fn(x).square().sum()
    out.backward(retain_graph=True)
    out.backward()
    return [x.grad]


def eval_between_forward_and_backward(module: nn.Module, fn: Any) -> Any:
    (x,) = inputs(1, 8, 16)
    out = fn(x).square().sum()
    module.eval()
    out.backward()
    module.train()
    return [x.grad]


SCENARIOS = [
    *(one_step, five_steps, two_microbatches_interleaved, forward_without_a_backward, in_eval_mode, called_twice),
    *(backward_twice, eval_between_forward_and_backward),
]


# -- modules with state -------------------------------------------------------------------------------------------------


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))


class Fp8Linear(nn.Module):
    """Delayed scaling: this step's scale comes from the history of earlier steps' largest values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("amax_history", torch.zeros(4, 2))
        self.register_buffer("scale", torch.ones(2))
        self.steps = 0

    def quantize(self, tensor: Tensor, slot: int) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.amax_history[self.steps % 4, slot] = tensor.abs().max()
        scaled = tensor * self.scale[slot].clone()
        return tensor + ((scaled.detach() * 8).round() / 8 / self.scale[slot] - tensor).detach()

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(self.quantize(x, 0), self.quantize(self.weight, 1))
        if self.training:
            with torch.no_grad():
                self.scale.copy_(448.0 / self.amax_history.amax(0).clamp_min(1e-3))
            self.steps += 1
        return out.tanh()


class Fp8LinearThatRebinds(Fp8Linear):
    """State may be set by `self.buffer = new`, as some libraries do it, and by a plain attribute beside."""

    def __init__(self) -> None:
        super().__init__()
        self.last_amax = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(self.quantize(x, 0) * self.last_amax.sqrt(), self.quantize(self.weight, 1))
        if self.training:
            self.amax_history = torch.roll(self.amax_history, 1, 0)
            self.scale = 448.0 / self.amax_history.amax(0).clamp_min(1e-3)
            self.last_amax = x.detach().abs().max()
            self.steps += 1
        return out.tanh()


class Codebook(nn.Module):
    """Vector quantisation with an exponential moving average: reads and writes a buffer of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("usage", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        index = torch.cdist(h, self.codes).argmin(-1)
        quantized = self.codes[index]
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.9).index_add_(0, index, h.detach(), alpha=0.1)
                self.usage.index_add_(0, index, torch.ones_like(index))
        return (h + (quantized - h).detach()).tanh() * h.exp()


class Counter(nn.Module):
    """Python state that decides what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.calls = 0
        self.losses: list[Tensor] = []
        self.table = {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.table["scale"] *= 0.5
        h = self.inner(x) * self.calls * self.table["scale"]
        self.losses.append(h.detach().mean())
        return h.tanh() if self.calls % 2 else h.sin().exp()


class Stateful(nn.Module):
    """State in an object in C, where no walk finds it, with the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.deep = array("d", [1.0])

    def forward(self, x: Tensor) -> Tensor:
        self.deep[0] += 1.0
        return (self.inner(x) * self.deep[0]).tanh()

    def recompute_state(self) -> Any:
        return copy.deepcopy(self.deep)

    def load_recompute_state(self, state: Any) -> None:
        self.deep = copy.deepcopy(state)


class FunctionalBatchNorm(nn.Module):
    """Running statistics that are buffers, written by the function rather than by a batch norm module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training).tanh()


class SharedStorage(nn.Module):
    """Two buffers, one a view of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.ones(2, 16))
        self.register_buffer("first", self.all[0])

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.first.clone()).sin()
        with torch.no_grad():
            self.all.add_(1)
        return (y * self.first.clone()).exp()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": batch_norm,
    "batch_norm_with_cumulative_average": lambda: nn.Sequential(nn.BatchNorm1d(16, momentum=None), nn.Tanh()),
    "spectral_norm_parametrization": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh()
    ),
    "spectral_norm_hook": lambda: nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.Tanh()),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Tanh()),
    **{
        kind.__name__: kind
        for kind in (Fp8Linear, Fp8LinearThatRebinds, Codebook, Counter, Stateful, FunctionalBatchNorm, SharedStorage)
    },
}


@pytest.mark.parametrize("name", MODULES)
@each("scenario", SCENARIOS)
def test_state(name: str, scenario: Callable[[nn.Module, Any], Any]) -> None:
    in_training(MODULES[name], scenario)


@pytest.mark.unfenced(reason="aliases are written to, and then it is right")
@pytest.mark.parametrize(
    "name", ["batch_norm", "spectral_norm_parametrization", "Fp8Linear", "Codebook", "Counter", "Stateful"]
)
def test_without_the_guard_it_is_wrong(name: str) -> None:
    """The tests above can fail: they do without the guard."""
    guards = DEFAULT.without("modules")
    results = []
    for wrap in (lambda fn: fn, lambda fn: reactivate.checkpoint(fn, guards=guards)):
        torch.manual_seed(0)
        module = MODULES[name]()
        try:
            found = two_microbatches_interleaved(module, wrap(module))
        except reactivate.errors.ReactivateError:
            return
        results.append([*found, *module.buffers(), torch.tensor(getattr(module, "calls", 0))])
    assert not all(torch.equal(one, other) for one, other in zip(*results))


# -- how the module is reached ------------------------------------------------------------------------------------------


def in_a_closure_of_a_closure(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        return module(x).sin()

    return lambda x: inner(x)


def in_a_list_in_a_closure(module: nn.Module) -> Callable[[Tensor], Tensor]:
    modules = [module]
    return lambda x: modules[0](x).sin()


def as_an_attribute_of_self(module: nn.Module) -> Callable[[Tensor], Tensor]:
    class Trainer:
        def __init__(self) -> None:
            self.module = module
            self.others = {"again": module}

        def step(self, x: Tensor) -> Tensor:
            return self.module(x).sin()

    return Trainer().step


at_module_level: nn.Module


def by_a_module_level_name(module: nn.Module) -> Callable[[Tensor], Tensor]:
    global at_module_level
    at_module_level = module
    return _uses_module_level


def _uses_module_level(x: Tensor) -> Tensor:
    return _helper(x).sin()


def _helper(x: Tensor) -> Tensor:
    return at_module_level(x)


REACHES: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "in_a_closure": lambda module: lambda x: module(x).sin(),
    "in_a_closure_of_a_closure": in_a_closure_of_a_closure,
    "in_a_list_in_a_closure": in_a_list_in_a_closure,
    "in_a_default": lambda module: lambda x, module=module: module(x).sin(),
    "as_an_attribute_of_self": as_an_attribute_of_self,
    "in_a_partial": lambda module: functools.partial(lambda module, x: module(x).sin(), module),
    "by_a_module_level_name": by_a_module_level_name,
}


@pytest.mark.parametrize("name", REACHES)
def test_batch_norm_is_found(name: str) -> None:
    def once(wrap: Any) -> list[Any]:
        module = batch_norm()
        found = two_microbatches_interleaved(module, wrap(REACHES[name](module)))
        assert module[1].num_batches_tracked.item() == 2
        return [*found, *module.buffers()]

    compare(once)


def test_statistics_of_a_plain_batch_norm_call() -> None:
    """Arguments and closures: running statistics that belong to nobody."""

    def make() -> Case:
        mean, var = torch.zeros(16), torch.ones(16)
        case = Case(lambda x, var: F.batch_norm(x, mean, var, training=True).tanh(), (leaf(8, 16), var))
        holder = nn.Module()
        holder.register_buffer("mean", mean)
        holder.register_buffer("var", var)
        case.modules.append(holder)
        return case

    check(make)


def test_functional_call_swaps_parameters_for_the_forward_only() -> None:
    """As meta-learning does it: the recomputation must see the parameters of the forward pass."""

    def once(wrap: Any) -> list[Tensor]:
        block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

        class Model(Holding):
            def forward(self, x: Tensor) -> Tensor:
                return wrap(self.block)(x)

        model, x = Model(block=block), leaf(8, 16)
        fast = {name: leaf(*parameter.shape) for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, fast, (x,)).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in fast.values())]

    compare(once)


def test_training_flag_of_one_submodule() -> None:
    def scenario(module: nn.Module, fn: Any) -> Any:
        module[3].eval()
        (x,) = inputs(1, 8, 16)
        out = fn(x).square().sum()
        module.train()
        module[1].eval()
        out.backward()
        assert not module[1].training and module[3].training
        return [x.grad]

    in_training(batch_norm, scenario)


def changed_between(change: Callable[[Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """A scenario of one step, with a change between forward and backward."""

    def scenario(module: nn.Module, fn: Any) -> Any:
        (x,) = inputs(1, 8, 16)
        out = fn(x).square().sum()
        change(module)
        out.backward()
        return [x.grad]

    return scenario


def test_attribute_changed_between_forward_and_backward() -> None:
    in_training(batch_norm, changed_between(lambda module: setattr(module[3], "p", 0.9)))


# -- refusals -----------------------------------------------------------------------------------------------------------


def test_parameter_written_between_forward_and_backward() -> None:
    module, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), leaf(8, 16)
    out = reactivate.checkpoint(module)(x)
    with torch.no_grad():
        module[0].bias.add_(1)  # which plain autograd would not notice: no op saved it
    with pytest.raises(MutationError, match=r"Sequential\.0\.bias.*\[16\]"):
        out.sum().backward()


def test_buffer_written_between_forward_and_backward() -> None:
    in_training(SharedStorage, changed_between(lambda module: module.all.zero_()))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin().detach() * self.mask) * x  # what autograd saves is the product, not the mask


def test_buffer_written_or_replaced_between_forward_and_backward_is_read_as_it_was() -> None:
    in_training(Masked, changed_between(lambda module: module.mask.zero_()))
    in_training(Masked, changed_between(lambda module: setattr(module, "mask", torch.zeros(8, 16))))


class Late(nn.Module):
    """Does not write to its buffer until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(8, 16))
        self.write = False

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.table.clone()).sin().exp()
        if self.write:
            self.table.add_(1)
        return y


def test_buffer_written_for_the_first_time_after_clean_calls() -> None:
    def scenario(module: nn.Module, fn: Any) -> Any:
        found = []
        for x, write in zip(inputs(6, 8, 16), (False, False, True, False, True, True)):
            module.write = write
            fn(x).sum().backward()
            found.append(x.grad)
        return found

    in_training(Late, scenario)
