"""A storage's ops are none of the region's calls: whoever looks at these does not see them (Rules 1, 11, 16)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import oracle
import pytest
import torch
from count_ops import Seen
from several import each
from surroundings import Failure
from torch import Tensor, nn

import reactivate
from reactivate import Save, policies


class Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return gradient * cosine


class Busy:
    """Computes whatever a policy could speak of, and each time something else: torch's functions, a module, a named
    call, a custom Function, with a parameter of its own.

    Attributes:
        uses: how often it was used.
    """

    def __init__(self) -> None:
        self.uses = 0
        self._numbers = itertools.count()
        self._weight = torch.ones((), requires_grad=True)
        self._module = nn.Linear(1, 1)

    def save(self, tensor: Tensor) -> Any:
        return self._copy(tensor), next(self._numbers)

    def load(self, handle: Any) -> Tensor:
        return self._copy(handle[0])

    def _copy(self, tensor: Tensor) -> Tensor:
        self.uses += 1
        number = torch.full((1, 1), float(next(self._numbers))) * self._weight
        number = self._module(Packed.apply(number.exp().tanh()))
        reactivate.site(torch.exp, name="a")(number)
        copy = tensor.clone()
        assert not copy.requires_grad
        return copy


def program(x: Tensor) -> Tensor:
    for name in "aba":
        x = reactivate.site(lambda x: x.sin().tanh(), name=name)(x.exp())
        x = Packed.apply(x).tanh()
    return x.exp()


def make() -> oracle.Case:
    return oracle.Case(program, (torch.randn(8, 8, requires_grad=True),))


def twice(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
    for last in (False, True):
        torch.autograd.backward(outputs, oracle.cotangents(outputs), retain_graph=not last)


def asked(storage: Any) -> Callable[[Any], Any]:
    """A policy that is asked about every call, and has answered by name."""
    return lambda site: Save(storage) if site.name or site.op == "Packed" else None


# Each of these counts the calls that it could speak of.
POLICIES = {
    "a function": asked,
    "names": lambda storage: policies.save_names("a", "b", storage=storage),
    "ops": lambda storage: policies.save_ops("exp", "tanh", "clone", storage=storage),
    "a custom Function": lambda storage: policies.save_ops(Packed, storage=storage),
    "all of it": lambda storage: policies.first_match(policies.save_ops(Packed, storage=storage), asked(storage)),
}


@pytest.mark.parametrize("determinism", ["metadata", "every"])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_log_sees_it(policy: str, early_stop: bool, determinism: str) -> None:
    storage = Busy()
    options = {"policy": POLICIES[policy](storage), "early_stop": early_stop, "check": determinism}
    oracle.check(make, backward=twice, recomputations=2, **options)
    assert storage.uses > 4


@each("around", POLICIES)
@each("inside", POLICIES)
def test_no_log_of_a_region_around_sees_it(inside: str, around: str) -> None:
    storages = Busy(), Busy()
    region = reactivate.checkpoint(program, policy=POLICIES[inside](storages[0]))

    def outer(x: Tensor) -> Tensor:
        return program(region(program(x)))

    def nested() -> oracle.Case:
        return oracle.Case(outer, (torch.randn(8, 8, requires_grad=True),))

    with reactivate._passes.observing.without_regions():
        plain = oracle.run(nested, None, twice)
    policy = POLICIES[around](storages[1])
    ours = oracle.run(nested, lambda fn: reactivate.checkpoint(fn, policy=policy, check="every"), twice)
    oracle.assert_same(plain, ours)
    assert (ours.regions, ours.recomputations) == (4, 4) and all(storage.uses > 4 for storage in storages)


def test_no_function_mode_sees_it() -> None:
    def calls(storage: Any) -> list[str]:
        oracle.seed_everything()
        x = torch.randn(4, 4, requires_grad=True)
        policy = policies.save_names("a", "b", storage=storage)
        with Seen() as seen:
            reactivate.checkpoint(program, policy=policy)(x).sum().backward()
        assert reactivate._torch.modes.function_modes() == ()
        return [name for name in seen.names if name != "__get__"]  # attributes: the engine looks at its own

    storage = Busy()
    expected = calls(reactivate.storage.Device())
    assert calls(storage) == expected and "sin" in expected and storage.uses > 4


def test_modes_are_back_where_a_storage_fails() -> None:
    class Fails(Busy):
        def save(self, tensor: Tensor) -> Any:
            raise Failure

    x = torch.randn(4, 4, requires_grad=True)
    region = reactivate.checkpoint(program, policy=policies.save_names("a", "b", storage=Fails()))
    with Seen() as outer, Seen() as inner:
        with pytest.raises(Failure):
            region(x)
        assert reactivate._torch.modes.function_modes() == (outer, inner)
        assert torch.is_grad_enabled()
    out = program(reactivate.checkpoint(torch.sin)(x)).sum()  # and no log is left
    out.backward()
    assert x.grad is not None


class Tagged(Tensor):
    """A subclass that torch's functions keep, by way of `__torch_function__`."""


def test_a_subclass_stays_what_it_is_under_a_function_mode() -> None:
    kinds: list[type] = []

    class Notes(Busy):
        def save(self, tensor: Tensor) -> Any:
            kinds.append(type(tensor.clone()))
            return super().save(tensor)

        def load(self, handle: Any) -> Tensor:
            found = super().load(handle)
            kinds.append(type(found))
            return found

    x = torch.randn(4, 4).as_subclass(Tagged).requires_grad_()
    expected = torch.autograd.grad(program(x).sum(), x)[0]
    region = reactivate.checkpoint(program, policy=policies.save_names("a", "b", storage=Notes()))
    expected_kinds: list[type] = []
    for mode in (nullcontext(), Seen()):
        kinds.clear()
        with mode:
            found = torch.autograd.grad(region(x).sum(), x)[0]
        oracle.assert_bitwise(expected, found, "gradient")
        expected_kinds = expected_kinds or list(kinds)
        assert kinds == expected_kinds and Tagged in kinds


def test_a_context_that_outlives_its_region_sees_no_log() -> None:
    """A task keeps the context in which it was made: by the time that it runs, the log in it is closed."""
    contexts: list[Any] = []

    def makes_a_task(x: Tensor) -> Tensor:
        contexts.append(copy_context())
        return program(x)

    policy = policies.save_names("a", "b")
    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(program(x).sum(), x)[0]
    reactivate.checkpoint(makes_a_task, policy=policy)(x).sum().backward()
    found: list[Tensor] = []

    def task() -> None:
        for options in ({}, {"policy": policy}):
            found.append(torch.autograd.grad(reactivate.checkpoint(program, **options)(x).sum(), x)[0])  # type: ignore[arg-type]
        found.append(torch.autograd.grad(program(x).sum(), x)[0])

    def starts_it(y: Tensor) -> Tensor:  # while the log of this region is open
        if not reactivate.is_recomputing():
            thread = threading.Thread(target=contexts[0].run, args=(task,))
            thread.start()
            thread.join()
        return program(y)

    reactivate.checkpoint(starts_it, policy=policy)(x.detach().requires_grad_()).sum().backward()
    assert len(found) == 3
    for gradient in found:
        oracle.assert_bitwise(expected, gradient, "gradient")
