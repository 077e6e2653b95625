"""Rule 10: a recomputation draws the forward pass's random numbers, and every stream moves on only once."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from oracle import Case, check
from torch import Tensor, nn

import reactivate
from reactivate._snapshot.random_streams import STREAMS
from reactivate.errors import RecomputeMismatchError
from reactivate.guards import DEFAULT, ContextPair


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def torch_default() -> Case:
    return Case(lambda x: F.dropout(x.sin(), 0.5).exp() * torch.rand_like(x), (leaf(8, 16),))


def small_normal_numbers() -> Case:
    """Fewer than 16 normal numbers leave a spare one behind, which is state too."""
    return Case(lambda x: (x.sin() * torch.randn(3)).exp(), (leaf(4, 3),))


def the_spare_normal_number_alone() -> Case:
    torch.randn(1)  # leaves a spare

    def fn(x: Tensor) -> Tensor:
        return (x.sin() * torch.randn(1)).exp()  # uses it up, and moves nothing else

    return Case(fn, (leaf(4),))


def python() -> Case:
    return Case(lambda x: (x.sin() * random.random()).exp() * random.randint(1, 9), (leaf(4),))


def python_spare_normal_number() -> Case:
    random.gauss(0, 1)
    return Case(lambda x: (x.sin() * random.gauss(0, 1)).exp(), (leaf(4),))


def numpy_global() -> Case:
    return Case(lambda x: (x.sin() * float(numpy.random.rand())).exp(), (leaf(4),))


def numpy_spare_normal_number() -> Case:
    numpy.random.randn()
    return Case(lambda x: (x.sin() * float(numpy.random.randn())).exp(), (leaf(4),))


def exactly_one_round_of_the_twister() -> Case:
    """624 draws bring the index back to where it was; the words are others."""
    return Case(lambda x: (x.sin() * torch.randint(0, 100, (624,)).sum()).tanh(), (leaf(4),))


def generator_as_argument() -> Case:
    def fn(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x.sin() * torch.rand(x.shape, generator=generator)).exp()

    return Case(fn, (leaf(4), torch.Generator().manual_seed(3)))


def generators_in_a_closure() -> Case:
    ours, theirs, numbers = torch.Generator().manual_seed(3), random.Random(4), numpy.random.default_rng(5)

    def fn(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=ours) * theirs.random() * numbers.random()
        return (x.sin() * noise).exp() * torch.rand(x.shape, generator=ours)

    return Case(fn, (leaf(4),))


def generator_of_a_module() -> Case:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            return (x.sin() * torch.rand(x.shape, generator=self.generator)).exp()

    return Case(Noise(), (leaf(4),))


def legacy_numpy_generator() -> Case:
    numbers = numpy.random.RandomState(5)
    return Case(lambda x: (x.sin() * float(numbers.randn())).exp(), (leaf(4),))


ALL = [
    *(torch_default, small_normal_numbers, the_spare_normal_number_alone, python, python_spare_normal_number),
    *(numpy_global, numpy_spare_normal_number, exactly_one_round_of_the_twister, generator_as_argument),
    *(generators_in_a_closure, generator_of_a_module, legacy_numpy_generator),
]


def draws_left(case: Case) -> list[Any]:
    """Return what every generator that the case can reach would draw next."""
    found = [*case.args, *(cell.cell_contents for cell in getattr(case.fn, "__closure__", None) or ())]
    found += [getattr(case.fn, "generator", None)]
    left: list[Any] = []
    for item in found:
        if isinstance(item, torch.Generator):
            left.append(torch.rand(3, generator=item).tolist())
        elif isinstance(item, (random.Random, numpy.random.Generator)):
            left.append(item.random())
        elif isinstance(item, numpy.random.RandomState):
            left.append(item.randn())
    return left


@pytest.mark.parametrize("early_stop", [True, False], ids=["early_stop", "whole"])
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_streams(make: Callable[[], Case], early_stop: bool) -> None:
    made: list[Case] = []

    def remember() -> Case:
        made.append(make())
        return made[-1]

    def twice(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        for retain in (True, False):
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs], retain_graph=retain)

    check(remember, backward=twice, recomputations=2, early_stop=early_stop, saves_memory=False)
    plain, ours = made
    assert draws_left(plain) == draws_left(ours), "the generators are where they are without checkpointing"


def test_without_the_guard_it_is_wrong_and_the_self_check_says_so() -> None:
    """The test above can fail: it does without the guard."""
    with pytest.raises(AssertionError, match="gradient"):
        check(torch_default, guards=DEFAULT.without("rng"), check="metadata")
    x, guards = leaf(8, 16), DEFAULT.without("rng")
    with pytest.raises(RecomputeMismatchError) as raised:
        reactivate.checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp(), guards=guards)(x).sum().backward()
    assert raised.value.kind == "values"


def test_backward_draws_nothing_from_the_streams_after() -> None:
    x, dropout = leaf(64), nn.Dropout()
    out = reactivate.checkpoint(lambda x: dropout(x.sin()).exp())(x)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(state, torch.get_rng_state())


def test_a_state_that_is_set_to_what_it_is_is_no_draw() -> None:
    """torch leaves other bytes in the place of a spare number that is not there: regions share a snapshot all the same."""
    torch.randn(2)
    snapshot = STREAMS.now()
    for _ in range(3):
        torch.set_rng_state(torch.get_rng_state())
        assert STREAMS.now() is snapshot


def test_a_spare_number_that_is_another_one_is_seen() -> None:
    """Seed, index and words are equal, and the spare number is not: it came from other words."""

    def after(*draws: tuple[Callable[[int], Tensor], int]) -> Any:
        torch.manual_seed(3)
        for draw, count in draws:
            draw(count)
        return STREAMS.now().seen

    one, other = (after(*order) for order in (((torch.rand, 2), (torch.randn, 1)), ((torch.randn, 1), (torch.rand, 2))))
    assert one[0][:-16] == other[0][:-16]
    assert one != other


def test_regions_between_two_draws_share_one_snapshot_of_each_stream() -> None:
    first, again = STREAMS.now(), STREAMS.now()
    assert first is again
    torch.rand(1)
    later = STREAMS.now()
    moved = [one is not other for one, other in zip(first.moments, later.moments, strict=True)]
    assert moved == [True, False, False], "only torch's stream has moved"


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(1).item(),
    "python": random.random,
    "numpy": lambda: float(numpy.random.rand()),
}


@pytest.mark.parametrize("number", DRAWS.values(), ids=DRAWS)
def test_a_region_that_draws_and_restores_the_stream(number: Callable[[], float]) -> None:
    """The states before and after are equal, and yet numbers were drawn."""

    def make() -> Case:
        def fn(x: Tensor) -> Tensor:
            states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
            noise = number()
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            numpy.random.set_state(states[2])
            return (x.sin() * noise).exp()

        return Case(fn, (leaf(4),))

    def draw_and_run(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        for draw in DRAWS.values():
            draw()
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])

    check(make, backward=draw_and_run)


def test_numpy_may_be_imported_after_us() -> None:
    code = """
        import sys, torch, reactivate
        assert "numpy.random" not in sys.modules
        x = torch.ones(4, requires_grad=True)
        reactivate.checkpoint(torch.sin)(x).sum().backward()
        import numpy.random
        numpy.random.seed(0)
        f = lambda x: (x.sin() * float(numpy.random.rand())).exp()
        plain = torch.autograd.grad(f(x).sum(), x)[0]
        numpy.random.seed(0)
        ours = torch.autograd.grad(reactivate.checkpoint(f)(x).sum(), x)[0]
        assert torch.equal(plain, ours)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_replaced_numpy_generator() -> None:
    code = """
        import numpy, torch, reactivate
        numpy.random.set_bit_generator(numpy.random.PCG64(3))
        x = torch.ones(4, requires_grad=True)
        f = lambda x: (x.sin() * float(numpy.random.rand())).exp()
        state = numpy.random.get_state(legacy=False)
        plain = torch.autograd.grad(f(x).sum(), x)[0]
        numpy.random.set_state(state)
        ours = torch.autograd.grad(reactivate.checkpoint(f)(x).sum(), x)[0]
        assert torch.equal(plain, ours)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_random_ops_after_one_whose_result_is_given_back() -> None:
    """Selective checkpointing saves the first random op and computes the second again."""

    def fn(x: Tensor) -> Tensor:
        a = (torch.rand_like(x) * x.sin()).exp()
        return (torch.rand_like(x) * a.sin()).exp().cos()

    def first_only(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        if op is not torch.ops.aten.rand_like.default:
            return False
        seen[context.is_recompute] += 1
        return seen[context.is_recompute] == 1

    seen = {False: 0, True: 0}
    pair = ContextPair(lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(first_only))
    check(lambda: Case(fn, (leaf(50),)), guards=DEFAULT.adding(pair), saves_memory=False)
