"""Limits of in-place writes: those that nothing counts, tensors without a copy, and parameters that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limit_cases import NEVER, Fn, gradients, is_right, leaf, ours, plain, shows, torchs
from memory import allocated_by
from torch import Tensor, nn

import reactivate
from reactivate.errors import MutationError, RecomputeMismatchError


def written_unseen() -> tuple[Any, ...]:
    table = torch.ones(100, 4)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * table[:4]
        getattr(table, "data").add_(1)  # noqa: B009 - so that the code does not name it
        return y.exp()

    return (fn,)


def written_through_data() -> tuple[Any, ...]:
    table = torch.ones(5000, 4)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() * table[:4]
        table.data.add_(1)
        return y.exp()

    return (fn,)


def long_statistics() -> tuple[Any, ...]:
    mean, variance = torch.zeros(1 << 17), torch.ones(1 << 17)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() + mean[:4]
        F.batch_norm(torch.ones(2, 1 << 17), mean, variance, training=True)
        return y.exp()

    return (fn,)


def long_statistics_of_a_module() -> tuple[Any, ...]:
    norm = nn.BatchNorm1d(1 << 17)

    def fn(x: Tensor) -> Tensor:
        y = x.sin() + norm.running_mean[:4]  # type: ignore[index]
        norm(torch.ones(2, 1 << 17))
        return y.exp()

    return (fn,)


@shows("Writes that no version counter sees")
def test_writes_that_no_version_counter_sees() -> None:
    assert is_right(torchs, written_unseen) == NEVER
    assert is_right(ours(check="metadata"), written_unseen) == NEVER
    assert is_right(ours(), written_unseen) == [RecomputeMismatchError, RecomputeMismatchError, False]
    assert is_right(ours(check="every"), written_unseen) == [RecomputeMismatchError] * 3
    assert is_right(ours(check="metadata"), written_through_data) == NEVER
    assert is_right(ours(), written_through_data) == [MutationError, True, True]
    assert is_right(torchs, long_statistics) == is_right(torchs, long_statistics_of_a_module) == NEVER
    assert is_right(ours(check="metadata"), long_statistics) == [True] * 3
    assert is_right(ours(), long_statistics_of_a_module)[0] is RecomputeMismatchError
    assert other_memory_between(torchs) == NEVER
    assert other_memory_between(ours()) == [RecomputeMismatchError, RecomputeMismatchError, False]


def other_memory_between(wrap: Callable[[Fn], Fn]) -> list[Any]:
    """Return for three calls whether the gradient is plain's, or what it raised."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    fn, weight = wrap(module), module[0].weight

    def gradient(call: Fn, x: Tensor) -> Tensor:
        out = call(x).sum()
        before, weight.data = weight.data, weight.data * 3
        try:
            return torch.autograd.grad(out, x)[0]
        finally:
            weight.data = before

    found: list[Any] = []
    for _ in range(3):
        x = leaf()
        try:
            found.append(torch.equal(gradient(fn, x), gradient(module, x)))
        except RecomputeMismatchError as error:
            found.append(type(error))
    return found


def adds_to(table: Tensor) -> tuple[Any, ...]:
    def fn(x: Tensor, table: Tensor) -> Tensor:
        y = x.sin() + table[:4]
        table.add_(1)
        return y.exp()

    return fn, table


@shows("Two constants in one memory that become part of the graph")
def test_two_constants_in_one_memory_are_read_as_they_are_now() -> None:
    weight, constant, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4), leaf(4, 4)
    view = constant.view(4, 4)

    @reactivate.checkpoint
    def reads_both(x: Tensor) -> Tensor:
        view.sin()
        constant.copy_(weight)
        return x.sin()

    @reactivate.checkpoint
    def reads_one(x: Tensor) -> Tensor:
        other.view(4, 4).sin()
        other.copy_(weight)
        return x.sin()

    with pytest.raises(RecomputeMismatchError, match="saves more than"):
        reads_both(x).sum().backward()
    other = torch.randn(4, 4)
    reads_one(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@shows("Tensors without a copy")
def test_tensors_without_a_copy() -> None:
    assert True not in is_right(torchs, lambda: adds_to(torch.ones(2_000, 4)))
    assert is_right(ours(), lambda: adds_to(torch.ones(2_000, 4))) == [MutationError, True, True]
    assert is_right(ours(), lambda: adds_to(torch.ones(1_000, 4))) == [True] * 3

    def writes_to_its_input(wrap: Callable[[Fn], Fn]) -> Callable[[Fn], Fn]:
        return lambda fn: lambda x: wrap(fn)(x * 1)

    def make() -> tuple[Any, ...]:
        return (lambda h: h.mul_(2).sin().exp(),)

    expected = gradients(writes_to_its_input(plain), make)
    for wrap in (torchs, ours()):
        assert gradients(writes_to_its_input(wrap), make) == [MutationError if wrap is not torchs else RuntimeError] * 3
    assert all(isinstance(gradient, Tensor) for gradient in expected)


class Steps(nn.Module):
    def __init__(self, read: Fn) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(x, self.weight)


def stepped_before_backward(wrap: Callable[[Fn], Fn], read: Fn) -> Any:
    torch.manual_seed(0)
    model, x = Steps(read), leaf()
    out = wrap(model)(x)
    with torch.no_grad():
        model.weight.mul_(2)
    return torch.autograd.grad(out.sum(), x)[0]


@shows("Parameters that change between forward and backward")
def test_parameters_that_change_between_forward_and_backward() -> None:
    def saves(x: Tensor, weight: Tensor) -> Tensor:
        return (x + weight).exp()

    def saves_not(x: Tensor, weight: Tensor) -> Tensor:
        return x.sin().exp() + (x + weight)

    def decides(x: Tensor, weight: Tensor) -> Tensor:
        return x.sin().exp() if weight.sum().item() < 20 else x.cos().tanh()

    expected = stepped_before_backward(plain, saves)
    assert not torch.equal(stepped_before_backward(torchs, saves), expected)
    for read in (saves, decides):
        with pytest.raises(MutationError, match="weight"):
            stepped_before_backward(ours(), read)
    assert not torch.equal(stepped_before_backward(torchs, decides), stepped_before_backward(plain, decides))
    assert torch.equal(stepped_before_backward(ours(), saves_not), stepped_before_backward(plain, saves_not))


@shows("A buffer in the memory of a parameter")
def test_a_buffer_in_the_memory_of_a_parameter() -> None:
    """The plain model multiplies by what was written, the region by what its forward read."""

    class Model(nn.Module):
        buffer: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("buffer", self.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            out = x * self.weight
            self.buffer.mul_(2)
            return out

    for wrap, factor in ((plain, 2.0), (reactivate.checkpoint, 1.0)):
        x = leaf()
        wrap(Model())(x).sum().backward()
        assert torch.equal(x.grad, torch.full((4, 4), factor))


@shows("Swapped tensors")
def test_swapped_tensors() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("mask", torch.ones(5_000))
    reactivate.checkpoint(module)(leaf()).sum().backward()
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(module.mask, torch.zeros(5_000))
    module.mask.data = torch.zeros(5_000)


@shows("Tensors made in inference mode")
def test_tensors_made_in_inference_mode_are_copied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.inference_mode():
                self.teacher = nn.Linear(300, 300).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.teacher.weight[0, 0].item()
            return x.sin() * scale

    fn, size = reactivate.checkpoint(Model()), 4 * 300 * 300
    fn(leaf()).sum().backward()
    allocated = allocated_by(lambda: [fn(leaf()) for _ in range(3)])
    assert allocated.left_bytes >= 3 * size


class Swaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.5
        return self.linear(x).sin()  # type: ignore[no-any-return]


@shows("Parameters whose memory the forward replaces")
def test_parameters_that_the_forward_gives_other_memory() -> None:
    def in_closure() -> tuple[Fn]:
        weight = nn.Parameter(torch.rand(4, 4))

        def fn(x: Tensor) -> Tensor:
            weight.data = weight.data * 0.5
            return F.linear(x, weight).sin()

        return (fn,)

    expected = gradients(plain, lambda: (Swaps(),))
    for determinism in ("first", "metadata", "none", "every"):
        first, *others = gradients(ours(check=determinism), lambda: (Swaps(),))
        assert first is MutationError and all(map(torch.equal, others, expected[1:]))
    assert gradients(torchs, lambda: (Swaps(),))[0] is not MutationError
    assert gradients(ours(), in_closure)[0] is RecomputeMismatchError
    wrong = gradients(ours(check="metadata"), in_closure)
    assert not torch.equal(wrong[0], gradients(plain, in_closure)[0])
    assert torch.equal(wrong[0], gradients(torchs, in_closure)[0])


@shows("Gradients that the forward reads")
def test_gradients_that_the_forward_reads() -> None:
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        return (linear(x) * linear.weight.grad.sum()).sin()  # type: ignore[union-attr]

    for wrap in (ours(), torchs, plain):
        linear.weight.grad = torch.ones(4, 4)
        outputs = [wrap(fn)(leaf()).sum() for _ in range(2)]
        outputs[0].backward()
        if wrap is torchs or wrap is plain:
            outputs[1].backward()  # torch's checkpoint is silently wrong
        else:
            with pytest.raises(RecomputeMismatchError):
                outputs[1].backward()
