"""Saved-tensor hooks around a region decide what a plain backward reads of state: a copy, or what is there by then."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from oracle import Watched, assert_alike
from several import each
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.errors import MutationError, RecomputeMismatchError

Wrap = Callable[[Any], Any]


def same(tensor: Tensor) -> Tensor:
    return tensor


PACKS: dict[str, Callable[[Tensor], Tensor]] = {"copies": Tensor.clone, "none": same}


class Evaluated(nn.Module):
    """Batch norm whose backward reads running statistics: no version tells that they moved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.sin()).sin()

    def change(self) -> None:
        self.norm.train()(torch.randn(8, 4))
        self.norm.eval()


class Scaled(nn.Module):
    """A buffer that a product saves: its version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * self.scale).sin()

    def change(self) -> None:
        with torch.no_grad():
            self.scale.mul_(1.5)


def trained(kind: type[Any], pack: Callable[[Tensor], Tensor], wrap: Wrap, changes: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module, x = kind(), torch.randn(3, 4, requires_grad=True)
    with saved_tensors_hooks(pack, same):
        out = wrap(module)(x)
    if changes:
        module.change()
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *module.buffers()]


WRAPS: dict[str, Wrap] = {
    "a region": lambda module: reactivate.checkpoint(module),
    "a region in a region": lambda module: reactivate.checkpoint(lambda x: reactivate.checkpoint(module)(x.sin())),
    "a region with a policy": lambda module: reactivate.checkpoint(module, policy=policies.save_ops("sin")),
    "a region in a saved call": lambda module: reactivate.checkpoint(
        lambda x: reactivate.site(reactivate.checkpoint(module), name="inner")(x.sin()).cos(),
        policy=policies.save_names("inner"),
    ),
}


@pytest.mark.parametrize("wrap", WRAPS)
@each(("kind", "changes", "pack"), itertools.product([Evaluated, Scaled], [True, False], PACKS))
def test_state_that_changes_after_the_forward(kind: type[Any], changes: bool, pack: str, wrap: str) -> None:
    chosen = WRAPS[wrap]
    plain = trained(kind, PACKS[pack], lambda module: chosen_plainly(module, wrap), changes)
    ran = Watched()
    with observed_by(ran):
        ours = trained(kind, PACKS[pack], chosen, changes)
    assert ran.regions >= 1 and ran.recomputations >= 1
    assert_alike(plain, ours)


def chosen_plainly(module: nn.Module, wrap: str) -> Callable[[Tensor], Tensor]:
    if wrap == "a region in a region":
        return lambda x: module(x.sin())
    if wrap == "a region in a saved call":
        return lambda x: module(x.sin()).cos()
    return module


def _other_data(module: Any) -> None:
    module.scale.data = torch.rand(4) + 2


def _other_data_of_another_size(module: Any) -> None:
    module.scale.data = torch.rand(4, 4)[1] + 2


def _set(module: Any) -> None:
    with torch.no_grad():
        module.scale.set_(torch.rand(4) + 2)


class Sliced(Scaled):
    """A view of the buffer is saved: it stays in the memory that it was made in."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * self.scale[:]).sin()


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("pack", ["no hooks", *PACKS])
@pytest.mark.parametrize("change", [_other_data, _other_data_of_another_size, _set])
@pytest.mark.parametrize("kind", [Scaled, Sliced])
def test_a_buffer_that_is_given_other_memory(kind: type[Any], change: Any, pack: str, wrap: str) -> None:
    def run(wrap_: Wrap) -> list[Tensor] | str:
        torch.manual_seed(0)
        module, x = kind(), torch.randn(3, 4, requires_grad=True)
        with saved_tensors_hooks(PACKS[pack], same) if pack in PACKS else nullcontext():
            out = wrap_(module)(x)
        change(module)
        try:
            out.square().sum().backward()
        except RuntimeError as error:
            return "modified in place" if "modified by an inplace operation" in str(error) else str(error)
        assert x.grad is not None
        return [out.detach(), x.grad, *module.buffers()]

    plain = run(lambda module: chosen_plainly(module, wrap))
    ran = Watched()
    with observed_by(ran):
        ours = run(WRAPS[wrap])
    assert ran.regions >= 1 and ran.recomputations >= 1
    if isinstance(plain, str):
        assert plain == "modified in place"
    else:
        assert not isinstance(ours, str), ours
        assert_alike(plain, ours)


def test_hooks_that_cast() -> None:
    x = torch.randn(4, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()):
        out = reactivate.checkpoint(lambda x: (x * 3).exp().sin())(x.tanh())
    with pytest.raises(RecomputeMismatchError, match="they must return the bits that they were given"):
        out.sum().backward()


@each("hooks", [nullcontext, torch.autograd.graph.allow_mutation_on_saved_tensors])
def test_the_error_for_a_write_says_what_autograd_does_without_hooks(hooks: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        y.mul_(2)
        return y.sin()

    with hooks():
        out = reactivate.checkpoint(fn, early_stop=False)(torch.ones(3, requires_grad=True))
        with pytest.raises(MutationError) as caught:
            out.sum().backward()
    assert ("Without checkpointing autograd refuses this too" in str(caught.value)) == (hooks is nullcontext)


# -- inputs, and what hooks count -------------------------------------------------------------------------------------


class Tracker(saved_tensors_hooks):
    """Hooks of an offloader: they keep copies, each of which is taken once."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.count = 0
        super().__init__(self.keep, lambda number: self.kept.pop(number))

    def keep(self, tensor: Tensor) -> int:
        self.count += 1
        self.kept[self.count] = tensor.detach().clone()
        return self.count


def _nothing(tensor: Tensor) -> None:
    pass


def _other_memory(tensor: Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def _write_unseen(tensor: Tensor) -> None:
    tensor.data.mul_(3)


def _free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@each("take", [_nothing, _other_memory, _write_unseen, _free])
def test_an_offloader_may_take_the_memory_of_what_it_has_packed(take: Callable[[Tensor], None]) -> None:
    """The model still holds the input, as with the hidden states of all layers."""
    linear = nn.Linear(4, 4)

    def run(fn: Wrap, step: int) -> list[Tensor]:
        linear.zero_grad()
        leaf = torch.full((3, 4), step + 1.0, requires_grad=True)
        tracker = Tracker()
        with tracker:
            hidden = leaf * 2
            out = fn(hidden)
        take(hidden)
        out.square().sum().backward()
        assert not tracker.kept, "each is unpacked once"
        return [out.detach(), leaf.grad, linear.weight.grad]  # type: ignore[list-item]

    def block(x: Tensor) -> Tensor:
        return linear(x.sin()).exp()

    for check in ("first", "every", "none"):
        region, ran = reactivate.checkpoint(block, check=check), Watched()
        for step in range(4):
            plain = run(block, step)
            with observed_by(ran):
                assert_alike(plain, run(region, step))
        assert ran.regions == ran.recomputations == 4


class Workspace(torch.autograd.Function):
    """Saves memory of which it fills a part, as an LSTM does: a comparison has to recompute several times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.full((5000,), float(next(_numbers)))  # something else in the memory that comes next
        space = torch.empty(5000)
        space[:3] = 1
        ctx.save_for_backward(x, space)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, space = ctx.saved_tensors
        return gradient * x.cos() * space[0]


_numbers = iter(range(1, 1 << 30))


@contextmanager
def once() -> Iterator[None]:
    yield


@each(
    "make",
    [
        None,
        lambda: (once(), once()),
        lambda: create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor]),
    ],
)
def test_a_comparison_takes_what_can_be_had_once(make: Any) -> None:
    """Hooks that give each tensor once, and contexts that can be entered once."""
    guards = reactivate.guards.DEFAULT
    if make is not None:
        guards = guards.adding(reactivate.guards.ContextPair(make))
    fn = reactivate.checkpoint(lambda x: Workspace.apply(x * 2).sin(), guards=guards)
    ran = Watched()
    for step in range(8):
        x = torch.randn(4, requires_grad=True)
        tracker = Tracker()
        with observed_by(ran), tracker:
            out = fn(x + step).sum()
        with observed_by(ran):
            out.backward()
        expected = torch.autograd.grad(((x + step) * 2).sin().sin().sum(), x)[0]
        assert x.grad is not None and torch.equal(x.grad, expected) and not tracker.kept
    assert ran.regions == 8 and ran.recomputations >= 8
