"""The roofline: what a call computes and moves, and how long that takes on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from several import each
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from reactivate._torch.modes import FakeTensorMode
from reactivate.planner.cost.devices import DEVICES, find
from reactivate.planner.cost.roofline import bytes_of, flops_of, seconds_of

aten = torch.ops.aten
H100 = find("H100-SXM")


class Call(NamedTuple):
    op: Any
    flops: int
    moved_bytes: int
    seconds: tuple[float, ...]


class Calls(TorchDispatchMode):
    """Every call of an op below it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        seconds = tuple(seconds_of(func, args, kwargs, out, device) for device in DEVICES.values())
        self.calls.append(Call(func, flops_of(func, args, kwargs, out), bytes_of(func, args, kwargs, out), seconds))
        return out


def calls_of(program: Callable[[], object]) -> list[Call]:
    with Calls() as mode:
        program()
    return mode.calls


def call(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    return op, args, kwargs, op(*args, **kwargs)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.block(self.embedding(tokens))).flatten(0, 1), tokens.flatten())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, stride=2, groups=2)
        self.up = nn.ConvTranspose2d(4, 2, 2)

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(image)), inplace=True)
        return self.up(F.max_pool2d(self.second(hidden), 2)).square().mean()


STEPS = {
    "transformer": (Transformer, lambda: torch.arange(48).view(3, 16)),
    "conv": (ConvNet, lambda: torch.ones(2, 3, 16, 16)),
}


def step_of(name: str) -> Callable[[], None]:
    """A step, forward and backward, on tensors of the kind that is current when this is called."""
    make_model, make_input = STEPS[name]
    model, input_ = make_model(), make_input()
    return lambda: model(input_).backward()


# -- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_flops_are_torchs(name: str) -> None:
    step = step_of(name)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        calls = calls_of(step)
    assert sum(each.flops for each in calls) == counter.get_total_flops() > 100_000
    by_op = counter.get_flop_counts()["Global"]
    assert {each.op.overloadpacket for each in calls if each.flops} == set(by_op)
    for packet, flops in by_op.items():
        assert sum(each.flops for each in calls if each.op.overloadpacket is packet) == flops


def attention(groups: int = 1) -> Callable[[], None]:
    query = torch.ones(2, 4, 16, 8, requires_grad=True)
    key, value = torch.ones(2, 4 // groups, 24, 8, requires_grad=True), torch.ones(2, 4 // groups, 24, 8)
    return lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=groups > 1).sum().backward()


@pytest.mark.parametrize("groups", [1, 2])
def test_the_cpus_fused_attention_counts_as_the_products_it_is_made_of(groups: int) -> None:
    assert aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry
    flash = {each.op.overloadpacket: each.flops for each in calls_of(attention(groups))}
    one_product = 2 * 2 * 4 * 16 * 24 * 8
    assert flash[aten._scaled_dot_product_flash_attention_for_cpu] == 2 * one_product
    # The scores are computed again, then four products: one for each of their two inputs.
    assert flash[aten._scaled_dot_product_flash_attention_for_cpu_backward] == 5 * one_product
    with sdpa_kernel(SDPBackend.MATH):
        math = [each.flops for each in calls_of(attention(groups)) if each.flops]
    assert math[:2] == [one_product] * 2


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_fused_attention_counts_as_torch_counts_it(kind: str) -> None:
    query, key, value = torch.ones(2, 4, 16, 8), torch.ones(2, 4, 24, 8), torch.ones(2, 4, 24, 10)
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    inputs, grad = (query, key, value), torch.ones(2, 4, 16, 10)
    assert flops_of(forward.default, inputs, {}, None) == flop_registry[forward](*inputs)
    assert flops_of(backward.default, (grad, *inputs), {}, None) == flop_registry[backward](grad, *inputs)


def test_products_of_groups() -> None:
    tokens, experts = torch.ones(10, 16, dtype=torch.bfloat16), torch.ones(3, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([4, 6, 10], dtype=torch.int32)
    assert flops_of(*call(aten._grouped_mm.default, tokens, experts, ends)) == 2 * 10 * 16 * 8
    assert flops_of(aten._grouped_mm.default, (experts, experts.mT), {}, None) == 3 * 2 * 16 * 8 * 16
    assert flops_of(aten._grouped_mm.default, (tokens.t(), tokens, ends), {}, None) == 2 * 10 * 16 * 16


def test_a_recurrent_layer() -> None:
    lstm = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True)
    input_ = torch.ones(3, 5, 8, requires_grad=True)
    forward = calls_of(lambda: lstm(input_))
    backward = calls_of(lstm(input_)[0].sum().backward)
    products = sum(weight.numel() for weight in lstm.parameters() if weight.ndim == 2) * 2 * 3 * 5
    assert sum(each.flops for each in forward) == products
    assert sum(each.flops for each in backward) == 2 * products


def test_a_formula_of_the_users_counts() -> None:
    with torch.library._scoped_library("reactivate_roofline", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        op = torch.ops.reactivate_roofline.twice
        made = call(op.default, torch.ones(5))
        assert flops_of(*made) == 0 and bytes_of(*made) == 40
        flop_registry[op] = lambda x, out_val: 7 * x.numel()
        try:
            assert flops_of(*made) == 35
        finally:
            del flop_registry[op]


# -- traffic ----------------------------------------------------------------------------------------------------------

MATRIX = torch.ones(4, 6)  # 96 bytes
ROW = torch.ones(6)


@each(
    ("made", "moved_bytes"),
    [
        (lambda: call(aten.add.Tensor, MATRIX, MATRIX.clone()), 3 * 96),
        (lambda: call(aten.mul.Tensor, MATRIX, MATRIX), 2 * 96),  # one tensor is read once
        (lambda: call(aten.add.Tensor, MATRIX, ROW.expand(4, 6)), 2 * 96 + 24),
        (lambda: call(aten.add.Tensor, MATRIX[:, :2], 1), 2 * 32),
        (lambda: call(aten._to_copy.default, MATRIX, dtype=torch.bfloat16), 96 + 48),
        (lambda: call(aten.cat.default, [MATRIX, MATRIX.clone()]), 4 * 96),
        (lambda: call(aten.native_layer_norm.default, MATRIX, [6], ROW, ROW.clone(), 1e-5), 2 * 96 + 48 + 32),
        # What is written to is read as well, but where its content does not matter.
        (lambda: call(aten.add_.Tensor, MATRIX.clone(), MATRIX), 3 * 96),
        (lambda: call(aten._foreach_add_.Scalar, [MATRIX.clone(), ROW.clone()], 1), 2 * (96 + 24)),
        (lambda: call(aten.copy_.default, MATRIX.clone(), ROW), 24 + 96),
        (lambda: call(aten.zero_.default, MATRIX.clone()), 96),
        (lambda: call(aten.bernoulli_.float, MATRIX.clone()), 96),
        (lambda: call(aten.mm.out, MATRIX, MATRIX.t(), out=torch.empty(4, 4)), 2 * 96 + 64),
        # Only the shape of an input is asked for, or some of its rows.
        (lambda: call(aten.zeros_like.default, MATRIX), 96),
        (lambda: call(aten.new_ones.default, MATRIX, [3]), 12),
        (lambda: call(aten.ones.default, [3]), 12),
        (lambda: call(aten.embedding.default, torch.ones(99, 6), torch.tensor([1, 2])), 48 + 16 + 48),
        (lambda: call(aten.index.Tensor, torch.ones(2, 6), [torch.tensor([0] * 9)]), 48 + 72 + 216),
        # A number for the program is an output too.
        (lambda: call(aten._local_scalar_dense.default, torch.ones(())), 4),
        (lambda: call(aten.equal.default, MATRIX, MATRIX.clone()), 2 * 96),
        (lambda: call(aten._to_sparse.default, torch.eye(2)), 16 + 16),  # as if it were dense
        # Nothing at all.
        (lambda: call(aten.t.default, MATRIX), 0),
        (lambda: call(aten.view.default, MATRIX, [24]), 0),
        (lambda: call(aten._unsafe_view.default, MATRIX, [24]), 0),
        (lambda: call(aten.split.Tensor, MATRIX, 2), 0),
        (lambda: call(aten.detach.default, MATRIX), 0),
        (lambda: call(aten.empty_like.default, MATRIX), 0),
        (lambda: call(aten.new_empty_strided.default, MATRIX, [3], [1]), 0),
        (lambda: call(aten.sym_size.int, MATRIX, 0), 0),
        (lambda: call(aten.add.Tensor, torch.empty(0, 3), 1), 0),
        (lambda: call(aten.mm.default, torch.empty(0, 6), MATRIX.t()), 0),
    ],
)
def test_bytes(made: Callable[[], Any], moved_bytes: int) -> None:
    real = made()
    assert bytes_of(*real) == moved_bytes
    assert (seconds_of(*real, H100) == 0) == (moved_bytes == 0)


@pytest.mark.parametrize("name", STEPS)
def test_fake_equals_real(name: str) -> None:
    """But for the questions that fake tensors ask about devices."""
    real = calls_of(step_of(name))
    with FakeTensorMode():
        step = step_of(name)
        fake = calls_of(step)
    real, fake = [each for each in real if each.moved_bytes], [each for each in fake if each.moved_bytes]
    assert fake == real
    assert len(real) >= 20 and sum(each.moved_bytes for each in real) > 10_000


# -- time -------------------------------------------------------------------------------------------------------------


def product(dtype: torch.dtype, size: int = 4096) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    matrix = torch.empty(size, size, dtype=dtype, device="meta")
    return call(aten.mm.default, matrix, matrix)


@each(
    ("dtype", "teraflops_per_second"),
    [(torch.float32, 67), (torch.float64, 67), (torch.bfloat16, 989.5), (torch.float16, 989.5)],
)
def test_a_large_product_takes_its_arithmetic(dtype: torch.dtype, teraflops_per_second: float) -> None:
    seconds = 2 * 4096**3 / (teraflops_per_second * 1e12 * H100.compute_efficiency) + H100.launch_seconds
    assert seconds_of(*product(dtype), H100) == seconds


def test_a_product_of_8_bits() -> None:
    one = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.ones((), device="meta")
    made = aten._scaled_mm.default, (one, one.t(), scale, scale), {}, torch.empty(4096, 4096, device="meta")
    assert seconds_of(*made, H100) == 2 * 4096**3 / (1979e12 * 0.6) + H100.launch_seconds


def test_float32_is_multiplied_as_torch_is_told_to() -> None:
    plain = seconds_of(*product(torch.float32), H100)
    image, weight = torch.empty(8, 64, 32, 32, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    convolution = call(aten.convolution.default, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision, conv.fp32_precision = "tf32", "ieee"
    try:
        assert seconds_of(*product(torch.float32), H100) < plain / 5
        assert seconds_of(*product(torch.float32), find("T4")) > plain, "a device without TF32 does without"
        in_float32 = seconds_of(*convolution, H100)
        conv.fp32_precision = "tf32"
        assert seconds_of(*convolution, H100) < in_float32
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


def test_a_large_sum_takes_its_traffic_and_a_small_one_its_launch() -> None:
    large = torch.empty(2**28, device="meta")
    seconds = 3 * 2**30 / (3350e9 * H100.bandwidth_efficiency) + H100.launch_seconds
    assert seconds_of(*call(aten.add.Tensor, large, large.clone()), H100) == seconds
    small = seconds_of(*call(aten.add.Tensor, torch.ones(1), 1), H100)
    assert H100.launch_seconds < small < 1.001 * H100.launch_seconds


def test_a_device_that_is_better_in_everything_is_never_slower() -> None:
    devices = list(DEVICES.values())
    calls = [each for name in STEPS for each in calls_of(step_of(name))]
    formats = ("float32", "tfloat32")
    pairs = 0
    for index, one in enumerate(devices):
        for other_index, other in enumerate(devices):
            is_better = (
                one.bandwidth_bytes_per_second >= other.bandwidth_bytes_per_second
                and all(one.rate(format_) >= other.rate(format_) for format_ in formats)
                and one.launch_seconds <= other.launch_seconds
            )
            if is_better and index != other_index:
                pairs += 1
                assert all(each.seconds[index] <= each.seconds[other_index] for each in calls)
    assert pairs > 50
