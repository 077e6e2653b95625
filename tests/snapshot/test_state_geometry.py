"""State tensors whose shape, strides or memory change in place: rewound, in the old memory where that is still theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Watched, assert_bitwise, compare
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.errors import MutationError
from reactivate.storage import Host

Act = Callable[["Holder"], Any]


class Holder(nn.Module):
    """Reads a buffer after some code has changed it in place."""

    buffer: Tensor
    view: Tensor | None

    def __init__(self, make: Callable[[], Tensor], act: Act) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4_100))
        self.register_buffer("buffer", make())
        self.register_buffer("view", None)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        dense = self.buffer if self.buffer.layout is torch.strided else self.buffer.to_dense()
        places = torch.arange(dense.numel()).view(dense.shape).float()
        read = (dense * places.cos()).sum() * dense.ndim + len(dense) + self.weight[:4]
        return ((self.linear(x) * read).sin() * read).sin()


def steps(wrap: Any, make: Callable[[], Tensor], act: Act, between: Act) -> list[Any]:
    """Run four steps of two microbatches."""
    module = Holder(make, act)
    fn = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(4):
        inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
        outputs = [fn(x) for x in inputs]
        between(module)
        for x, out in zip(inputs, outputs, strict=True):
            out.sum().backward()
            found += [out.detach().clone(), x.grad]
        tensors = [item.to_dense() for item in module.buffers()]
        found += [item.detach().clone() for item in (*tensors, *module.parameters())]
        found += [item.grad.clone() for item in module.parameters() if item.grad is not None]
        found += [(item.shape, item.stride(), item.storage_offset()) for item in tensors]
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_right(*program: Any) -> None:
    watched = compare(lambda wrap: steps(wrap, *program))
    assert watched.recomputations >= 8, "regions were recomputed"


def nothing(module: Holder) -> None:
    """Change nothing."""


def transpose_and_write(module: Holder) -> None:
    module.buffer.t_()
    module.buffer[0].mul_(0.9)


def write_through_view(module: Holder) -> None:
    if module.view is None:
        module.view = module.buffer[:1]
    module.buffer.t_()
    module.view.mul_(1.5)


def grow(module: Holder) -> None:
    module.buffer.resize_(module.buffer.numel() + 3, 2)
    module.buffer.fill_(module.buffer.numel() / 100)


FORWARDS: dict[str, Act] = {
    "transpose": lambda module: module.buffer.t_(),
    "transpose_and_write": transpose_and_write,
    "write_through_view": write_through_view,
    "swap_axes": lambda module: module.buffer.unsqueeze_(0).transpose_(0, 1).squeeze_(1).t_(),
    "grow": grow,
    "shrink": lambda module: module.buffer.resize_(module.buffer.shape[0] - 1, 2).mul_(1.01),
    "move_on": lambda module: module.buffer.as_strided_((2, 2), (2, 1), module.buffer.storage_offset() + 1),
    "set_other": lambda module: module.buffer.set_(module.buffer * 1.5),
}


@pytest.mark.parametrize("rows", [20, 5_000])
@pytest.mark.parametrize("act", FORWARDS)
def test_a_forward_changes_the_geometry(act: str, rows: int) -> None:
    assert_right(lambda: torch.randn(rows, 2), FORWARDS[act], nothing)


@pytest.mark.parametrize("rows", [20, 5_000])
@pytest.mark.parametrize("act", FORWARDS)
def test_the_geometry_changes_before_the_backward(act: str, rows: int) -> None:
    assert_right(lambda: torch.randn(rows, 2), nothing, FORWARDS[act])


def fill(module: Holder) -> None:
    size = 20 if module.buffer.numel() < 4_000 else 4_096
    module.buffer.resize_(size).fill_(0.5)


@pytest.mark.parametrize("size", [0, 20, 4_097])
def test_vectors_that_are_resized(size: int) -> None:
    def act(module: Holder) -> None:
        module.buffer.resize_(module.buffer.numel() + 5).fill_(0.3)

    assert_right(lambda: torch.ones(size), act, nothing)
    assert_right(lambda: torch.ones(size), act, lambda module: module.buffer.resize_(3))
    assert_right(lambda: torch.ones(size), fill, act)


def test_observers_that_resize_their_statistics() -> None:
    """Two empty buffers that the first forward resizes, as in quantization-aware training."""
    from torch.ao.quantization import PerChannelMinMaxObserver

    def run(wrap: Any) -> list[Any]:
        module = nn.Sequential(nn.Linear(4, 4), PerChannelMinMaxObserver(ch_axis=1), nn.Tanh(), nn.Linear(4, 4))
        found: list[Any] = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            out = wrap(module)(x)
            out.sum().backward()
            found += [out, x.grad, *(item.clone() for item in module.buffers())]
        return found

    compare(run)


def own_memory(module: Holder) -> None:
    module.buffer = torch.ones(len(module.buffer))


def replace(module: Holder) -> None:
    module.buffer = module.weight.data[:20]


def register(module: Holder) -> None:
    del module.buffer
    module.register_buffer("buffer", module.weight.detach())


def share(module: Holder) -> None:
    module.buffer.data = module.weight.data


def set_to(module: Holder) -> None:
    module.buffer.set_(module.weight.data)


@pytest.mark.parametrize("size", [20, 4_100])
@pytest.mark.parametrize("between", [replace, register, share, set_to], ids=lambda item: item.__name__)
def test_a_buffer_is_given_the_memory_of_a_parameter(between: Act, size: int) -> None:
    assert_right(lambda: torch.ones(size), nothing, between)

    def alternately(module: Holder) -> None:
        is_shared = module.buffer.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()
        (own_memory if is_shared else between)(module)

    assert_right(lambda: torch.ones(size), nothing, alternately)


def double(module: Holder) -> None:
    module.buffer.add_(module.buffer)


@pytest.mark.parametrize("rows", [20, 5_000])
def test_buffers_of_mkldnn(rows: int) -> None:
    make = lambda: torch.randn(rows, 2).to_mkldnn()  # noqa: E731
    assert_right(make, nothing, double)
    assert_right(make, double, nothing)
    assert_right(make, double, lambda module: setattr(module, "buffer", make()))


# -- parameters whose memory the forward swaps ------------------------------------------------------------------------


class Swapping(nn.Module):
    """Gives a parameter other memory in each call from one on."""

    def __init__(self, first: int, size: int, *, is_frozen: bool) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(4, size), nn.Linear(size, 2)
        self.linear.requires_grad_(not is_frozen)
        self.calls, self.first = 0, first

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls >= self.first:
            with torch.no_grad():
                self.linear.weight.data = self.linear.weight.data * 0.5
                self.linear.bias.data = self.linear.bias.data * 0.5
        return self.out(self.linear(x).sin()).cos()  # type: ignore[no-any-return]


SWAPS: dict[str, dict[str, Any]] = {
    "default": {},
    "metadata": {"check": "metadata"},
    "none": {"check": "none"},
    "kept on the host": {"check": "metadata", "policy": policies.save_ops("linear", storage=Host())},
}


@pytest.mark.parametrize("options", SWAPS)
@pytest.mark.parametrize("size", [4, 5_000])
@pytest.mark.parametrize("is_frozen", [True, False])
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_swapped_parameter_is_refused_once_and_then_right(
    first: int, is_frozen: bool, size: int, options: str
) -> None:
    torch.manual_seed(0)
    model = Swapping(first, size, is_frozen=is_frozen)
    other = copy.deepcopy(model)
    checkpointed = reactivate.checkpoint(other, **SWAPS[options])
    refused, watched = [], Watched()
    for number in range(1, 7):
        x = torch.randn(2, 4, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        model(x).sum().backward()
        with observed_by(watched):
            out = checkpointed(y).sum()
            try:
                out.backward()
                assert_bitwise(x.grad, y.grad, f"call {number}")
            except MutationError:
                refused.append(number)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert_bitwise(one.detach(), two.detach(), "a parameter is swapped once in each call")
            if number not in refused and one.grad is not None and two.grad is not None:
                assert_bitwise(one.grad, two.grad, f"call {number}")
            if one.grad is not None:
                one.grad = two.grad = None
    assert refused == [first] and watched.recomputations >= 5, "other calls were recomputed"


def test_a_parameter_that_a_later_forward_swaps_is_refused() -> None:
    model = Swapping(2, 4, is_frozen=False)
    fn = reactivate.checkpoint(model, check="none")
    outputs = [fn(torch.ones(2, 4)).sum() for _ in range(2)]
    with pytest.raises(MutationError, match="linear"):
        outputs[0].backward()


def test_parameters_without_memory_of_their_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.sparse = nn.Parameter(torch.eye(4).to_sparse())
            self.empty = nn.Parameter(torch.empty(4, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.sparse, self.linear(x)).sin().cos()

    model = Model()

    def gradient(wrap: Any) -> Any:
        x = torch.eye(4, requires_grad=True)
        return torch.autograd.grad(wrap(model)(x).sum(), x)

    assert compare(gradient).recomputations == 1
