"""Outputs that are dropped after use and rebuilt just before the backward of their consumer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from fp8_linear import Fp8Linear, State, autocast
from memory import without_collector
from oracle import Watched, assert_bitwise, compare, flatten, leaf, plainly
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from tracker_of_megatron import CpuRngStatesTracker

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.dropin.megatron import CheckpointWithoutOutput, CheckpointWithoutOutputManager, parallel
from reactivate.errors import MutationError, UsageError


class Layer(nn.Module):
    """A norm whose output a linear layer saves; with a residual, dropout, and two consumers if asked to."""

    def __init__(self, consumer: str = "linear") -> None:
        super().__init__()
        self.norm, self.linear, self.other = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.consumer = consumer
        self.memory: list[StorageWeakRef] = []

    def produced(self, x: Tensor) -> Any:
        hidden = nn.functional.dropout(self.norm(x), 0.3)
        return (hidden, hidden.detach() > 0, hidden.cos()) if self.consumer == "tuple" else hidden

    def consumed(self, produced: Any) -> Tensor:
        if self.consumer == "tuple":
            hidden, mask, cosine = produced
            return self.linear(hidden * mask) * cosine  # type: ignore[no-any-return]
        if self.consumer == "views":
            half = self.linear(produced.view(4, 16)[:, 4:12])
            return torch.cat([half, produced.t()[::2].exp()]) @ produced  # type: ignore[no-any-return]
        if self.consumer == "two":
            return self.linear(produced).tanh() + self.other(produced)  # type: ignore[no-any-return]
        if self.consumer == "function":
            return Cube.apply(produced)  # type: ignore[no-any-return]
        if self.consumer == "region":
            return reactivate.checkpoint(lambda hidden: self.linear(hidden).tanh().sin())(produced)
        return self.linear(produced)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, discards: bool) -> Tensor:
        if not discards:
            return x + self.consumed(self.produced(x)).sin()
        checkpoint = CheckpointWithoutOutput()
        produced = checkpoint.checkpoint(self.produced, x)
        first = produced[0] if isinstance(produced, tuple) else produced
        self.memory.append(StorageWeakRef(first.untyped_storage()))
        out = self.consumed(produced)
        checkpoint.discard_output_and_register_recompute(out)
        return x + out.sin()


class Cube(torch.autograd.Function):
    """Saves in bulk, and one tensor twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, None, x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, _, same = ctx.saved_tensors
        again = ctx.saved_tensors[0]
        return 3 * grad * x * same + 0 * again


def once(out: Tensor, leaves: list[Tensor]) -> list[Any]:
    out.sum().backward()
    return [item.grad for item in leaves]


def retained(out: Tensor, leaves: list[Tensor]) -> list[Any]:
    for _ in range(3):
        (out * 2).sum().backward(retain_graph=True)
    return [item.grad for item in leaves]


def partly(out: Tensor, leaves: list[Tensor]) -> list[Any]:
    first = torch.autograd.grad(out.sum(), leaves[-1:], retain_graph=True, allow_unused=True)
    return [*first, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)]


def twice(out: Tensor, leaves: list[Tensor]) -> list[Any]:
    (first,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    first.square().sum().backward()
    return [item.grad for item in leaves]


def compared(step: Callable[[bool], list[Any]]) -> Watched:
    """`step(True)`, which discards, has the results of `step(False)`, bit for bit."""
    return compare(lambda wrap: step(wrap is not plainly))


@pytest.mark.parametrize("backward", [once, retained, partly, twice])
@pytest.mark.parametrize("consumer", ["linear", "tuple", "views", "two", "function", "region"])
def test_bitwise(consumer: str, backward: Callable[[Tensor, list[Tensor]], list[Any]]) -> None:
    def step(discards: bool) -> list[Any]:
        layers = nn.ModuleList([Layer(consumer) for _ in range(2)])
        x = leaf(8, 8)
        out: Tensor = x * 1
        for layer in layers:
            out = layer(out, discards)
        return [out.detach(), *backward(out, [x, *layers.parameters()]), torch.get_rng_state()]

    ran = compared(step)
    assert ran.regions >= 2 and ran.recomputations >= 2


@pytest.mark.parametrize("consumer", ["linear", "tuple", "views", "two", "function"])
def test_the_memory_of_the_output_is_free_in_between(consumer: str) -> None:
    layer = Layer(consumer)
    with without_collector():
        out = layer(leaf(8, 8), True)
        assert layer.memory[0].expired()
        for _ in range(2):
            out.sum().backward(retain_graph=True)
            assert layer.memory[0].expired()


def test_without_a_discard_the_memory_would_stay() -> None:
    layer = Layer()
    hidden = reactivate.checkpoint(layer.produced)(leaf(8, 8))
    memory = StorageWeakRef(hidden.untyped_storage())
    out = layer.consumed(hidden)
    del hidden
    assert not memory.expired()
    del out
    assert memory.expired()


def test_what_was_rebuilt_goes_with_the_backward() -> None:
    """Also where the graph is retained: each backward recomputes once more."""
    ran = Watched()
    layer = Layer()
    x = leaf(8, 8)
    with observed_by(ran):
        out = layer(x, True)
        for _ in range(3):
            out.sum().backward(retain_graph=True)
    assert (ran.regions, ran.recomputations) == (1, 3)


def test_the_output_can_be_read_as_long_as_somebody_has_it() -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    x = leaf(4, 8)
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(norm, x)
    checkpoint.discard_output_and_register_recompute(linear(hidden))
    assert torch.equal(hidden, norm(x))


def test_8_bit_layers_use_the_scales_of_their_call() -> None:
    def steps(discards: bool) -> list[Any]:
        State.reset()
        layers = nn.ModuleList([Fp8Linear(8, 8), Fp8Linear(8, 8)])
        found: list[Any] = []
        for step in range(4):
            outs = []
            for batch in range(2):
                x = torch.randn(4, 8) * (1 + step) * (1 + batch)
                with autocast():
                    if discards:
                        checkpoint = CheckpointWithoutOutput(fp8=True)
                        out = layers[1](checkpoint.checkpoint(layers[0], x))
                        checkpoint.discard_output_and_register_recompute(out)
                    else:
                        out = layers[1](layers[0](x))
                outs.append(out.square().mean())
            for loss in reversed(outs):
                loss.backward()
            found += [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
            found += [buffer.clone() for buffer in layers.buffers()]
        return found

    compared(steps)
    State.reset()


def in_a_region(wrap: Any, layer: Layer, *, discards: bool) -> list[Any]:
    x = leaf(8, 8)
    out = wrap(lambda x: layer(x, discards))(x)
    out.sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def test_inside_of_a_region() -> None:
    """The region around both keeps neither; what the consumer saves is in its slots already."""
    ran = compare(lambda wrap: in_a_region(wrap, Layer(), discards=wrap is not plainly))
    assert ran.recomputations >= 2


# -- the same by a policy ----------------------------------------------------------------------------------------------


def test_a_policy_drops_what_saved_calls_are_given() -> None:
    """A region whose linear layer is saved keeps no output of the norm, and recomputes the norm alone."""
    ran = compare(lambda wrap: in_a_region(wrap, Layer(), discards=False), policy=policies.save_ops("linear"))
    assert (ran.regions, ran.recomputations) == (1, 1)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_missing_registration_is_refused() -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    out = linear(CheckpointWithoutOutput().checkpoint(norm, leaf(4, 8)))
    with pytest.raises(UsageError, match=r"LayerNorm.*never was.*discard_output_and_register_recompute\(hook_tensor\)"):
        out.sum().backward()


def test_a_discard_without_a_checkpoint_is_refused() -> None:
    checkpoint = CheckpointWithoutOutput()
    with pytest.raises(UsageError, match=r"there is none. Call checkpoint\(run_function, \*args\) first"):
        checkpoint.discard_output_and_register_recompute(torch.ones(2))
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    out = linear(checkpoint.checkpoint(norm, torch.randn(4, 8)))
    checkpoint.discard_output_and_register_recompute(out)
    with pytest.raises(UsageError, match="once for each call"):
        checkpoint.discard_output_and_register_recompute(out)


def test_another_hook_tensor_is_refused() -> None:
    checkpoint = CheckpointWithoutOutput()
    checkpoint.checkpoint(nn.LayerNorm(8), leaf(4, 8))
    with pytest.raises(UsageError, match=r"does not depend on the output of `LayerNorm\(...\)`"):
        checkpoint.discard_output_and_register_recompute(torch.ones(2, requires_grad=True).sin())


def test_an_output_that_was_modified_is_refused() -> None:
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(nn.LayerNorm(8), leaf(4, 8))
    out = hidden.sin()
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(MutationError, match="modified in place after checkpoint"):
        checkpoint.discard_output_and_register_recompute(out)


def test_a_consumer_without_gradient() -> None:
    """Nothing of it is saved, so that there is nothing to discard, and another consumer is right."""
    norm, x = nn.LayerNorm(8), leaf(4, 8)
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(norm, x)
    with torch.no_grad():
        checkpoint.discard_output_and_register_recompute(hidden.exp())
    (gradient,) = torch.autograd.grad(hidden.exp().sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(norm(x).exp().sum(), x)[0])


class Two(NamedTuple):
    one: Tensor
    other: Tensor


@pytest.mark.parametrize("make", [Two, lambda *both: [*both], lambda *both: {"one": [both[0]], "other": both[1]}])
def test_containers_stay_what_they_are(make: Any) -> None:
    x = leaf(4, 8)
    checkpoint = CheckpointWithoutOutput()
    outputs = checkpoint.checkpoint(lambda x: make(x.exp(), x.sin()), x)
    assert type(outputs) is type(make(x, x))
    one, other = flatten(outputs)
    memory = [StorageWeakRef(item.untyped_storage()) for item in (one, other)]
    out = one * other
    checkpoint.discard_output_and_register_recompute(out)
    del outputs, one, other
    assert all(item.expired() for item in memory)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad((x.exp() * x.sin()).sum(), x)[0])


def curvature(out: Tensor, x: Tensor) -> list[Tensor]:
    """Return gradients of gradients: sums of several terms at the node of the output."""
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return [first.detach(), second.detach(), *torch.autograd.grad(second.sum(), x)]


def discarded(produce: Any, consume: Any, backward: Any, discards: bool) -> list[Any]:
    x = leaf(6, 8)
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(produce, x) if discards else produce(x)
    out = consume(hidden, x)
    if discards:
        checkpoint.discard_output_and_register_recompute(out)
    del hidden
    return [*backward(out, x), len(x._backward_hooks or {})]


@pytest.mark.parametrize("produce", [torch.exp, lambda x: x.sin() * x])
def test_gradients_are_summed_in_the_order_of_the_plain_model(produce: Any) -> None:
    assert compared(partial(discarded, produce, lambda h, x: h * h * x, curvature)).regions == 1


def test_two_backwards_of_which_none_keeps_the_graph() -> None:
    """The function saves nothing that a first backward would free."""

    def backwards(out: Tensor, x: Tensor) -> list[Tensor]:
        return [torch.autograd.grad(part.sum(), x)[0] for part in parts]

    parts: list[Tensor] = []

    def consume(hidden: Tensor, x: Tensor) -> Tensor:
        parts[:] = [hidden.exp(), hidden * hidden]
        return torch.stack(parts)

    compared(partial(discarded, lambda x: x + 1, consume, backwards))


def test_an_output_that_is_a_leaf_stays() -> None:
    """The caller has it anyway, and no hook stays on it."""
    gradient = lambda out, x: torch.autograd.grad(out.sum(), x)  # noqa: E731
    compared(partial(discarded, lambda x: (x, x.exp()), lambda h, x: h[0] * h[1], gradient))


@pytest.mark.parametrize("backward", [once, retained, partly, twice])
def test_a_manager_discards_several_outputs_at_once(backward: Any) -> None:
    def step(discards: bool) -> list[Any]:
        manager = CheckpointWithoutOutputManager()
        layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        x = leaf(8, 8)
        out: Tensor = x * 1
        memory: list[StorageWeakRef] = []
        for layer in layers:
            if not discards:
                out = layer(nn.functional.dropout(out.exp(), 0.3)).tanh()
                continue
            checkpoint = CheckpointWithoutOutput(ckpt_manager=manager)
            hidden = checkpoint.checkpoint(lambda x: nn.functional.dropout(x.exp(), 0.3), out)
            memory.append(StorageWeakRef(hidden.untyped_storage()))
            out = layer(hidden).tanh()
            checkpoint.discard_output_and_register_recompute(out)
            assert not memory[-1].expired()
            del hidden
        if discards:
            manager.discard_all_outputs_and_register_unified_recompute(out)
            assert all(item.expired() for item in memory)
        return [out.detach(), *backward(out, [x, *layers.parameters()]), torch.get_rng_state()]

    ran = compared(step)
    assert ran.regions == 3 and ran.recomputations >= 3


class NormAndResidual(torch.autograd.Function):
    """Returns its input beside the normed one, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight, x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_residual: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        inner = gradient * weight
        found = scale * (inner - x * scale.square() * (inner * x).mean(-1, keepdim=True))
        return found + of_residual, (gradient * x * scale).sum(0)


@pytest.mark.parametrize("uses_manager", [False, True])
@pytest.mark.parametrize("retains", [False, True])
def test_an_output_that_is_an_input_is_kept(retains: bool, uses_manager: bool) -> None:
    """Megatron frees the memory of the input with it, but for `retain_input_tensors`."""

    def step(discards: bool) -> list[Any]:
        weight, first, linear = leaf(8), leaf(4, 8), nn.Linear(8, 8)
        x = first.exp()
        manager = CheckpointWithoutOutputManager() if uses_manager else None
        checkpoint = CheckpointWithoutOutput(ckpt_manager=manager, retain_input_tensors=retains)
        if discards:
            normed, residual = checkpoint.checkpoint(lambda x: NormAndResidual.apply(x, weight), x)
        else:
            normed, residual = NormAndResidual.apply(x, weight)
        memory = StorageWeakRef(normed.untyped_storage())
        out = linear(normed * residual) * residual
        if discards:
            checkpoint.discard_output_and_register_recompute(out)
            if manager is not None:
                manager.discard_all_outputs_and_register_unified_recompute(out)
        del normed
        assert memory.expired() == discards and torch.equal(residual, x)
        out.sum().backward()
        assert first.grad is not None and weight.grad is not None
        return [out.detach(), first.grad, weight.grad, *(parameter.grad for parameter in linear.parameters())]

    ran = compared(step)
    assert (ran.regions, ran.recomputations) == (1, 1)


def test_only_inputs_given_back_need_no_discard() -> None:
    x = leaf(4)
    out = CheckpointWithoutOutput().checkpoint(lambda x: x.view(2, 2), x * 2).sin()
    out.sum().backward()
    assert_bitwise(x.grad, 2 * (2 * x.detach()).cos(), "gradient")


def test_a_manager_takes_checkpoints_that_were_called() -> None:
    manager = CheckpointWithoutOutputManager()
    with pytest.raises(TypeError, match="got str") as refusal:
        manager.add_checkpoint("a checkpoint")  # type: ignore[arg-type]
    assert isinstance(refusal.value, UsageError)
    with pytest.raises(UsageError, match="checkpoint\\(run_function, \\*args\\) first"):
        manager.add_checkpoint(CheckpointWithoutOutput())
    assert manager.checkpoints == [] and not manager.is_last_layer_in_recompute_block


def test_the_streams_of_a_tracker() -> None:
    """Nothing but its guard finds the tracker here."""

    def once(discards: bool) -> list[Tensor]:
        tracker = CpuRngStatesTracker(notes_current=True)
        tracker.add("a", 3)
        hidden = MappingProxyType({"down": tracker})

        def dropped(x: Tensor) -> Tensor:
            with hidden["down"].fork("a"):
                return nn.functional.dropout(x.sin())

        x, linear = torch.ones(16, 8, requires_grad=True), nn.Linear(8, 8)
        with parallel(tracker=tracker):
            for _ in range(3):
                checkpoint = CheckpointWithoutOutput()
                inner = checkpoint.checkpoint(dropped, x) if discards else dropped(x)
                out = linear(inner)
                if discards:
                    checkpoint.discard_output_and_register_recompute(out)
                del inner
                out.square().sum().backward()
        assert x.grad is not None
        with tracker.fork("a"):
            return [x.grad, *(parameter.grad for parameter in linear.parameters()), torch.rand(4)]

    compared(once)


def test_without_a_gradient_it_is_the_plain_call() -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    x = torch.randn(4, 8)
    checkpoint = CheckpointWithoutOutput()
    with torch.no_grad():
        hidden = checkpoint.checkpoint(norm, x)
        out = linear(hidden)
        checkpoint.discard_output_and_register_recompute(out)
        assert torch.equal(out, linear(norm(x)))
