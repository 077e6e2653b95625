"""Training on a GPU as people do it: mixed precision, streams, graphs, compilers, budgets. Not run where there is none."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Case, assert_bitwise, assert_same, check, run
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate.errors import UnsupportedError

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not getattr(torch, DEVICE).is_available(), reason="needs CUDA: not run"),
]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@pytest.fixture(autouse=True)
def same_bits_each_time() -> Iterator[None]:
    """Keep kernels away that add in another order each time: not even the plain model is equal to itself with them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def plainly(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def data(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True, **options)


class Layer(nn.Module):
    """Attention, dropout and a gated feed-forward of a decoder."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=0.1 * self.training)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1, self.training)


class Decoder(nn.Module):
    """A small language model."""

    def __init__(self, layers: int = 4, width: int = 128, words: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def decoder(**sizes: int) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**sizes).to(DEVICE)


def tokens_of(step: int, batch: int = 4, length: int = 64) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(step)).to(DEVICE)


# -- training ---------------------------------------------------------------------------------------------------------

PRECISIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float32": nullcontext,
    "bfloat16": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "float16": lambda: torch.autocast(DEVICE, torch.float16),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "for each": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}
POLICIES: dict[str, Callable[[], Any]] = {
    "full": policies.full,
    "every 2nd": lambda: policies.recompute_every(2),
    "attention saved": lambda: policies.first_match(policies.save("attention"), policies.full()),
    "matmuls saved": lambda: policies.first_match(policies.save_ops("linear"), policies.full()),
}


def train(
    model: nn.Module, around: Callable[[], AbstractContextManager[Any]], make: Any, steps: int = 4
) -> list[Tensor]:
    """The losses, the parameters and the device's stream after some steps, each of two microbatches."""
    torch.manual_seed(1)
    optimizer, scaler, losses = make(model.parameters()), torch.amp.GradScaler(DEVICE), []
    for step in range(steps):
        for half in range(2):
            with around():
                loss = model(tokens_of(2 * step + half))
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach() for parameter in model.parameters()), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps(precision: str, optimizer: str, policy: str) -> None:
    around, make = PRECISIONS[precision], OPTIMIZERS[optimizer]
    plain = train(decoder(), around, make)
    model = decoder()
    reactivate.apply(model, POLICIES[policy]())
    for index, (one, other) in enumerate(zip(plain, train(model, around, make), strict=True)):
        assert_bitwise(one, other, f"value {index}")


def test_a_budget_is_kept() -> None:
    """The peak that the device counts, of a step with AdamW, on a batch as large as was planned for."""
    model, tokens = decoder(layers=8, width=256), tokens_of(0, 32, 256)

    def step(model: nn.Module) -> None:
        model(tokens).backward()

    step(model)  # the workspaces of the first kernels stay
    model.zero_grad()
    plain = peak_of(lambda: step(model))
    model.zero_grad()
    plan = reactivate.plan(model, (tokens,), budget="40%")
    reactivate.apply(model, plan)
    step(model)
    model.zero_grad()
    torch.cuda.empty_cache()
    found = peak_of(lambda: step(model))
    assert found <= plan.budget_bytes, f"{found} bytes, promised {plan.budget_bytes}; plain {plain}"
    assert found < 0.6 * plain


def peak_of(step: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def test_the_bytes_of_the_device_stay_flat() -> None:
    model = decoder()
    reactivate.apply(model, policies.full())
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(60):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.cuda.memory_allocated())
    assert found[20] == found[-1]


# -- layers whose kernels have state ----------------------------------------------------------------------------------

LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "cuDNN's LSTM with dropout": lambda: (nn.LSTM(16, 16, num_layers=2, dropout=0.3), (data(5, 3, 16),)),
    "cuDNN's GRU": lambda: (nn.GRU(16, 16, bidirectional=True), (data(5, 3, 16),)),
    "attention": lambda: (nn.MultiheadAttention(32, 4, dropout=0.2), (data(5, 3, 32),) * 3),
    "an encoder layer": lambda: (nn.TransformerEncoderLayer(32, 4, 64), (data(5, 3, 32),)),
    "convolutions, channels last": lambda: (
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(16, 8, 3)).to(
            memory_format=torch.channels_last
        ),
        (data(4, 8, 12, 12),),
    ),
    "instance norm with statistics": lambda: (
        nn.Sequential(nn.Conv1d(4, 8, 3), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)),
        (data(4, 4, 12),),
    ),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), (data(4, 16),)),
    "alpha dropout": lambda: (nn.Sequential(nn.Linear(16, 16), nn.AlphaDropout(0.3), nn.SELU()), (data(4, 16),)),
    "random leaks": lambda: (nn.Sequential(nn.Linear(16, 16), nn.RReLU(), nn.Linear(16, 4)), (data(4, 16),)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer(name: str) -> None:
    def make() -> Case:
        module, args = LAYERS[name]()
        return Case(module.to(DEVICE), args)

    check(make)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_kernels_of_attention(kernel: str, dtype: torch.dtype) -> None:
    """With dropout, whose seed and offset some kernels keep on the device; recomputed after the choice has changed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def fn(x: Tensor) -> Tensor:
        q, k, v = (x * scale for scale in (1, 0.5, 2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2).exp()

    def inside(wrap: Wrap) -> Wrap:
        def wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
            def call(x: Tensor) -> Any:
                with sdpa_kernel(getattr(SDPBackend, kernel)):
                    return wrap(fn)(x)

            return call

        return wrapped

    def make() -> Case:
        return Case(fn, (data(2, 4, 64, 32, dtype=dtype),))

    checkpointed = run(make, inside(reactivate.checkpoint))
    assert checkpointed.recomputations == 1
    assert_same(run(make, inside(plainly)), checkpointed)


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", ["of the inputs, inside", "of the parameters, inside", "between two forwards"])
def test_weights_that_autocast_has_cast_stay_cast(backward: str) -> None:
    """A recomputation on the device's thread drops none of what the autocast of the caller's thread has cast: a weight
    that is cast once gathers its gradients in the low precision.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x).sin()
            if backward == "of the inputs, inside":
                (inner,) = torch.autograd.grad(h.float().sum(), x, retain_graph=True)
                h = h + inner.detach()
            return h

    def step(wrap: Wrap) -> list[Tensor]:
        torch.manual_seed(0)
        block, x = Block().to(DEVICE), data(8, 16)
        wrapped = wrap(block)
        with torch.autocast(DEVICE, torch.bfloat16):
            out = wrapped(x)
            if backward == "of the parameters, inside":
                found = torch.autograd.grad(out.float().sum(), list(block.parameters()), retain_graph=True)
                out = out + sum(gradient.sum() for gradient in found)
            if backward == "between two forwards":
                out.float().sum().backward(retain_graph=True)
            out = block(out)
        out.float().square().mean().backward()
        return [x.grad, *(parameter.grad for parameter in block.parameters())]

    for one, other in zip(step(plainly), step(reactivate.checkpoint), strict=True):
        assert_bitwise(one, other, "gradient")


FIRST_ATTENTION = """
import torch, reactivate
from torch.nn.functional import scaled_dot_product_attention

def attend(x):
    return scaled_dot_product_attention(x.sin(), x, x, is_causal=True).cos()

x = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
reactivate.checkpoint(attend)(x).float().sum().backward()
found, x.grad = x.grad, None
attend(x).float().sum().backward()
assert torch.equal(found, x.grad)
"""


def test_the_first_attention_of_a_process() -> None:
    """torch sets the order of its kernels in it: the recomputation goes back to that order, and not to one before it."""
    done = subprocess.run([sys.executable, "-c", FIRST_ATTENTION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- threads, streams and graphs --------------------------------------------------------------------------------------


def test_threads_recompute_side_by_side() -> None:
    """The device's generators are no reason to wait where nobody draws."""
    torch.cuda.init()
    meeting = threading.Barrier(2, timeout=30)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        if reactivate.is_recomputing():
            meeting.wait()
        return y.exp()

    errors: list[BaseException] = []
    inputs = [torch.randn(8, requires_grad=True) for _ in range(2)]  # not in the threads, which would draw then

    def work(x: Tensor) -> None:
        try:
            reactivate.checkpoint(fn)(x).sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_copies_to_and_from_the_host() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x.sin().pin_memory().to(DEVICE, non_blocking=True)
        return h.exp().to("cpu", non_blocking=False).cos()

    check(lambda: Case(fn, (torch.randn(64, 64, requires_grad=True),)))


def test_a_function_with_a_stream_of_its_own() -> None:
    side = torch.cuda.Stream()

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = h.exp() @ h
            h.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        beside.record_stream(torch.cuda.current_stream())
        return beside.cos() * h

    check(lambda: Case(fn, (data(256, 256),)))


def test_a_graph_of_a_whole_step() -> None:
    """A captured step with regions that draw nothing, run on other data; with generators it is refused by name."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3))).to(DEVICE)

    def captured(wrap: Wrap) -> list[Tensor]:
        mine = copy.deepcopy(model)
        blocks = [wrap(block) for block in mine]
        x = torch.zeros(16, 64, device=DEVICE, requires_grad=True)

        def step() -> None:
            h = x
            for block in blocks:
                h = block(h)
            h.square().mean().backward()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                mine.zero_grad(set_to_none=True)
                x.grad = None
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        with torch.no_grad():
            x.copy_(torch.randn(16, 64, generator=torch.Generator().manual_seed(3)))
        graph.replay()
        torch.cuda.synchronize()
        return [x.grad.clone(), *(parameter.grad.clone() for parameter in mine.parameters())]

    without = reactivate.guards.DEFAULT.without("rng")
    ours = captured(lambda fn: reactivate.checkpoint(fn, guards=without, check="metadata"))
    for one, other in zip(captured(plainly), ours, strict=True):
        assert_bitwise(one, other, "gradient")
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        captured(reactivate.checkpoint)


# -- compilers --------------------------------------------------------------------------------------------------------


def test_compiled_code_inside_of_a_region() -> None:
    model = decoder(layers=2)
    for layer in model.layers:
        layer.up.compile()
    other = copy.deepcopy(model)
    reactivate.apply(other, policies.full())
    found = []
    for each in (model, other):
        torch.manual_seed(2)
        each(tokens_of(0)).backward()
        found.append([parameter.grad for parameter in each.parameters()])
    for one, two in zip(*found, strict=True):
        assert_bitwise(one, two, "gradient")


def test_a_compiled_model_with_regions() -> None:
    """Close, not equal: a compiler may fuse a recomputation otherwise than the forward."""
    found = []
    for policy in (None, policies.full()):
        model = decoder(layers=2).eval()
        if policy is not None:
            reactivate.apply(model, policy)
        torch.compile(model)(tokens_of(0)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# -- kernels that give other bits each time ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["index_add", "scatter_add", "cumsum", "embedding bag"])
def test_atomic_additions_are_no_mismatch(name: str) -> None:
    """Kernels that add in another order each time give other last bits; training goes on as with the plain model."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(7, (100_000,), generator=generator).to(DEVICE)

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        if name == "index_add":
            h = torch.zeros(7, 4, device=DEVICE).index_add(0, index, h)
        elif name == "scatter_add":
            h = torch.zeros(7, 4, device=DEVICE).scatter_add(0, index[:, None].expand_as(h), h)
        elif name == "cumsum":
            h = h.cumsum(0)
        else:
            h = F.embedding_bag(index, h[:7], torch.arange(0, 100_000, 10_000, device=DEVICE), mode="sum")
        return (h / 300).sin().cos()

    torch.use_deterministic_algorithms(False)
    for _ in range(6):
        x = data(100_000, 4)
        reactivate.checkpoint(fn)(x).sum().backward()
        gradient, x.grad = x.grad, None
        fn(x).sum().backward()
        torch.testing.assert_close(gradient, x.grad, rtol=1e-2, atol=1e-2)  # no two runs give the same bits
