"""Rule 15: what a region itself writes to is right, or refused by its name and left as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from oracle import Case, Watched, assert_same, check, leaf, run
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by, without_regions
from reactivate.errors import MutationError

SMALL, LARGE = (3, 5), (200, 200)


Shape = tuple[int, ...]


def test_an_input_with_a_gradient_that_the_region_writes_to_and_reads_is_refused_in_the_backward() -> None:
    h = leaf(4) * 1
    out = reactivate.checkpoint(lambda h: h.mul_(2).sin())(h)
    written = h.detach().clone()
    for _ in range(2):
        with pytest.raises(MutationError, match=r"wrote in place to `args\[0\]`.*[Cc]lone"):
            out.sum().backward(retain_graph=True)
        assert torch.equal(h, written), "and it is left as it was"


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_an_input_with_a_gradient_that_the_region_writes_to_idempotently_is_right(shape: Shape) -> None:
    def make() -> Case:
        start = leaf(*shape)
        h = start * 1
        return Case(lambda h: h.relu_().sin().exp(), (h,), leaves={"start": start})

    check(make)


class ChangesItsGradient(torch.nn.Linear):
    """A layer whose forward scales the gradient that it has so far, and reads it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.grad is not None:
            with torch.no_grad():
                self.weight.grad.mul_(0.5)
            x = x + self.weight.grad.mean()
        return super().forward(x).sin()


def test_a_gradient_that_the_region_writes_to_is_refused_once_with_what_to_do() -> None:
    layer = ChangesItsGradient(4, 4)
    plain, x = copy.deepcopy(layer), torch.randn(2, 4)
    region = reactivate.checkpoint(layer)
    for number in range(3):
        plain(x).sum().backward()
        before = None if layer.weight.grad is None else layer.weight.grad.clone()
        bias = None if layer.bias.grad is None else layer.bias.grad.clone()
        out = region(x)
        if number == 1:
            with pytest.raises(
                MutationError, match=r"wrote in place to `a gradient`.*set the gradients to what they were"
            ):
                out.sum().backward()
            layer.weight.grad, layer.bias.grad = before, bias
            out = region(x)
        out.sum().backward()
        assert torch.equal(layer.weight.grad, plain.weight.grad)
        assert torch.equal(layer.bias.grad, plain.bias.grad)


def test_a_write_that_only_the_gradients_see_is_refused() -> None:
    """As before a factor that starts at zero: the outputs are those of the forward."""
    out = reactivate.checkpoint(lambda h, b: h.mul_(2).exp() * b)(leaf(4) * 1, torch.zeros(4, requires_grad=True))
    with pytest.raises(MutationError, match=r"wrote in place to `args\[0\]`"):
        out.sum().backward()


def test_a_write_that_no_backward_sees_is_right() -> None:
    """Autograd's copy of the input that is written to went with the forward."""

    def fn(x: Tensor, h: Tensor) -> Tensor:
        h.sin().exp()
        h.detach().mul_(2)
        return x.sin().exp()

    for determinism in ("first", "metadata"):
        check(lambda: Case(fn, (leaf(8, 16), leaf(8, 16) * 1)), check=determinism)


def test_an_input_that_is_given_back_and_written_to_afterwards_is_right() -> None:
    x, h = leaf(4), leaf(4) * 1
    out, given = reactivate.checkpoint(lambda x, items: (x.sin().exp(), items[0]))(x, [h])
    given.mul_(2)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_a_region_that_writes_to_its_input_does_not_recompute_the_region_around_it() -> None:
    """To find the name of what was written to, nothing is unpacked."""

    def outer(x: Tensor) -> Tensor:
        h = reactivate.checkpoint(lambda h: h.sin().exp())(x.sin())
        reactivate.checkpoint(lambda h: h.detach().mul_(2))(h)
        return h

    watched = Watched()
    with observed_by(watched):
        out = reactivate.checkpoint(outer)(leaf(4))
        assert (watched.regions, watched.recomputations) == (3, 0)
        out.sum().backward()


def test_an_input_that_is_cloned_and_written_to_is_right() -> None:
    check(lambda: Case(lambda h: h.clone().mul_(2).sin().exp(), (leaf(8, 16),)))


SHAPES = pytest.mark.parametrize("shape", [(4, 4), (4,), LARGE], ids=["matrix", "as a running mean", "large"])


def counted(shape: Shape, op: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Train with a table that each call reads with `op` and then adds 1 to."""

    def fn(x: Tensor, table: Tensor) -> Tensor:
        y = op(x.sin(), table)
        table.add_(1)
        return y.exp()

    x, table = leaf(shape[-1], shape[-1]), torch.ones(shape)
    read = [torch.full(shape, float(number)) for number in (1, 2, 3, 4)]
    expected = [torch.autograd.grad(op(x.sin(), table).exp().sum(), x)[0] for table in read]
    outputs = [reactivate.checkpoint(fn)(x, table).sum() for _ in range(2)]
    if shape == LARGE:
        for out in outputs:
            with pytest.raises(MutationError, match=r"`args\[1\]`"):
                out.backward()
        outputs += [reactivate.checkpoint(fn)(x, table).sum() for _ in range(2)]  # now there is a copy
    for out, gradient in list(zip(outputs, expected))[2 * (shape == LARGE) :]:
        assert torch.equal(torch.autograd.grad(out, x)[0], gradient)
    assert torch.equal(table, torch.full(shape, 1.0 + len(outputs)))


@SHAPES
def test_an_input_without_a_graph_that_is_read_and_written_to(shape: Shape) -> None:
    counted(shape, torch.add)


@pytest.mark.unfenced(reason="what was saved is an alias that is written to: refused, as without regions")
@SHAPES
def test_an_input_without_a_graph_that_is_saved_and_written_to(shape: Shape) -> None:
    counted(shape, torch.mul)


class Teacher(nn.Module):
    """A parameter that each call writes to from another, and reads before or after that."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any], *, needs_grad: bool, reads: str) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.randn(100, 100), requires_grad=needs_grad)
        self.student = nn.Parameter(torch.randn(100, 100))
        self.write, self.reads = write, reads

    def forward(self, x: Tensor) -> Tensor:
        before = (x @ self.teacher).sin() if self.reads == "before" else 1
        with torch.no_grad():
            self.write(self.teacher, self.student)
        after = (x @ self.teacher).sin() if self.reads == "after" else 1
        return ((x @ self.student).sin() * before * after).exp()


def average(teacher: Tensor, student: Tensor) -> None:
    teacher.mul_(0.9).add_(student, alpha=0.1)


WRITES = {
    "copy": lambda teacher, student: teacher.copy_(student),
    "clamp": lambda teacher, student: teacher.clamp_(-1, 1),
    "average": average,
}


def steps_of(wrap: Any, write: str, microbatches: int, **options: Any) -> list[Any]:
    """Return the gradients of the student in each of three steps, None where the backward was refused."""
    torch.manual_seed(0)
    model = Teacher(WRITES[write], **options)
    call = wrap(model)
    found: list[Any] = []
    for _ in range(3):
        outputs = [call(torch.randn(4, 100)).sum() for _ in range(microbatches)]
        try:
            found.append(torch.autograd.grad(sum(outputs), model.student)[0])  # type: ignore[arg-type]
        except MutationError:
            found.append(None)
        with torch.no_grad():
            model.student.mul_(0.9)
    return found


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("reads", ["nowhere", "after", "before"])
def test_a_parameter_that_each_call_writes_to(reads: str, write: str, needs_grad: bool, microbatches: int) -> None:
    """The program is right wherever torch's checkpoint is; elsewhere the first step is refused, and then there is a copy."""
    found = {
        name: steps_of(wrap, write, microbatches, needs_grad=needs_grad, reads=reads)
        for name, wrap in {
            "plain": lambda model: model,
            "ours": reactivate.checkpoint,
            "torch": lambda model: partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False),
        }.items()
    }
    for step, (plain, ours) in enumerate(zip(found["plain"], found["ours"])):
        if ours is None:
            assert step == 0 and not torch.equal(plain, found["torch"][0])
        else:
            assert torch.equal(plain, ours)


@pytest.mark.parametrize("backwards", [1, 2])
def test_an_idempotent_write_of_two_microbatches_is_proved_for_each_backward(backwards: int) -> None:
    model, x = Teacher(WRITES["clamp"], needs_grad=False, reads="after"), torch.randn(4, 100)
    outputs = [reactivate.checkpoint(model)(x).sum() for _ in range(2)]
    expected = torch.autograd.grad(model(x).sum(), model.student)[0]
    for _ in range(backwards):
        for out in outputs:
            assert torch.equal(torch.autograd.grad(out, model.student, retain_graph=True)[0], expected)


def test_a_large_input_that_is_only_written_to_is_right() -> None:
    """A log, of which each region writes one entry that none reads."""

    def make() -> Case:
        log = torch.zeros(6, 200, 200)

        def block(x: Tensor, index: int) -> Tensor:
            y = x.sin().exp()
            log[index].copy_(y.detach())
            return y.cos().exp()

        def fn(x: Tensor) -> Tensor:
            for index in range(6):
                x = reactivate.checkpoint(block)(x, index)
            holder.register_buffer("log", log)
            return x

        holder = nn.Module()
        return Case(fn, (leaf(200, 200),), modules=[holder])

    with without_regions():
        plain = run(make)
    ours = run(make)
    assert_same(plain, ours)
    assert ours.regions == ours.recomputations == 6


def test_a_saved_tensor_that_the_region_overwrites_is_refused_as_without_a_region() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        y.mul_(2)
        return y.sin()

    for wrap, error in ((lambda fn: fn, RuntimeError), (reactivate.checkpoint, MutationError)):
        out = wrap(fn)(leaf(4)).sum()
        with pytest.raises(error, match="modified by an inplace operation"):
            out.backward()


@pytest.mark.parametrize("determinism", ["metadata", "none"])
def test_a_write_that_only_outputs_see_is_refused_without_checksums_of_saved_tensors(determinism: str) -> None:
    """A limit: without these, only the outputs show whether a write matters."""
    out = reactivate.checkpoint(lambda x, h: x.sin() + h.mul_(2), check=determinism)(leaf(4), leaf(4) * 1)
    with pytest.raises(MutationError, match=r"`args\[1\]`"):
        out.sum().backward()


def test_a_write_that_only_gradients_see_is_refused_in_every_call() -> None:
    """The outputs are all zero: each call is compared by what it saves, the 3rd, 5th and 6th too, whatever `check` says."""

    def fn(h: Tensor, scale: Tensor, factor: float = 2.0) -> Tensor:
        return h.mul_(factor).exp() * scale

    made_anew = [reactivate.checkpoint(partial(fn, factor=2.0)) for _ in range(6)]
    first, again = reactivate.checkpoint(fn), reactivate.checkpoint(fn, check="metadata")
    for call in (*made_anew, first, again, again):
        with pytest.raises(reactivate.errors.ReactivateError):
            call(leaf(4).abs(), torch.zeros(4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("determinism", ["first", "metadata", "every", "none"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_kept_output_proves_nothing_of_a_write(determinism: str, early_stop: bool) -> None:
    """The result of the last call is kept, and so the same in any case; its weight's gradient depends on the write."""
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        alias = x.detach()
        alias.mul_(alias.sin())
        return linear(alias.sin())

    wrap = reactivate.checkpoint(policy=policies.save_ops("linear"), early_stop=early_stop, check=determinism)
    for _ in range(3):
        out = wrap(fn)(leaf(4, 4) * 1)
        with pytest.raises(MutationError):
            out.sum().backward()


# -- parameters that the forward writes to before it reads them ----------------------------------------------------------


class WritesItsWeight(nn.Module):
    """Writes to its parameter in the forward, before it reads it."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(self.write(self.weight))
        return (x @ self.weight).tanh().exp()


def test_parameter_written_in_the_forward_again_does_not_matter() -> None:
    """A projection: of what it has projected it makes the same."""
    check(lambda: Case(WritesItsWeight(lambda weight: weight.clamp(-0.5, 0.5)), (leaf(4, 4),)))


def test_parameter_written_in_the_forward_otherwise_is_refused_once() -> None:
    module, x = WritesItsWeight(lambda weight: weight * 0.5), leaf(4, 4)
    out = reactivate.checkpoint(module)(x).sum()
    weight = module.weight.detach().clone()
    for _ in range(2):
        with pytest.raises(MutationError, match=r"`WritesItsWeight\.weight`.*no copy"):
            out.backward(retain_graph=True)
        assert torch.equal(module.weight, weight), "and it is left as it was"
    expected = copy.deepcopy(module)
    (plain,) = torch.autograd.grad(expected(x).sum(), x)
    (grad,) = torch.autograd.grad(reactivate.checkpoint(module)(x).sum(), x)  # from its next call on there is a copy
    assert torch.equal(grad, plain) and torch.equal(module.weight, expected.weight)
