"""Saved tensors without a gradient, before a saved call: no later tensor shows that one of them has changed."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import Watched, assert_bitwise, leaf, plainly, seed_everything
from several import each
from state_programs import Wrap, backward
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes import check
from reactivate._passes.observing import observed_by
from reactivate.errors import RecomputeMismatchError

UNSEEN = "that the library cannot see"
WITHOUT_STREAMS = reactivate.guards.DEFAULT.without("rng")


@pytest.fixture(autouse=True)
def without_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have left some running; where there are any, no memory of ops is filled."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


# -- a difference is refused ------------------------------------------------------------------------------------------


def from_counter() -> Callable[[], Tensor]:
    numbers = (ctypes.c_double * 1)(0.0)

    def mask() -> Tensor:
        numbers[0] += 1
        return (torch.arange(8) < numbers[0]).float()

    return mask


def from_system() -> Callable[[], Tensor]:
    return lambda: torch.tensor(list(os.urandom(8))).float()


def from_environment() -> Callable[[], Tensor]:
    return lambda: (torch.arange(8) < int(os.environ["KEPT"])).float()


SOURCES = [from_counter, from_system, from_environment]


class Drop(torch.autograd.Function):
    """Draws its mask itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Callable[[], Tensor]) -> Tensor:
        kept = mask()
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


MASKED: dict[str, Callable[[Tensor, Callable[[], Tensor]], Tensor]] = {
    "product": lambda x, mask: x * mask(),
    "in place": lambda x, mask: x.clone().mul_(mask()),
    "into empty memory": lambda x, mask: x * torch.empty(8).copy_(mask()),
    "custom function": lambda x, mask: Drop.apply(x, mask),
    "indices of an op's own": lambda x, mask: x[:, mask().long().remainder(8).tolist()],
    "einsum": lambda x, mask: torch.einsum("ij,kj->ij", x, mask()[None]),
    "slope of an op's own": lambda x, mask: F.prelu(x - 2, mask()),
}
WEIGHT = torch.randn(8, 8)


class Masked(nn.Module):
    def __init__(self, masked: Callable[[Tensor], Tensor], last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.masked, self.last = masked, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.masked(x))


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, WEIGHT)


LAST: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "op": (lambda x: F.linear(x, WEIGHT), policies.save_ops("linear")),
    "op that saves its output": (torch.exp, policies.save_ops("exp")),
    "module": (Frozen(), policies.save_modules("last")),
    "site": (reactivate.site(lambda x: F.linear(x, WEIGHT), name="last"), policies.save_names("last")),
}


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("source", SOURCES)
@each("how", MASKED, ids=str)
def test_changed_mask_before_a_saved_call_is_refused(
    how: str, source: Callable[[], Callable[[], Tensor]], last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "3")
    mask, (call, policy) = source(), LAST[last]
    ran = Watched()
    with observed_by(ran):
        out = reactivate.checkpoint(Masked(lambda x: MASKED[how](x, mask), call), policy=policy)(leaf(8, 8))
        monkeypatch.setenv("KEPT", "5")
        with pytest.raises(RecomputeMismatchError, match=UNSEEN):
            backward(out)
    assert ran.regions == 1


NOISY: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
}


def refuse_noise(op: str) -> None:
    block = Masked(NOISY[op], torch.exp)
    out = reactivate.checkpoint(block, policy=policies.save_ops("exp"), guards=WITHOUT_STREAMS)(leaf(8, 8))
    with pytest.raises(RecomputeMismatchError, match=UNSEEN):
        backward(out)


@each("op", NOISY, ids=str)
def test_noise_of_an_op_that_nothing_restores_is_refused(op: str) -> None:
    refuse_noise(op)


@pytest.mark.parametrize("mode", ["default", "warn"])
@pytest.mark.parametrize("is_filled", [True, False])
def test_second_look_leaves_the_settings_as_they_are(
    mode: str, is_filled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", is_filled)
    torch.set_deterministic_debug_mode(mode)
    try:
        before = torch.get_deterministic_debug_mode()
        refuse_noise("dropout")
        assert torch.get_deterministic_debug_mode() == before
        assert torch.utils.deterministic.fill_uninitialized_memory is is_filled
    finally:
        torch.set_deterministic_debug_mode("default")


# -- right programs ---------------------------------------------------------------------------------------------------


class Buffered(torch.autograd.Function):
    """Saves memory of which it has written to a part, of every kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scratch = [
            torch.empty(40),
            torch.Tensor(40),
            torch.empty(40, dtype=torch.long),
            torch.empty(40, dtype=torch.bool),
        ]
        scratch += [torch.from_numpy(np.empty(40, np.float32)), torch.empty(40).resize_(80), x.new_empty(40)]
        for item in scratch:
            item[: len(x)] = 1
        ctx.save_for_backward(x, *scratch)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, *scratch = ctx.saved_tensors
        for item in scratch:
            gradient = gradient * item[: len(x), None]
        return gradient * x.cos()


def attention(x: Tensor, **options: Any) -> Tensor:
    q = x.view(1, 2, 4, 8)
    return F.scaled_dot_product_attention(q, q, q, **options).view(8, 8)


def recurrent(kind: type[nn.RNNBase]) -> Callable[[Tensor], Tensor]:
    module = kind(8, 8, num_layers=2, dropout=0.3)
    return lambda x: module(x[:, None])[0][:, 0]  # type: ignore[no-any-return]


def ctc(x: Tensor) -> Tensor:
    log_probs = x.reshape(8, 2, 4).log_softmax(-1)
    lengths = torch.tensor([8, 5]), torch.tensor([3, 1])
    return x * F.ctc_loss(log_probs, torch.randint(1, 4, (2, 3)), *lengths)


def bags(mode: str) -> Callable[[Tensor], Tensor]:
    weights = nn.Embedding(10, 8).weight
    return lambda x: x + F.embedding_bag(torch.randint(0, 10, (8, 3)), weights, mode=mode)


def chosen(x: Tensor) -> Tensor:
    return x[torch.multinomial(x.detach().softmax(-1), 4)[:, 0]]


def grid(x: Tensor) -> Tensor:
    return F.grid_sample(x.view(1, 1, 8, 8), torch.rand(1, 8, 8, 2) * 2 - 1, align_corners=False).view(8, 8)


def fractional(x: Tensor) -> Tensor:
    return F.fractional_max_pool2d(x.view(1, 1, 8, 8), 2, output_size=4).view(4, 4)


def in_half(x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return F.dropout(attention(x, dropout_p=0.2), 0.3).float()


RIGHT: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    **{f"noise: {name}": (lambda op=op: op) for name, op in NOISY.items()},  # type: ignore[misc]
    "feature dropout": lambda: lambda x: F.dropout1d(x[None], 0.5)[0],
    "feature alpha dropout": lambda: lambda x: F.feature_alpha_dropout(x[None], 0.5, training=True)[0],
    "native dropout": lambda: lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu in place": lambda: lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "RNN": lambda: recurrent(nn.RNN),
    "attention": lambda: lambda x: attention(x, dropout_p=0.3),
    "causal attention": lambda: lambda x: attention(x, is_causal=True),
    "masked attention": lambda: lambda x: attention(x, attn_mask=torch.rand(4, 4) > 0.2),
    "multi-head attention": lambda: (lambda module: lambda x: module(x, x, x)[0])(
        nn.MultiheadAttention(8, 2, dropout=0.2)
    ),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "batch norm in eval": lambda: nn.BatchNorm1d(8).eval(),
    "instance norm": lambda: lambda x: F.instance_norm(x[None])[0],
    "group norm": lambda: nn.GroupNorm(2, 8),
    "layer norm": lambda: nn.LayerNorm(8),
    **{f"bags: {mode}": (lambda mode=mode: bags(mode)) for mode in ("sum", "mean", "max")},  # type: ignore[misc]
    "max pool": lambda: nn.MaxPool1d(2),
    "max pool with indices": lambda: lambda x: torch.mul(*F.max_pool1d(x, 2, return_indices=True)),
    "unpooled": lambda: lambda x: F.max_unpool1d(*F.max_pool1d(x[None], 2, return_indices=True), 2)[0],
    "adaptive max pool": lambda: nn.AdaptiveMaxPool1d(3),
    "fractional pool": lambda: fractional,
    "ctc": lambda: ctc,
    "grid": lambda: grid,
    "multinomial": lambda: chosen,
    "gumbel": lambda: lambda x: F.gumbel_softmax(x, hard=True) * x,
    "bernoulli": lambda: lambda x: x * torch.bernoulli(torch.full((8, 8), 0.5)),
    "random in place": lambda: lambda x: x * torch.empty(8).cauchy_().exponential_(2.0),
    "permutation": lambda: lambda x: x[torch.randperm(8)] * 2,
    "topk": lambda: lambda x: x.topk(3)[0],
    "convolution": lambda: (lambda module: lambda x: module(x[None])[0])(nn.Conv1d(8, 8, 3)),
    "buffers": lambda: Buffered.apply,
    "autocast": lambda: in_half,
    "svd": lambda: torch.linalg.svdvals,
    "losses": lambda: lambda x: x + F.nll_loss(x, torch.randint(0, 8, (8,)), reduction="none")[:, None],
    "multi margin": lambda: lambda x: x * F.multilabel_margin_loss(x, torch.randint(0, 8, (8, 8))),
    "lists as indices": lambda: lambda x: x[[1, 2, 5]] * torch.rand(8),
}
POLICIES: list[dict[str, Any]] = [
    {},
    {"policy": policies.save_ops("exp")},
    {"policy": policies.save_ops("tanh", "exp")},
    {"check": "every"},
]


@pytest.mark.parametrize("options", POLICIES, ids=str)
@each("name", RIGHT, ids=str)
def test_right_programs_run_in_compared_calls(name: str, options: dict[str, Any]) -> None:
    ran = Watched()

    def train(wrap: Wrap) -> list[Any]:
        seed_everything()
        fn = RIGHT[name]()
        checkpointed, found = wrap(lambda x: fn(x * 2).tanh().exp()), []
        for step in range(4):
            junk = [torch.rand(count) for count in (16, 40, 80, 160, 320) for _ in range(step)]
            del junk
            x = leaf(8, 8)
            backward(checkpointed(x))
            found.append(x.grad)
        return found

    plain = train(plainly)
    with observed_by(ran):
        ours = train(lambda fn: reactivate.checkpoint(fn, **options))
    for one, other in zip(plain, ours):
        assert_bitwise(one, other, name)
    assert ran.regions == 4 and ran.recomputations >= 4


def test_statistics_that_an_op_updates_and_no_backward_reads() -> None:
    """They move in each recomputation, since they are not restored: the gradients are right all the same."""

    def train(wrap: Wrap) -> list[Any]:
        seed_everything()
        norm, found = nn.BatchNorm1d(8), []
        checkpointed = wrap(lambda x: norm(x * 2).exp())
        for _ in range(4):
            x = leaf(8, 8)
            backward(checkpointed(x))
            found.append(x.grad)
        return found

    guards = reactivate.guards.DEFAULT.without("modules")
    for policy in (None, policies.save_ops("exp")):
        ours = train(lambda fn, policy=policy: reactivate.checkpoint(fn, policy=policy, guards=guards))
        for one, other in zip(train(plainly), ours):
            assert_bitwise(one, other, "gradient")


@pytest.mark.parametrize("threads", [1, 2])
def test_values_of_the_backward_come_from_the_usual_algorithms(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look that fills memory runs others: what it has recomputed reaches no backward, and no other thread."""
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    counts = (ctypes.c_int * 2)()  # which is not put back

    class Noted(torch.autograd.Function):
        """Saves memory of NumPy's, with anything in it, which it does not read; and a factor."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            mode = torch.get_deterministic_debug_mode()
            counts[mode] += 1
            anything = torch.from_numpy(np.random.default_rng().random(40))
            ctx.save_for_backward(anything, torch.full((8, 8), 1.0 + mode))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * ctx.saved_tensors[1]

    x = leaf(8, 8)
    backward(reactivate.checkpoint(lambda x: Noted.apply(x).exp(), policy=policies.save_ops("exp"))(x))
    assert x.grad is not None
    assert_bitwise(x.grad, torch.autograd.grad(x.exp().square().sum(), x)[0], "gradient")
    assert list(counts) == ([4, 3] if threads == 1 else [3, 0])


def test_checksum_is_taken_in_the_stream_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []
    taken = check._sums_of

    def sums_of(tensor: Tensor) -> Any:
        if not tensor.requires_grad:
            streams.append(torch.cpu.current_stream())
        return taken(tensor)

    monkeypatch.setattr(check, "_sums_of", sums_of)
    side = torch.cpu.Stream()

    def block(x: Tensor) -> Tensor:
        with torch.cpu.stream(side):
            masked = x * torch.ones(8)
        return masked.exp()

    reactivate.checkpoint(block)(leaf(8, 8))
    assert streams == [side, side]
