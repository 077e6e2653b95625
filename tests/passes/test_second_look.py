"""The second look at a recomputation that differs: memory without contents, and saved tensors without a gradient."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from several import each
from state_programs import Program, Wrap, backward, check_program, leaf
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._torch.autograd import FUNCTION_APPLY_CODE
from reactivate.errors import RecomputeMismatchError

UNSEEN = "that the library cannot see"


def drop_path(x: Tensor) -> Tensor:
    """Stochastic depth as timm has it: the mask is drawn into memory without contents."""
    mask = x.new_empty((len(x), 1)).bernoulli_(0.9)
    return x * mask.div_(0.9)


def of_a_queue() -> Callable[[], Any]:
    numbers: queue.Queue[float] = queue.Queue()
    for number in range(20):
        numbers.put(number + 1.0)
    return numbers.get


def of_pairs() -> Callable[[], Any]:
    """Numbers of which each comes twice: two recomputations one after the other are alike."""
    numbers: queue.Queue[float] = queue.Queue()
    for number in range(20):
        numbers.put((number + 1) // 2 + 1.0)
    return numbers.get


def of_the_system() -> Callable[[], Any]:
    return lambda: float(np.random.default_rng().random())


@pytest.mark.parametrize("numbers", [of_a_queue, of_pairs, of_the_system])
def test_memory_without_contents_hides_no_state(numbers: Callable[[], Callable[[], Any]]) -> None:
    linear, following = nn.Linear(8, 8), [numbers()]

    def block(x: Tensor) -> Tensor:
        return x + drop_path(torch.tanh(linear(x) * following[0]()).exp())

    out = reactivate.checkpoint(block)(leaf(4, 8))
    with pytest.raises(RecomputeMismatchError, match=UNSEEN):
        backward(out)


class Masked(torch.autograd.Function):
    """Changes the gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


def kept() -> Tensor:
    return (torch.arange(8) < int(os.environ["KEPT"])).float()


def of_a_function(x: Tensor, linear: nn.Linear) -> Tensor:
    return Masked.apply(linear(x), kept())  # type: ignore[no-any-return]


def of_an_op(x: Tensor, linear: nn.Linear) -> Tensor:
    return linear(x) * kept()


def of_a_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    return linear(kept())


def of_a_chosen_row(x: Tensor, linear: nn.Linear) -> Tensor:
    return F.embedding(kept().long(), linear.weight)


COMPARED = [of_an_op, of_a_linear, of_a_chosen_row]
if FUNCTION_APPLY_CODE is not None:  # otherwise nothing tells what a custom function was called with
    COMPARED.append(of_a_function)


@pytest.mark.parametrize("policy", [None, policies.save_ops("linear")], ids=["recomputed", "saved"])
@pytest.mark.parametrize("fn", COMPARED)
def test_saved_tensors_without_a_gradient_are_compared(
    fn: Callable[..., Tensor], policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "3")
    linear = nn.Linear(8, 8)

    def block(x: Tensor) -> Tensor:
        return F.linear(x, linear.weight).sum() + fn(x, linear)

    out = reactivate.checkpoint(block, policy=policy)(torch.randn(4, 8))
    monkeypatch.setenv("KEPT", "5")
    with pytest.raises(RecomputeMismatchError, match=UNSEEN):
        backward(out)


@pytest.mark.parametrize("fill", [0.0, -1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_masked_elements_hide_no_other(fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, mask = nn.Linear(16, 256), torch.rand(64, 256) < 0.2
    mask[:, 0] = False

    def block(x: Tensor) -> Tensor:
        return (linear(x) * float(os.environ["KEPT"])).masked_fill(mask, fill).log_softmax(-1)

    monkeypatch.setenv("KEPT", "1")
    out = reactivate.checkpoint(block)(torch.randn(64, 16))
    monkeypatch.setenv("KEPT", "3")
    with pytest.raises(RecomputeMismatchError, match=UNSEEN):
        backward(out[:, 0])


# -- memory of an op's own --------------------------------------------------------------------------------------------


def rrelu(x: Tensor) -> Tensor:
    return F.rrelu(x, training=True)


def rrelu_with_noise(x: Tensor) -> Tensor:
    """An op that fills its argument after it had it saved."""
    return torch._C._nn.rrelu_with_noise(x, torch.empty_like(x), training=True)  # type: ignore[attr-defined, no-any-return]


def ctc(x: Tensor) -> Tensor:
    """Its table of probabilities is not written to behind the end of a text."""
    log_probs = x.reshape(8, 2, 5).log_softmax(-1)
    return F.ctc_loss(log_probs, torch.randint(1, 5, (2, 4)), torch.tensor([8, 5]), torch.tensor([4, 1]))


def recurrent(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return nn.LSTM(10, 6, num_layers=2, dropout=0.2)(x.view(4, 2, 10))[0]  # type: ignore[no-any-return]


class Scratch(torch.autograd.Function):
    """Saves memory of which it has written to a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scratch = torch.Tensor(2 * len(x), 20)  # which no mode sees
        scratch[: len(x)] = x.cos()
        ctx.save_for_backward(scratch)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0][: len(gradient)]


class Pointers(torch.autograd.Function):
    """Saves addresses, as kernels for groups of matrices take them: they are others each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        own = x.cos()
        ctx.save_for_backward(own, torch.tensor([own.data_ptr(), id(object())]))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def capacity(x: Tensor) -> Tensor:
    """A mask of rows of which some are not written to, and none of these is used."""
    chosen = torch.empty(8, 1, dtype=torch.uint8)
    chosen[:4] = 3
    rows = torch.cat([x, x])
    return (rows * (chosen < 16))[:4]


OPS = [
    rrelu,
    rrelu_with_noise,
    ctc,
    recurrent,
    nn.Dropout(0.3),
    nn.MaxPool1d(2),
    Scratch.apply,
    Pointers.apply,
    capacity,
]


def among_junk(fn: Callable[[Tensor], Tensor], steps: int, **options: Any) -> Program:
    """Train among memory that holds something else at each step."""

    def train(wrap: Wrap) -> Any:
        checkpointed, found = wrap(fn, **options), []
        for size in range(steps):
            junk = [torch.rand(count) for count in (16, 80, 160, 320) for _ in range(size)]
            del junk
            x = leaf(4, 20)
            backward(checkpointed(x * 2))
            found.append(x.grad)
        return found

    return Program(train, recomputations=steps)


@each("fn", OPS, ids=str)
def test_memory_of_an_op_is_not_compared(fn: Callable[[Tensor], Tensor]) -> None:
    check_program(among_junk(fn, 12))


def test_a_table_that_an_op_fills_in_part_is_no_other_op() -> None:
    check_program(among_junk(ctc, 4, check="every"))


ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda x: x.tanh()[:, 0],
    "expanded": lambda x: x.sum().expand(1),
    "step": lambda x: x.tanh().flatten()[::5],
    "diagonal": lambda x: x.tanh().t().diagonal(),
    "complex": lambda x: torch.complex(x, x)[:, 0].abs(),
    "half": lambda x: x.bfloat16().tanh()[:, 3].float(),
}


@pytest.mark.parametrize("check", ["first", "every"])
@each("name", ONE, ids=str)
def test_one_element_may_have_any_stride(name: str, check: str) -> None:
    def train(wrap: Wrap) -> Any:
        x = leaf(1, 5)
        backward(wrap(lambda x: ONE[name](x).sin(), check=check)(x))
        return x.grad

    check_program(Program(train))


@each("count", [1, 7, 33, 257], ids=str)
@pytest.mark.parametrize("kinds", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)], ids=str)
def test_saved_tensors_of_another_dtype_than_that_of_autocast(kinds: Any, count: int) -> None:
    def block(x: Tensor) -> Tensor:
        return x.to(kinds[1]).sin().float() * 2

    def train(wrap: Wrap) -> Any:
        x = leaf(count)
        with torch.autocast("cpu", kinds[0]):
            out = wrap(block)(x)
        backward(out)
        return x.grad

    check_program(Program(train))
