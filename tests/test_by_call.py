"""Treatments of the calls of one layer: which call is which, and the bits of the plain model whatever happens."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Case, Watched, assert_bitwise, assert_same, run, seed_everything
from plan_models import Block
from torch import Tensor, nn

import reactivate
from reactivate._engine.record import observed_by
from reactivate._types import Recompute
from reactivate.planner.treatments import FULL, KEEP, Assignment, Treatment

NESTED = Treatment("recompute parts", ("", "mlp"), ("attn.out",), ("scaled_dot_product_attention",))
PARTS = Treatment("recompute mlp", ("mlp",))
CALLS = (FULL, KEEP, PARTS, KEEP, NESTED)
REGIONS = (
    1 + 0 + 1 + 0 + 2
)  # with the one that is nested: not as many as calls, which are regions if nobody counts them


class Loop(nn.Module):
    """One layer, called several times."""

    def __init__(self, calls: int = 5) -> None:
        super().__init__()
        self.calls, self.block, self.noise = calls, Block(16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.noise(self.block(x))
        return x


def policy_of(*calls: Treatment) -> Assignment:
    return Assignment({"block": Treatment("by call", calls=calls)})


def applied(model: Any) -> Any:
    reactivate.apply(model, policy_of(*CALLS))
    return model


def case_of(model: nn.Module | None = None) -> Case:
    return Case(model or Loop(), (torch.randn(2, 8, 16, requires_grad=True),))


class Forwards(Watched):
    """Counts regions in forwards, and the names of those in recomputations: the last of these may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[str | None] = []

    def forward_done(self, record: Any) -> None:
        if reactivate.is_recomputing():
            self.again.append(record.options.name)
        else:
            self.regions += 1


def check(make: Callable[[], Case], regions: int, wrap: Callable[[Any], Any] = applied, **options: Any) -> Forwards:
    """The model comes to the same bits with the policy as without, and has that many regions, each recomputed."""
    watched = Forwards()

    def watching(model: Any) -> Any:
        ours = wrap(model)

        def call(*args: Any) -> Any:
            with observed_by(watched):
                return ours(*args)

        return call

    assert_same(run(make, **options), run(make, watching, **options))
    assert watched.regions == regions
    assert watched.recomputations >= regions
    return watched


def ran_in(model: nn.Module, call: Callable[[], Tensor]) -> int:
    """Return how many regions there are in a call."""
    watched = Forwards()
    with observed_by(watched):
        call().sum().backward()
    return watched.regions


def test_each_call_has_its_treatment() -> None:
    check(case_of, REGIONS)
    kept = {number: run(case_of, lambda model, n=number: only(model, n)).kept_bytes for number in range(-1, 5)}
    assert all(kept[number] < kept[-1] for number in range(5)), "each call's activations are dropped, by its number"


def only(model: Any, number: int) -> Any:
    calls = [FULL if index == number else KEEP for index in range(5)]
    if number >= 0:
        reactivate.apply(model, policy_of(*calls))
    return model


def test_a_call_after_those_that_are_known_is_recomputed() -> None:
    check(lambda: case_of(Loop(7)), REGIONS + 2)


def test_fewer_calls_than_are_known() -> None:
    check(lambda: case_of(Loop(2)), 1)


def test_every_forward_counts_from_the_beginning() -> None:
    model = applied(Loop())
    x = torch.randn(2, 8, 16)
    assert [ran_in(model, lambda: model(x)) for _ in range(3)] == [REGIONS] * 3
    assert ran_in(model, lambda: model(x) + model(x)) == 2 * REGIONS


def test_a_forward_that_fails_leaves_no_count() -> None:
    model, x = applied(Loop()), torch.randn(2, 8, 16)
    handle = model.noise.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    with pytest.raises(RuntimeError, match="stop"):
        model(x)
    handle.remove()
    assert ran_in(model, lambda: model(x)) == REGIONS
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 8, 3))  # in a call of the layer itself
    assert ran_in(model, lambda: model(x)) == REGIONS


class Refined(Loop):
    """Some calls without gradients first, as in models of recurrent depth."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = x + self.block(x)
        return super().forward(x)


def test_calls_without_gradients_are_not_counted() -> None:
    check(lambda: case_of(Refined()), REGIONS)


def test_evaluation_is_no_different_and_no_grad_has_no_regions() -> None:
    check(lambda: case_of(Loop().eval()), REGIONS)
    model, watched = applied(Loop()), Watched()
    with observed_by(watched), torch.no_grad():
        model(torch.randn(2, 8, 16))
    assert watched.regions == 0


class Recursive(Loop):
    """A model that calls itself."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.noise(self.block(x))
        return self(x, depth - 1) if depth else self.block(x)


def test_a_model_that_calls_itself_counts_once() -> None:
    check(lambda: case_of(Recursive()), 1 + 0 + 1 + 0)


class SelfCalling(Block):
    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        return self(super().forward(x), False) if again else super().forward(x)


class LoopOfSelfCalling(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.block = SelfCalling(16)


def test_a_layer_that_calls_itself_is_in_one_call() -> None:
    check(lambda: case_of(LoopOfSelfCalling()), 1 + 0 + 2 + 0 + 3)  # inner calls have the parts of the call around them


class InRegion(Loop):
    """A part of the forward is a region of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return self.block(reactivate.checkpoint(self.several)(x))

    def several(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.noise(self.block(x))
        return x


@pytest.mark.parametrize("times", [1, 2])
def test_recomputations_count_as_their_forward_did(times: int) -> None:
    def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        for number in range(times):
            outputs[0].sum().backward(retain_graph=number < times - 1)

    watched = check(lambda: case_of(InRegion()), REGIONS + 1, backward=backward)
    assert "block" not in watched.again, "no call in the region is recomputed as a whole"
    assert watched.again.count("block.mlp") >= times


def test_a_region_around_the_model() -> None:
    watched = check(case_of, 1 + REGIONS, lambda model: reactivate.checkpoint(applied(model)))
    assert watched.again.count("block") == 2


def test_outside_of_the_model_every_call_is_recomputed() -> None:
    model, x = applied(Loop()), torch.randn(2, 8, 16)
    assert ran_in(model, lambda: model.block(model.block(x))) == 2
    assert ran_in(model, lambda: model.block.mlp(x)) == 0


def test_a_thread_that_runs_the_model_in_the_middle_of_a_call_counts_for_itself() -> None:
    model, x = applied(Loop()), torch.randn(2, 8, 16)
    seen: dict[str, int] = {}

    def train(name: str) -> None:
        seen[name] = ran_in(model, lambda: model(x))

    thread = threading.Thread(target=train, args=("other",))

    def begin(*_: Any) -> None:
        if thread.ident is None:
            thread.start()
            thread.join()

    handle = model.noise.register_forward_pre_hook(begin)
    train("first")
    handle.remove()
    assert seen == {"first": REGIONS, "other": REGIONS}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_count_for_themselves(copied: Callable[[Any], Any]) -> None:
    model = applied(Loop())
    other, x = copied(model), torch.randn(2, 8, 16)
    for item in (model, other):
        assert ran_in(item, lambda item=item: item(x)) == REGIONS
    kept = run(lambda: Case(copied(applied(Loop())), (torch.randn(2, 8, 16),)))
    assert kept.kept_bytes < run(case_of).kept_bytes
    for module in other.modules():
        forward = module.__dict__.get("forward")
        assert forward is None or forward.module() is module
    reactivate.apply(other, policy_of(*CALLS), replace=True).remove()
    assert not any("forward" in vars(module) for module in other.modules())
    assert ran_in(model, lambda: model(x)) == REGIONS


def test_the_policy_is_applied_once_and_removed() -> None:
    model = Loop()
    handle = reactivate.apply(model, policy_of(*CALLS))
    assert handle.regions == ("block",)
    assert reactivate.apply(model, policy_of(*CALLS)) is handle
    with pytest.raises(reactivate.ReactivateError, match="replace=True"):
        reactivate.apply(model, policy_of(*CALLS[:2]))
    handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_where_nobody_counts_the_policy_recomputes() -> None:
    policy = policy_of(*CALLS)
    site = reactivate.Site("block", module=Block(16))
    assert policy(site) == Recompute() and policy.interest().ops == frozenset()
    assert set(policy.by_call()) == {"block"} and len(policy.by_call()["block"]) == len(CALLS)


def test_a_graph_of_the_compiler_recomputes_every_call() -> None:
    model, x = Loop(3).eval(), torch.randn(2, 8, 16)
    model(x).sum().backward()
    expected = {name: item.grad for name, item in model.named_parameters()}
    model.zero_grad()
    reactivate.apply(model, policy_of(KEEP, FULL, PARTS))
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    for name, item in model.named_parameters():
        assert_bitwise(expected[name], item.grad, name)


def test_the_bits_of_random_programs() -> None:
    """Any number of calls, any treatments."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        calls = [CALLS[index] for index in torch.randint(5, (4,), generator=generator)]
        count = int(torch.randint(1, 7, (), generator=generator))

        def wrap(model: Any, calls: Any = calls) -> Any:
            reactivate.apply(model, policy_of(*calls))
            return model

        make = lambda count=count: case_of(Loop(count))  # noqa: E731
        plain, ours = run(make), run(make, wrap)
        assert_same(plain, ours)
        seed_everything()
