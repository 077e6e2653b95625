"""Pipelines that split a backward in two, with torch's own functions for it: first the inputs' gradients (dI), then the
weights' (dW). Under `shared_recompute` a region is recomputed once for both, and what neither reads any more is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Watched, assert_bitwise, random_states, seed_everything
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as upstream

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.storage import Disk, Host

WIDTH, MICROBATCHES = 16, 3
IS_OLD = not hasattr(upstream, "GraphExecGroup")  # then custom functions cannot be where a backward is split
Wrap = Callable[[Any], Callable[..., Any]]


class Mlp(nn.Module):
    """A block whose norm reads its input for both halves of a backward, with a buffer that each call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().flatten(0, -2).mean(0), alpha=0.1)
        hidden = nn.functional.gelu(self.up(self.norm(x) + self.mean))
        return x + nn.functional.dropout(self.down(hidden), 0.2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Frozen(Mlp):
    """A block with an adapter: its own weights have no second half."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tanh(self.adapter(x))


class _Scaled(torch.autograd.Function):
    """A custom function that reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, _), (_, scale) = ctx.saved_tensors, ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * x).flatten(0, -2).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _Scaled.apply(self.linear(torch.tanh(x)).sin(), self.scale)  # type: ignore[no-any-return]


class Around(nn.Module):
    """A region inside of a region."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.wrap, self.before, self.inner = wrap, nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(self.inner)(torch.tanh(self.before(x))).sin()  # type: ignore[no-any-return]


class Once(nn.Module):
    """A region that saves one tensor, for both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.floor = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > self.floor, x, self.floor)


class Stage(nn.Module):
    def __init__(self, blocks: list[nn.Module], wrap: Wrap) -> None:
        super().__init__()
        self.blocks, self.wrap = nn.ModuleList(blocks), wrap
        self.entered: list[StorageWeakRef] = []  # what regions keep in any case: their inputs

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            self.entered.append(StorageWeakRef(x.untyped_storage()))
            x = self.wrap(block)(x)
        return x


class Recomputed(Watched):
    """Knows the memory that recomputations filled, but for that of parameters and of what enters the regions."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.known = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def recomputation_done(self, record: Any) -> None:
        super().recomputation_done(record)
        for tensor, _ in record.values.values():
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def alive_bytes(self) -> int:
        """Return what is still there of it."""
        known = self.known | {storage.cdata for storage in self.stage.entered}
        found = (size for key, (storage, size) in self.storages.items() if key not in known and not storage.expired())
        return sum(found)


KINDS: dict[str, Callable[[Wrap], list[nn.Module]]] = {
    "mlp": lambda wrap: [Mlp(), Mlp()],
    "attention": lambda wrap: [Attention(), Mlp()],
    "frozen": lambda wrap: [Frozen(), Frozen()],
    **({} if IS_OLD else {"custom": lambda wrap: [Custom(), Custom()]}),
    "nested": lambda wrap: [Around(wrap), Mlp()],
    "one tensor": lambda wrap: [Once(), Once()],
}


def plain(fn: Any) -> Any:
    return fn


def torchs(fn: Any) -> Any:
    return partial(upstream.checkpoint, fn, use_reentrant=False)


def split_backwards(
    stage: Stage, watched: Recomputed, context: Callable[[], AbstractContextManager[Any]]
) -> tuple[dict[str, Any], list[int]]:
    """Run forward passes, then dI of two microbatches before dW of the first, as zero-bubble schedules do.

    Returns what there is to compare, and the bytes of recomputed tensors that are alive after each half.
    """
    torch.manual_seed(1)
    found: dict[str, Any] = {}
    alive: list[int] = []
    inputs = [torch.randn(2, 4, WIDTH).requires_grad_() for _ in range(MICROBATCHES)]
    with observed_by(watched), context():
        outputs = [stage(x * 1) for x in inputs[:1]]
        groups: list[Any] = []
        for number in range(MICROBATCHES):
            if number + 1 < MICROBATCHES:
                outputs.append(stage(inputs[number + 1] * 1))
            out, outputs[number] = outputs[number], None  # type: ignore[call-overload]
            found[f"output {number}"] = out.detach().clone()
            gradient, left = stage_backward_input(
                [out], [torch.cos(out.detach())], [inputs[number]], stage.parameters()
            )
            found[f"gradient of input {number}"] = gradient[0]
            groups.append(left)
            del out, left
            alive.append(watched.alive_bytes())
            if number:
                stage_backward_weight(stage.parameters(), groups.pop(0))
                alive.append(watched.alive_bytes())
        stage_backward_weight(stage.parameters(), groups.pop(0))
        alive.append(watched.alive_bytes())
    found |= {f"gradient of {name}": parameter.grad for name, parameter in stage.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in stage.named_buffers()}
    return found | random_states(), alive


def compared(
    kind: str, wrap: Wrap, context: Callable[[], AbstractContextManager[Any]], policy: Any = None
) -> tuple[Recomputed, list[int]]:
    """Compare a stage with the plain one, bit for bit, and return what the engine did."""
    results = []
    for way in (plain, wrap):
        seed_everything()
        stage = Stage(KINDS[kind](way), way)
        handle = reactivate.apply(stage, policy) if policy is not None and results else None
        watched = Recomputed(stage)
        results.append(split_backwards(stage, watched, context if results else nullcontext))
        if handle is not None:
            handle.remove()
    (expected, _), (found, alive) = results
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert_bitwise(value, found[key], key)
    return watched, alive


def calls_of(kind: str) -> int:
    """Return how many regions run in the forward passes."""
    return MICROBATCHES * (3 if kind == "nested" else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_one_recomputation_for_both_halves(kind: str) -> None:
    watched, alive = compared(kind, reactivate.checkpoint, reactivate.shared_recompute)
    assert watched.recomputations == calls_of(kind)
    assert alive[-1] == 0, "recomputed tensors outlive the second half"
    assert max(alive) == alive[1] >= 2 * alive[2], "two microbatches wait for their second half at most"
    if kind != "frozen":
        assert alive[0] > 0, "nothing waits for the second half: this tests nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_each_backward_recomputes_on_its_own_without_a_context(kind: str) -> None:
    watched, alive = compared(kind, reactivate.checkpoint, nullcontext)
    assert watched.recomputations > calls_of(kind)
    assert set(alive) == {0}, "recomputed tensors outlive their backward"


@pytest.mark.unfenced(reason="weights come through the fence as copies, which wait as well")
def test_what_the_first_half_alone_reads_is_freed_by_it() -> None:
    """Keep what the linear layers read for their weights, and not what `exp` and `tanh` saved between them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x.sin()).exp()).cos()).neg()  # type: ignore[no-any-return]

    seed_everything()
    stage = Stage([Block()], reactivate.checkpoint)
    watched = Recomputed(stage)
    _, alive = split_backwards(stage, watched, reactivate.shared_recompute)
    size = 2 * (2 * 4 * WIDTH * 4)  # the inputs of both
    assert alive == [size, 2 * size, size, 2 * size, size, 0]


def test_where_torch_does_not_say_which_edges_are_taken_more_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bits are the same, and a region is recomputed once."""
    _, least = compared("attention", reactivate.checkpoint, reactivate.shared_recompute)
    monkeypatch.setattr("reactivate._torch.autograd._will_run", lambda node: False)
    watched, alive = compared("attention", reactivate.checkpoint, reactivate.shared_recompute)
    assert watched.recomputations == calls_of("attention")
    assert alive[0] > least[0] and alive[-1] == 0


@pytest.mark.parametrize(
    "policy",
    [
        policies.first_match(policies.save_ops("linear"), policies.recompute_modules("blocks.*")),
        policies.first_match(policies.save_ops("linear", storage=Host()), policies.recompute_modules("blocks.*")),
        policies.first_match(policies.save_ops("gelu"), policies.recompute_modules("blocks.*")),
        policies.recompute_modules("blocks.*", inputs=Host()),
    ],
    ids=["save", "save to host", "save inside", "inputs on host"],
)
def test_policies_and_storages(policy: Any) -> None:
    watched, alive = compared("mlp", plain, reactivate.shared_recompute, policy)
    assert watched.recomputations == watched.regions == 2 * MICROBATCHES
    assert alive[-1] == 0


def test_inputs_on_disk(tmp_path: Path) -> None:
    storage = Disk(tmp_path)
    policy = policies.recompute_modules("blocks.*", inputs=storage)
    watched, alive = compared("mlp", plain, reactivate.shared_recompute, policy)
    assert watched.recomputations == watched.regions == 2 * MICROBATCHES
    assert alive[-1] == 0


@pytest.mark.parametrize("context", [nullcontext, reactivate.shared_recompute])
def test_backwards_that_overlap_are_right(context: Any) -> None:
    """Both go through the same nodes: what the first one has let go of is recomputed."""
    results = []
    for wrap in (plain, reactivate.checkpoint):
        seed_everything()
        stage = Stage([Mlp(), Attention()], wrap)
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
        watched = Recomputed(stage)
        with observed_by(watched):
            out = stage(x * 1).sum()
            with context() if results else nullcontext():
                gradients = [
                    *torch.autograd.grad(out, [x], retain_graph=True),
                    *torch.autograd.grad(out, [*stage.blocks[1].parameters()], retain_graph=True),
                    *torch.autograd.grad(out, [*stage.parameters()], retain_graph=True),
                    *torch.autograd.grad(out, [x]),
                ]
            del out
        results.append(gradients)
    assert all(map(torch.equal, *results))
    assert watched.recomputations >= 2 * watched.regions > 0
    assert watched.alive_bytes() == 0


def test_the_end_of_the_context_frees_what_no_backward_has_read() -> None:
    """Also of a region that saves a single tensor."""
    stage = Stage([Once(), Mlp()], reactivate.checkpoint)
    watched = Recomputed(stage)
    with observed_by(watched):
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
        out = stage(x * 1)
        with reactivate.shared_recompute():
            torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert watched.alive_bytes() > 0
        assert watched.alive_bytes() == 0
    assert weakref.ref(out)() is not None  # and its graph


@pytest.mark.skipif(IS_OLD, reason="this torch has no context for split backwards")
def test_torchs_checkpoint_refuses_a_norm() -> None:
    """A norm reads its input for both halves, which torch's `GraphExecGroup` takes for an error."""
    with pytest.raises(RuntimeError) as caught:
        compared("attention", torchs, upstream.GraphExecGroup)
    assert "unpacked once" in str(caught.value.__cause__ or caught.value)


def test_a_whole_backward_keeps_nothing_in_the_context() -> None:
    """As for the first stage, whose two halves are one."""
    stage = Stage([Mlp(), Attention()], reactivate.checkpoint)
    watched = Recomputed(stage)
    with observed_by(watched), reactivate.shared_recompute():
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
        out = stage(x * 1)
        stage_backward((out,), (torch.ones_like(out),), (x,))
        assert watched.alive_bytes() == 0
    assert watched.recomputations == watched.regions == 2
