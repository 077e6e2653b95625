"""Rule 12 for 8-bit floats: the recomputation of a layer with delayed scaling uses the history and the scales of its call.

Layers need to do nothing for it, since their state is rewound. Layers that keep it themselves, phase by phase, work too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from fp8_linear import Fp8Linear, Recipe, State, autocast, phases
from oracle import Watched, assert_bitwise
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

Wrap = Callable[[Any], Any]

ORDERS = {
    "one by one": ["f0", "b0", "f1", "b1"],
    "last first": ["f0", "f1", "f2", "b2", "b1", "b0"],
    "1F1B": ["f0", "f1", "b0", "f2", "b1", "b2"],
}
STEPS = 5


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    State.reset()
    yield
    State.reset()


class Block(nn.Module):
    def __init__(self, wrap: Wrap = lambda fn: fn) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), Fp8Linear(8, 16), Fp8Linear(16, 8)
        self.wrap = wrap

    def forward(self, x: Tensor, is_first: bool | None = None) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x), is_first)), is_first)


class Changing(Block):
    """Has autocasts of its own, with another recipe for each layer, and one layer outside of it."""

    def forward(self, x: Tensor, is_first: bool | None = None) -> Tensor:
        with autocast(recipe=Recipe(margin=1)):
            hidden = self.up(self.norm(x), is_first)
        with autocast(enabled=False):
            x = x + self.down(torch.tanh(hidden))
        with autocast(recipe=Recipe(uses_largest=False)):
            return x + self.down(torch.tanh(hidden), is_first)


class Twice(Block):
    """Calls one layer twice, with other scales in between."""

    def forward(self, x: Tensor, is_first: bool | None = None) -> Tensor:
        x = self.up(self.norm(x)).narrow(1, 0, 8)
        with autocast(enabled=False), autocast(recipe=Recipe(margin=2)):
            return x + self.down(self.up(x.sin()))


class Nested(Block):
    """Has a region inside."""

    def forward(self, x: Tensor, is_first: bool | None = None) -> Tensor:
        hidden = self.wrap(self.up)(self.norm(x), is_first)
        return x + self.down(torch.tanh(hidden), is_first)


def train(
    kind: type[Block], wrap: Wrap, order: list[str], *, caches: bool = False, around: bool = True
) -> tuple[dict[str, Any], Watched]:
    """Train some steps, microbatch by microbatch; return all there is to compare by name, and what regions did."""
    State.reset()
    torch.manual_seed(0)
    blocks = nn.ModuleList([kind(wrap) for _ in range(3)])
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.5)
    found: dict[str, Any] = {}
    ran = Watched()
    losses: dict[str, Tensor] = {}
    with observed_by(ran):
        for step in range(STEPS):
            for what, microbatch in order:
                if what == "b":
                    losses.pop(microbatch).backward()
                    continue
                generator = torch.Generator().manual_seed(10 * step + int(microbatch))
                x = torch.randn(4, 8, generator=generator) * (1 + 3 * step)
                with autocast(recipe=Recipe(margin=step % 2)) if around else nullcontext():
                    for block in blocks:
                        x = wrap(block)(x, microbatch == "0" if caches else None)
                losses[microbatch] = x.square().mean()
                found[f"loss {step} {microbatch}"] = losses[microbatch].detach()
            for name, parameter in blocks.named_parameters():
                assert parameter.grad is not None
                found[f"gradient of {name}, step {step}"] = parameter.grad.clone()
            found |= {f"buffer {name}, step {step}": value.clone() for name, value in blocks.named_buffers()}
            for name, module in blocks.named_modules():
                if isinstance(module, Fp8Linear) and module.weight8 is not None:
                    found[f"cache {name}, step {step}"] = module.weight8.view(torch.uint8).clone()
            optimizer.step()
            optimizer.zero_grad()
    found |= {"updates": State.updates, "state": State.get_autocast_state(), "buffers": len(State.buffers)}
    return found, ran


def assert_same(plain: dict[str, Any], ours: dict[str, Any]) -> None:
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert_bitwise(value, ours[name], name)


def calls(order: list[str]) -> int:
    return 3 * STEPS * len(order) // 2


# -- layers that know of no phases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [Block, Changing, Twice])
def test_a_layer_needs_no_phases(kind: type[Block], order: str, caches: bool) -> None:
    run = partial(train, kind, order=ORDERS[order], caches=caches, around=kind is not Changing)
    plain, _ = run(lambda fn: fn)
    ours, ran = run(reactivate.checkpoint)
    assert_same(plain, ours)
    assert (ran.regions, ran.recomputations) == (calls(ORDERS[order]),) * 2
    scales = [value for name, value in plain.items() if name.endswith("step 4") and "scale" in name]
    assert len({*map(str, scales)}) > 3, "the scales have moved, each to a value of its own"


@pytest.mark.parametrize("order", ORDERS)
def test_nested_regions(order: str) -> None:
    plain, _ = train(Nested, lambda fn: fn, ORDERS[order])
    ours, ran = train(Nested, reactivate.checkpoint, ORDERS[order])
    assert_same(plain, ours)
    assert ran.regions > calls(ORDERS[order])


@pytest.mark.parametrize("order", ORDERS)
def test_a_policy_that_saves_some_layers(order: str) -> None:
    plain, _ = train(Block, lambda fn: fn, ORDERS[order])
    ours, ran = train(Block, partial(reactivate.checkpoint, policy=policies.save_modules("up")), ORDERS[order])
    assert_same(plain, ours)
    assert ran.recomputations == calls(ORDERS[order])


def test_the_plain_engine_of_torch_uses_other_scales() -> None:
    """Without phases torch's checkpoint measures once more and quantises with what is there by then: these tests can fail."""
    run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    plain, _ = train(Changing, lambda fn: fn, ORDERS["1F1B"], around=False)
    theirs, _ = train(Changing, lambda fn: partial(run, fn), ORDERS["1F1B"], around=False)
    with pytest.raises(AssertionError):
        assert_same(plain, theirs)


def test_what_is_kept_is_smaller_by_what_the_layers_save() -> None:
    kept = []
    for wrap in (lambda fn: fn, reactivate.checkpoint):
        State.reset()
        sizes: dict[int, int] = {}
        block = Block()

        def count(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(64, 8, requires_grad=True).sin()
        with saved_tensors_hooks(count, lambda tensor: tensor), autocast():
            wrap(block)(x)
        kept.append(sum(sizes.values()))
    assert kept[1] == 64 * 8 * 4 < kept[0] - 64 * (8 + 16)  # the input alone, and both quantised inputs among the rest


# -- layers that keep their state for the recomputation themselves -----------------------------------------------------

PAIR = reactivate.guards.DEFAULT.adding(reactivate.guards.ContextPair(phases))
in_phases = partial(reactivate.checkpoint, guards=PAIR)


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [Block, Changing, Twice])
def test_layers_that_keep_state_under_the_region(
    kind: type[Block], order: str, caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fp8Linear, "uses_queues", False)
    run = partial(train, kind, order=ORDERS[order], caches=caches, around=kind is not Changing)
    plain, _ = run(lambda fn: fn)
    ours, ran = run(in_phases)
    assert_same(plain, ours)
    assert (ran.regions, ran.recomputations) == (calls(ORDERS[order]),) * 2
    assert len(State.of_regions) == 0


@pytest.mark.parametrize("order", ORDERS)
def test_nested_layers_that_keep_state_under_the_region(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Linear, "uses_queues", False)
    plain, _ = train(Nested, lambda fn: fn, ORDERS[order])
    ours, _ = train(Nested, in_phases, ORDERS[order])
    assert_same(plain, ours)
    assert len(State.of_regions) == 0


def test_a_failed_and_a_gradient_free_forward_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Linear, "uses_queues", False)
    block = Block()
    x = torch.randn(4, 8)

    def fails(x: Tensor) -> Tensor:
        block(x)
        raise ValueError("after it")

    with autocast():
        with pytest.raises(ValueError, match="after it"):
            in_phases(fails)(x)
        assert len(State.of_regions) == 0
        out = in_phases(block)(x)
        assert len(State.of_regions) == 1
        del out
    assert len(State.of_regions) == 0
    assert (State.keeps_for_recomputation, State.is_recomputation) == (False, False)


def test_a_retained_graph_finds_the_state_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Linear, "uses_queues", False)
    gradients = []
    for wrap in (lambda fn: fn, in_phases):
        State.reset()
        torch.manual_seed(0)
        block = Block()
        x = torch.randn(4, 8, requires_grad=True)
        with autocast():
            outs = [wrap(block)(x * scale).sum() for scale in (1, 20)]
        for out in (outs[0], outs[1], outs[0]):
            out.backward(retain_graph=True)
        gradients.append([x.grad, *(parameter.grad for parameter in block.parameters()), block.up.history])
    for one, other in zip(*gradients):
        assert_bitwise(one, other, "gradient")
