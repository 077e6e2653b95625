"""Rule 2: what is kept, and for how long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from journal import Journal
from memory import allocated_by, without_collector
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import reactivate
from reactivate._passes.observing import observed_by
from reactivate._region.region import Region
from reactivate._snapshot.random_streams import STREAMS
from reactivate.policies import save_ops


@pytest.fixture
def no_collector() -> Iterator[None]:
    with without_collector():
        yield


def block(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))


class Watch:
    """Weak references to every region that ran."""

    def __init__(self) -> None:
        self.regions: list[weakref.ref[Region]] = []
        self.recomputations = 0

    def forward_done(self, region: Region) -> None:
        self.regions.append(weakref.ref(region))

    def recomputation_done(self, region: Region) -> None:
        self.recomputations += 1

    def counts(self) -> tuple[int, int]:
        """Of forward passes and of recomputations."""
        return len(self.regions), self.recomputations

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.regions)


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def same(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.fast_ways("a state of the generator is a tensor there")
@pytest.mark.unfenced(reason="an exit copies on this device")
def test_kept_after_the_forward_are_the_inputs_and_the_snapshots() -> None:
    """The input is kept. The call before it drew random numbers; the snapshot of a generator is bytes, and no tensor."""
    module, x = block(), torch.randn(64, 32, requires_grad=True)
    fn = reactivate.checkpoint(module, check="metadata")
    fn(x)  # the guards' first look at the module
    seen: list[int] = []
    with saved_tensors_hooks(lambda tensor: (seen.append(size(tensor)), tensor)[1], lambda tensor: tensor):
        kept = allocated_by(lambda: fn(x))
    assert seen == [size(x)], "the input, once"
    assert kept.left_bytes == size(kept.result)

    plain = allocated_by(lambda: module(x))
    assert plain.left_bytes > 4 * kept.left_bytes


@pytest.mark.fast_ways("a state of the generator is a tensor there")
def test_regions_between_two_draws_share_one_snapshot() -> None:
    module, x = block().eval(), torch.randn(64, 32, requires_grad=True)
    fn = reactivate.checkpoint(module, check="metadata")
    first = fn(x)
    kept = allocated_by(lambda: [fn(x) for _ in range(10)])
    assert kept.left_bytes == 10 * size(first), "the results"
    torch.rand(1)
    kept = allocated_by(lambda: [fn(x) for _ in range(10)])
    assert kept.left_bytes == 10 * size(first)
    snapshots = [STREAMS.now() for _ in range(2)]
    assert snapshots[0] is snapshots[1]
    torch.rand(1)
    assert STREAMS.now() is not snapshots[0]


def test_statistics_of_batch_norm_are_kept_and_named_in_the_docs() -> None:
    """In training two running statistics, one counter: `num_batches_tracked` was written to."""
    module, x = nn.BatchNorm1d(32), torch.randn(64, 32, requires_grad=True)
    fn = reactivate.checkpoint(module, check="metadata")
    fn(x)
    kept = allocated_by(lambda: fn(x))
    statistics = sum(size(buffer) for buffer in module.buffers())
    assert kept.left_bytes == size(kept.result) + statistics


@pytest.mark.unfenced(reason="versions are not relied on there, so each region has a copy")
def test_a_buffer_that_nobody_writes_to_is_copied_once() -> None:
    """All regions refer to one copy; a write is followed by one more."""
    module = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    module.register_buffer("table", torch.randn(512, 512))
    x = torch.randn(64, 32, requires_grad=True)
    fn = reactivate.checkpoint(module, check="metadata")
    first = allocated_by(lambda: fn(x))
    assert first.left_bytes >= size(module.table)
    kept = allocated_by(lambda: [fn(x) for _ in range(10)])
    assert kept.left_bytes == 10 * size(first.result)
    assert kept.peak_bytes < size(module.table), "and it is copied only the first time"
    module.table.add_(1)
    kept = allocated_by(lambda: [fn(x) for _ in range(10)])
    assert kept.left_bytes == 10 * size(first.result) + size(module.table)


def test_recomputed_tensors_go_as_the_backward_takes_them() -> None:
    """The peak of a deep chain's backward is one block's, not the chain's."""
    blocks = nn.ModuleList(block() for _ in range(8)).eval()
    x = torch.randn(256, 32, requires_grad=True)

    def step(wrap: Any) -> None:
        h = x
        for module in blocks:
            h = wrap(module)(h)
        h.sum().backward()

    for parameter in [x, *blocks.parameters()]:
        parameter.grad = torch.zeros_like(parameter)
    step(reactivate.checkpoint)
    plain, ours = allocated_by(lambda: step(lambda fn: fn)), allocated_by(lambda: step(reactivate.checkpoint))
    assert ours.peak_bytes < 0.35 * plain.peak_bytes
    assert abs(ours.left_bytes) < 64, "nothing is left"


@pytest.mark.parametrize("determinism", ["metadata", "every"])
@pytest.mark.parametrize("retain_graph", [False, True])
def test_nothing_outlives_the_backward(retain_graph: bool, determinism: Any, no_collector: None) -> None:
    module, x = block().eval(), torch.randn(64, 32, requires_grad=True)
    watch = Watch()
    for parameter in [x, *module.parameters()]:
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        with observed_by(watch):
            out = reactivate.checkpoint(module, check=determinism)(x)
            out.sum().backward(retain_graph=retain_graph)

    step()
    gc.collect()  # what torch imports on the way
    step()
    assert gc.collect() == 0
    assert allocated_by(step).left_bytes == 0
    assert watch.alive() == 0


def test_retain_graph_keeps_no_recomputed_tensor(no_collector: None) -> None:
    module, x = block().eval(), torch.randn(64, 32, requires_grad=True)
    fn = reactivate.checkpoint(module, check="metadata")
    fn(x)
    out = fn(x)
    for parameter in [x, *module.parameters()]:
        parameter.grad = torch.zeros_like(parameter)
    assert allocated_by(lambda: out.sum().backward(retain_graph=True)).left_bytes == 0
    # A partial backward leaves recomputed tensors that nobody asked for.
    assert allocated_by(lambda: torch.autograd.grad(out.sum(), module[3].bias, retain_graph=True)[0]).left_bytes <= 128


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        y = x.exp()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize(
    ("fn", "policy"), [(Exponential.apply, None), (torch.exp, None), (lambda x: x.exp().sum(), save_ops("sum"))]
)
def test_retain_graph_keeps_the_one_tensor_of_a_region_no_longer(fn: Any, policy: Any, no_collector: None) -> None:
    checkpointed = reactivate.checkpoint(fn, check="metadata", policy=policy)
    x = torch.randn(64, 32, requires_grad=True)
    checkpointed(x)
    out = checkpointed(x)
    x.grad = torch.zeros_like(x)
    assert allocated_by(lambda: out.sum().backward(retain_graph=True)).left_bytes == 0


def test_a_forward_without_a_backward_leaves_nothing(no_collector: None) -> None:
    module, x = block(), torch.randn(64, 32, requires_grad=True)
    watch = Watch()
    with observed_by(watch):
        out = reactivate.checkpoint(module)(x)
    assert watch.alive() == 1
    del out
    assert watch.alive() == 0


@pytest.mark.unfenced(reason="the alias of an argument is left, a copy on this device")
@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: saved_tensors_hooks(same, same)])
@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"check": "every"}, {"policy": save_ops("cos")}])
def test_hooks_inside_of_a_region_hold_no_region(options: Any, hooks: Any, no_collector: None) -> None:
    """Hooks that give back an op's own output tie the recomputation's graph, which no backward goes through, into a cycle."""
    x = torch.randn(64, 32, requires_grad=True)
    x.grad = torch.zeros_like(x)
    watch = Watch()

    def fn(x: Tensor) -> Tensor:
        h = x.sin().tanh()
        with hooks():
            h = h.exp().sigmoid()
        return h.cos().sin()

    def step(wrap: Any) -> None:
        wrap(fn)(x.cos()).sum().backward()

    step(lambda fn: reactivate.checkpoint(fn, **options))
    with observed_by(watch):
        step(lambda fn: reactivate.checkpoint(fn, **options))
    assert watch.counts() == (1, 1)
    assert watch.alive() == 0

    ours = allocated_by(lambda: step(lambda fn: reactivate.checkpoint(fn, **options)))
    torchs = allocated_by(lambda: step(lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False)))
    assert ours.left_bytes <= torchs.left_bytes, "the graph itself is torch's"


def test_a_failed_recomputation_holds_no_region_after_another_one_did(no_collector: None) -> None:
    """Its graph, which hooks tie into a cycle, must not hold the error either: that knows the frames."""
    x = torch.randn(64, 32, requires_grad=True)
    watch, calls = Watch(), Journal()

    def fn(x: Tensor) -> Tensor:
        calls.append("fn")
        h = x.sin()
        with save_on_cpu():
            h = h.tanh().exp().sin()
        return h[:1].cos() if len(calls) == 2 else h.cos().sin()

    with observed_by(watch):
        out = reactivate.checkpoint(fn)(x.cos()).sum()
    with pytest.raises(reactivate.errors.ReactivateError):
        out.backward(retain_graph=True)
    out.backward()
    del out
    gc.collect()  # the exception itself is a cycle of frames
    assert watch.alive() == 0


def test_a_list_made_for_each_call_goes_with_it(no_collector: None) -> None:
    """A region finds a closed-over list through its cell: held directly, it would tie graph, region and list together."""
    x = torch.randn(64, 32, requires_grad=True)
    watch = Watch()
    collected: list[Tensor] = []
    last: Tensor | None = None

    def fn(x: Tensor) -> Tensor:
        nonlocal last
        h = x.sin().exp()
        collected.append(h)
        last = h
        return h.cos()

    checkpointed = reactivate.checkpoint(fn)
    with observed_by(watch):
        for _ in range(5):
            collected = []
            checkpointed(x)
            assert len(collected) == 1 and last is not None
            assert watch.alive() == 1, "that of the list that is there"
    collected, last = [], None
    assert watch.alive() == 0


def test_a_closure_that_collects_outputs_goes_after_its_backward(no_collector: None) -> None:
    """A region holds its function and so its list of outputs, as torch's checkpoint does, until there was a backward."""
    x = torch.randn(64, 32, requires_grad=True)
    watch = Watch()

    def step() -> None:
        collected: list[Tensor] = []

        def fn(x: Tensor) -> Tensor:
            h = x.sin().exp()
            collected.append(h)
            return h.cos()

        reactivate.checkpoint(fn)(x).sum().backward()
        assert len(collected) == 1, "the recomputation's was taken out again"

    with observed_by(watch):
        step()
    assert watch.counts() == (1, 1)
    assert watch.alive() == 0


def test_errors_in_the_backward_leave_nothing(no_collector: None) -> None:
    x = torch.randn(64, 32, requires_grad=True)
    watch = Watch()

    def fn(x: Tensor) -> Tensor:
        if reactivate.is_recomputing():
            raise ValueError("in the recomputation")
        return x.sin().exp().cos()

    def step() -> None:
        out = reactivate.checkpoint(fn)(x)
        with pytest.raises(ValueError, match="in the recomputation"):
            out.sum().backward()

    with observed_by(watch):
        step()
    gc.collect()  # the exception itself is a cycle of frames
    assert watch.alive() == 0


def test_two_thousand_steps_are_flat() -> None:
    module, x = block(8), torch.randn(4, 8, requires_grad=True)
    inner = reactivate.checkpoint(block(8))
    outer = reactivate.checkpoint(lambda x: inner(module(x)))
    there = {
        id(item): item for item in gc.get_objects() if isinstance(item, Tensor)
    }  # of other tests, some without a size

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            outer(x).sum().backward()
        gc.collect()
        tensors = [item for item in gc.get_objects() if isinstance(item, Tensor) and id(item) not in there]
        return len(tensors), sum(size(tensor) for tensor in tensors if tensor.layout is torch.strided)

    first = steps(10)
    assert steps(2000) == first
