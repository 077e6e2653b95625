"""Rule 15: a write to what a replay has to read is refused, with the name of what was written to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle import Case, check
from torch import Tensor, nn

import reactivate
from reactivate.errors import MutationError


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# -- mutation between forward and backward (Rule 15) ------------------------------------------------------------------


@dataclass
class Pair:
    x: Tensor
    w: Tensor


@dataclass
class Mutation:
    """A function with arguments, the tensor that is written to, and how messages call that."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor
    place: str


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x.sin() * w.cos()).exp()


def positional() -> Mutation:
    x = leaf(3, 5)
    return Mutation(lambda x: x.sin().exp(), (x,), {}, x, "`args[0]`")


def second_positional() -> Mutation:
    x, w = leaf(3, 5), torch.randn(3, 5)
    return Mutation(product, (x, w), {}, w, "`args[1]`")


def keyword() -> Mutation:
    x, w = leaf(3, 5), torch.randn(3, 5)
    return Mutation(product, (x,), {"w": w}, w, "`kwargs['w']`")


def in_a_list() -> Mutation:
    x, w = leaf(3, 5), torch.randn(3, 5)
    return Mutation(lambda items: product(*items), ([x, w],), {}, w, "`args[0][1]`")


def in_a_dict_in_a_tuple() -> Mutation:
    x, w = leaf(3, 5), torch.randn(3, 5)
    return Mutation(lambda items: product(**items[0]), (({"x": x, "w": w}, None),), {}, w, "`args[0][0]['w']`")


def in_a_dataclass() -> Mutation:
    x, w = leaf(3, 5), torch.randn(3, 5)
    return Mutation(lambda pair: product(pair.x, pair.w), (), {"pair": Pair(x, w)}, w, "`kwargs['pair'].w`")


def closed_over() -> Mutation:
    x, w = leaf(3, 5), torch.randn(3, 5)
    return Mutation(lambda x: product(x, w), (x,), {}, w, "`the function (closed over as `w`)`")


def default_argument() -> Mutation:
    x, w = leaf(3, 5), torch.randn(3, 5)

    def fn(x: Tensor, w: Tensor = w) -> Tensor:
        return product(x, w)

    return Mutation(fn, (x,), {}, w, "`the function (defaults)[0]`")


TABLE = torch.ones(3, 5)


def module_level() -> Mutation:
    return Mutation(lambda x: product(x, TABLE), (leaf(3, 5),), {}, TABLE, "`TABLE`")


def attribute_of_self() -> Mutation:
    class Layer:
        def __init__(self) -> None:
            self.w = torch.randn(3, 5)

        def run(self, x: Tensor) -> Tensor:
            return product(x, self.w)

    layer = Layer()
    return Mutation(layer.run, (leaf(3, 5),), {}, layer.w, "`w`")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("mask", torch.ones(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight) * self.mask.exp()


def parameter() -> Mutation:
    module = nn.Sequential(Scaled())
    return Mutation(module, (leaf(3, 5),), {}, module[0].weight, "`Sequential.0.weight`")


def buffer() -> Mutation:
    module = nn.Sequential(Scaled())
    return Mutation(module, (leaf(3, 5),), {}, module[0].mask, "`Sequential.0.mask`")


MUTATIONS = [
    *(positional, second_positional, keyword, in_a_list, in_a_dict_in_a_tuple, in_a_dataclass, closed_over),
    *(default_argument, module_level, attribute_of_self, parameter, buffer),
]


def forward_of(mutation: Mutation, **options: Any) -> Tensor:
    out: Tensor = reactivate.checkpoint(mutation.fn, **options)(*mutation.args, **mutation.kwargs)
    return out.sum()


@pytest.mark.parametrize("make", MUTATIONS, ids=lambda make: make.__name__)
def test_a_write_between_forward_and_backward(make: Callable[[], Mutation]) -> None:
    mutation = make()
    out = forward_of(mutation, name="block 7")
    with torch.no_grad():
        mutation.target.add_(0)
    with pytest.raises(MutationError) as raised:
        out.backward()
    message = str(raised.value)
    assert mutation.place in message, "where it entered"
    assert "[3, 5]" in message, "its shape"
    assert "block 7" in message or make in (parameter, buffer), "which region"
    assert "Do not" in message or "Write to it outside" in message, "what to do"


@pytest.mark.parametrize("make", MUTATIONS, ids=lambda make: make.__name__)
def test_without_a_write_there_is_no_refusal(make: Callable[[], Mutation]) -> None:
    forward_of(make()).backward()


@pytest.mark.parametrize("make", MUTATIONS, ids=lambda make: make.__name__)
def test_a_write_after_the_backward_is_none_of_ours(make: Callable[[], Mutation]) -> None:
    mutation = make()
    forward_of(mutation).backward()
    with torch.no_grad():
        mutation.target.add_(0)
    forward_of(mutation).backward()


def test_a_module_level_name_that_is_bound_anew() -> None:
    out = forward_of(module_level())
    globals()["TABLE"] = torch.ones(3, 5)
    with pytest.raises(MutationError, match=r"`TABLE`.*float32\[3, 5\].*now names another object"):
        out.backward()


def test_a_write_through_a_view() -> None:
    x = leaf(3, 5) * 1
    out = reactivate.checkpoint(lambda x: x.sin().exp())(x).sum()
    x[1].zero_()
    with pytest.raises(MutationError, match=r"args\[0\]"):
        out.backward()


def test_the_second_backward_is_refused_if_the_write_comes_before_it() -> None:
    x, w = leaf(3, 5), torch.randn(3, 5)
    out = reactivate.checkpoint(product)(x, w).sum()
    out.backward(retain_graph=True)
    w.zero_()
    with pytest.raises(MutationError, match=r"args\[1\]"):
        out.backward()


class TwoBlocks(nn.Module):
    """Two regions that can both reach everything, of which each uses a half."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        h = reactivate.checkpoint(lambda x: self.first(x).sin())(x)
        out: Tensor = reactivate.checkpoint(lambda x: self.second(x).sin())(h)
        return out


def test_state_that_a_region_reaches_and_does_not_read_is_none_of_its_business() -> None:
    model = TwoBlocks(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    verdict = reactivate.verify(model, leaf(8, 4))
    assert verdict and verdict.regions == 2, verdict


def test_parameters_that_a_region_reaches_and_does_not_read_may_be_written_to() -> None:
    """As in a GAN, whose discriminator is stepped before the generator's backward."""
    model, x = TwoBlocks(lambda: nn.Linear(4, 4)), leaf(8, 4)
    h = reactivate.checkpoint(lambda x: model.first(x).sin())(x)
    with torch.no_grad():
        model.second.weight.add_(1)
    h.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(model.first(x).sin().sum(), x)[0])


# -- writes of the region itself --------------------------------------------------------------------------------------


def test_an_input_that_the_region_writes_to_is_refused_in_the_forward() -> None:
    with pytest.raises(MutationError, match=r"wrote in place to `args\[0\]`.*float32\[4\].*[Cc]lone"):
        reactivate.checkpoint(lambda h: h.mul_(2).sin())(leaf(4) * 1)


def test_an_input_that_is_cloned_and_written_to_is_right() -> None:
    check(lambda: Case(lambda h: h.clone().mul_(2).sin().exp(), (leaf(8, 16),)))


@pytest.mark.parametrize("shape", [(4, 4), (4,)], ids=["matrix", "as a running mean"])
def test_an_input_without_a_graph_that_is_written_to_is_refused(shape: tuple[int, ...]) -> None:
    def fn(x: Tensor, table: Tensor) -> Tensor:
        y = x.sin() * table
        table.add_(1)
        return y.exp()

    with pytest.raises(MutationError, match=r"args\[1\]"):
        reactivate.checkpoint(fn)(leaf(4, 4), torch.ones(shape))


def test_a_saved_tensor_that_the_region_overwrites_is_refused_as_without_a_region() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        y.mul_(2)
        return y.sin()

    for wrap, error in ((lambda fn: fn, RuntimeError), (reactivate.checkpoint, MutationError)):
        out = wrap(fn)(leaf(4)).sum()
        with pytest.raises(error, match="modified by an inplace operation"):
            out.backward()
