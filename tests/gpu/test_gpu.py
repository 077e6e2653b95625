"""Tests of all that names CUDA: generators, flags, streams, memory. Run on a GPU, counted as not run elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import Case, assert_same, check, run
from torch import Tensor, nn

import reactivate
from reactivate import policies, storage
from reactivate.errors import MutationError

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not getattr(torch, DEVICE).is_available(), reason="needs CUDA: not run"),
]
WIDTH = 64


class Block(nn.Module):
    """Attention, dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, device=DEVICE)
        self.inner, self.outer = (nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(self.norm(x)).view(4, -1, 4, WIDTH // 4).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.1)
        return x + F.dropout(self.outer(h.transpose(1, 2).reshape(x.shape)).tanh(), 0.2)


def block() -> Case:
    return Case(Block(), (torch.randn(32, WIDTH, device=DEVICE, requires_grad=True),))


def device_rng() -> Tensor:
    return getattr(torch, DEVICE).get_rng_state()  # type: ignore[no-any-return]


def backward_on_device(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def backward_after(change: Callable[[], Any]) -> Callable[[list[Tensor], dict[str, Tensor]], None]:
    """A backward of which something else is set than in the forward; afterwards that is still set."""

    def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        change()
        backward_on_device(outputs, inputs)

    return backward


def test_a_block() -> None:
    check(block, backward=backward_on_device)


def test_the_devices_stream_moves_on_once() -> None:
    states = []
    for wrap in (lambda fn: fn, reactivate.checkpoint):
        torch.manual_seed(0)
        case = block()
        wrap(case.fn)(*case.args).sum().backward()
        states.append(device_rng())
    assert torch.equal(*states)


def test_a_draw_on_a_device_that_no_argument_is_on() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.dropout(x.to(DEVICE).sin(), 0.5).exp().cpu() * torch.rand(8, 8, device=DEVICE).cpu()

    check(lambda: Case(fn, (torch.randn(8, 8, requires_grad=True),)), backward=backward_on_device)


@pytest.mark.parametrize("kind", ["fork", "seed", "set"])
def test_streams_that_the_function_sets(kind: str) -> None:
    module = getattr(torch, DEVICE)

    def fn(x: Tensor) -> Tensor:
        before = device_rng()
        with torch.random.fork_rng(device_type=DEVICE) if kind == "fork" else nullcontext():
            if kind == "seed":
                module.manual_seed(3)
            y = F.dropout(x.sin(), 0.5)
        if kind == "set":
            module.set_rng_state(before)
        return F.dropout(y.exp(), 0.5)

    check(lambda: Case(fn, (torch.randn(8, 8, device=DEVICE, requires_grad=True),)), backward=backward_on_device)


def test_a_generator_of_the_devices() -> None:
    def make() -> Case:
        generator = torch.Generator(DEVICE).manual_seed(5)

        def fn(x: Tensor) -> Tensor:
            return x.sin().exp() * torch.rand(8, 8, device=DEVICE, generator=generator)

        return Case(fn, (torch.randn(8, 8, device=DEVICE, requires_grad=True),))

    check(make, backward=backward_on_device)


FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "float32 matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "cudnn": (
        lambda: torch.backends.cudnn.enabled,
        lambda value: setattr(torch.backends.cudnn, "enabled", value),
        False,
    ),
    "cudnn benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        True,
    ),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "fp16 reduction": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", value),
        False,
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_set_between_forward_and_backward(name: str) -> None:
    read, write, value = FLAGS[name]
    before = read()

    @contextmanager
    def restored() -> Iterator[None]:
        try:
            yield
        finally:
            write(before)

    seen = Journal()

    def make() -> Case:
        module = Block()

        def fn(x: Tensor) -> Tensor:
            if reactivate.is_recomputing():
                seen.append(read())
            return module(x)  # type: ignore[no-any-return]

        return Case(fn, (torch.randn(32, WIDTH, device=DEVICE, requires_grad=True),), modules=[module])

    with restored():
        plain = run(make, backward=backward_after(lambda: write(value)))
        write(before)
        checkpointed = run(make, reactivate.checkpoint, backward_after(lambda: write(value)))
        assert read() == value, "what was set is still set"
    assert list(seen) == [before], "the recomputation ran under what the forward ran under"
    assert_same(plain, checkpointed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    module = Block()

    def fn(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype):
            return module(x)  # type: ignore[no-any-return]

    def around(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype):
            return reactivate.checkpoint(module)(x)  # type: ignore[no-any-return]

    def make(function: Callable[[Tensor], Tensor]) -> Callable[[], Case]:
        torch.manual_seed(1)
        module.norm.reset_running_stats()
        module.zero_grad()
        return lambda: Case(function, (torch.randn(32, WIDTH, device=DEVICE, requires_grad=True),), modules=[module])

    plain = run(make(fn), backward=backward_on_device)
    checkpointed = run(make(around), backward=backward_on_device)
    assert checkpointed.recomputations == 1
    assert_same(plain, checkpointed)


def test_a_region_on_a_stream_of_its_own() -> None:
    module = getattr(torch, DEVICE)
    streams = Journal()

    def make() -> Case:
        inner = Block()

        def fn(x: Tensor) -> Tensor:
            streams.append(module.current_stream())
            return inner(x)  # type: ignore[no-any-return]

        return Case(fn, (torch.randn(32, WIDTH, device=DEVICE, requires_grad=True),), modules=[inner])

    side = module.Stream()

    def beside(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:
            side.wait_stream(module.current_stream())
            with module.stream(side):
                out = reactivate.checkpoint(fn)(x)
            module.current_stream().wait_stream(side)
            return out

        return call

    plain = run(make, backward=backward_on_device)
    count = len(streams)
    checkpointed = run(make, beside, backward_on_device)
    assert list(streams)[count:] == [side, side], "the recomputation runs on the stream of the forward"
    assert_same(plain, checkpointed)


def test_results_kept_in_the_memory_of_the_host() -> None:
    policy = policies.save_ops("linear", storage=storage.Host(least_bytes=0, last=0))
    module = getattr(torch, DEVICE)

    def kept(wrap: Callable[[Any], Any]) -> int:
        case = block()
        before = module.memory_allocated()
        out = wrap(case.fn)(*case.args)
        found = module.memory_allocated() - before - out.nbytes
        out.sum().backward()
        return int(found)

    check(block, backward=backward_on_device, policy=policy)
    on_host = kept(lambda fn: reactivate.checkpoint(fn, policy=policy))
    on_device = kept(lambda fn: reactivate.checkpoint(fn, policy=policies.save_ops("linear")))
    assert on_host < on_device, "what is kept is not on the device"


def test_a_fused_optimizers_step_between_forward_and_backward() -> None:
    """Fused kernels write to parameters and move no version: refused where a saved tensor comes from one (Rule 15)."""
    module = Block()
    x = torch.randn(32, WIDTH, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    module(x).sum().backward()
    out = reactivate.checkpoint(module)(x)
    optimizer.step()
    with pytest.raises(MutationError):
        out.sum().backward()


def test_the_peak_is_lower() -> None:
    module = getattr(torch, DEVICE)

    def peak(wrap: Callable[[Any], Any]) -> int:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)).to(DEVICE) for _ in range(8)]
        x = torch.randn(1 << 14, WIDTH, device=DEVICE, requires_grad=True)
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        h = x
        for layer in layers:
            h = wrap(layer)(h)
        h.sum().backward()
        return int(module.max_memory_allocated() - before)

    peak(lambda fn: fn)  # what the first kernels allocate for good
    assert peak(reactivate.checkpoint) < 0.7 * peak(lambda fn: fn)
