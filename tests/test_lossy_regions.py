"""Regions with a storage that is not exact: what is said of them, and a self-check that is neither wrong nor blind."""

from __future__ import annotations

import copy
import gc
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from journal import Journal
from oracle import assert_bitwise
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import reactivate
from reactivate import policies
from reactivate.errors import MutationError, RecomputeMismatchError, UsageError
from reactivate.storage import Lossy

SMALL = Lossy(least_bytes=0)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.drop(self.down(self.act(self.up(self.norm(x)))))
        return found


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def step(model: nn.Module, seed: int = 0) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return what comes out, the gradients, and the state of the generator afterwards."""
    torch.manual_seed(seed)
    out = model(torch.randn(16, 32))
    model.zero_grad()
    loss = out.square().mean()
    detached = out.detach().clone()
    del out
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return detached, [gradient for gradient in gradients if gradient is not None], torch.get_rng_state()


POLICIES: dict[str, Callable[[Any], Any]] = {
    "inputs": lambda lossy: policies.full(inputs=lossy),
    "results": lambda lossy: policies.first_match(policies.save_ops("linear", "gelu", storage=lossy), policies.full()),
    "both": lambda lossy: policies.first_match(
        policies.save_modules("layers.*.up", storage=lossy), policies.full(inputs=lossy)
    ),
}


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize(("bits", "largest"), [(8, 0.02), (4, 0.4)])
def test_gradients_are_near_and_all_else_is_the_same(kind: str, bits: int, largest: float) -> None:
    """The self-check looks at several of these steps, and says nothing."""
    torch.manual_seed(1)
    model = Stack()
    plain = copy.deepcopy(model)
    lossy = Lossy(bits, least_bytes=0)
    reactivate.apply(model, POLICIES[kind](lossy))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            expected, found = step(plain, seed), step(model, seed)
            assert_bitwise(expected[0], found[0], "output")
            assert torch.equal(expected[2], found[2])
            distances = [float((a - b).norm() / a.norm()) for a, b in zip(expected[1], found[1], strict=True)]
            assert 0 < max(distances) < largest  # not bitwise, or nothing was rounded
    assert lossy.traffic.moved >= 5 * 3


def test_what_is_rounded_is_noted_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is forgotten when it is gone: a reference to a memory is asked a few times whether it still is there."""
    asked, expired = Journal(), StorageWeakRef.expired
    monkeypatch.setattr(StorageWeakRef, "expired", lambda self: (asked.append(1), expired(self))[1])
    lossy, count = Lossy(least_bytes=0), 300

    def chain(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x.sin()
        return x

    region = reactivate.checkpoint(chain, policy=policies.save_ops("sin", storage=lossy))
    for _ in range(3):
        region(torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert lossy.traffic.moved >= 3 * (count - 1)
    assert 0 < len(asked) < 3 * 10 * count


def test_regions_with_rounded_inputs_on_several_threads() -> None:
    """Threads look through what is rounded while others add to it."""
    interval = sys.getswitchinterval()

    def train(seed: int) -> int:
        weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for _ in range(40):
            h = weight @ weight
            for _ in range(4):
                h = reactivate.checkpoint(lambda x: (x @ weight).sin().tanh(), inputs=SMALL)(h)
            h.sum().backward()
        return int(weight.grad is not None)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(train, range(4))) == 4
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("lossy", [None, SMALL])
def test_a_missed_state_that_no_rounded_tensor_covers_is_still_found(lossy: Any, monkeypatch: Any) -> None:
    """The self-check leaves out what comes from the rounded input, and nothing else."""

    def region(x: Tensor) -> Tensor:
        side = torch.ones(8, requires_grad=True) * float(os.environ["REACTIVATE_TEST_FACTOR"])
        return x.sin().exp() * side.sin().sum()

    monkeypatch.setenv("REACTIVATE_TEST_FACTOR", "1.0")

    x = torch.randn(16, 32, requires_grad=True)
    wrapped = reactivate.checkpoint(region, **({} if lossy is None else {"inputs": lossy}))
    out = wrapped(x * 2)
    monkeypatch.setenv("REACTIVATE_TEST_FACTOR", "3.0")
    with pytest.raises(RecomputeMismatchError, match="computes other values than its forward"):
        out.sum().backward()


def test_a_branch_on_a_rounded_value_is_named() -> None:
    def router(x: Tensor) -> Tensor:
        return x[x > 0.5].sin().exp()

    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    out = reactivate.checkpoint(router, inputs=Lossy(4, least_bytes=0))(x * 1.0)
    with pytest.raises(RecomputeMismatchError, match=r"The storage Lossy\(bits=4.*is not exact.*experts"):
        out.sum().backward()


def test_regions_inside_of_a_region_whose_inputs_are_rounded() -> None:
    """The inner ones are compared with forwards that had exact inputs."""
    torch.manual_seed(1)
    inner = [Block() for _ in range(2)]
    wrapped = [reactivate.checkpoint(block) for block in inner]

    def outer(x: Tensor) -> Tensor:
        return wrapped[1](wrapped[0](x.sin()).cos())

    region = reactivate.checkpoint(outer, inputs=SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            x = torch.randn(16, 32, requires_grad=True)
            out = region(x * 2)
            gc.collect()
            out.sum().backward()
            assert x.grad is not None


def test_an_input_that_is_alive_is_exact() -> None:
    block = Block()
    x = torch.randn(16, 32, requires_grad=True)
    hidden = x * 2
    torch.manual_seed(3)
    expected = torch.autograd.grad(block(hidden).sum(), x)[0]
    hidden = x * 2
    torch.manual_seed(3)
    (found,) = torch.autograd.grad(reactivate.checkpoint(block, inputs=SMALL)(hidden).sum(), x)
    assert_bitwise(expected, found, "gradient")


@pytest.mark.parametrize("options", [{"inputs": SMALL}, {"policy": policies.save_ops("linear", storage=SMALL)}])
def test_values_are_not_compared_op_by_op(options: Any) -> None:
    region = reactivate.checkpoint(Block(), determinism="values", **options)
    with pytest.raises(UsageError, match=r'determinism="values" compares every op .* Lossy\(bits=8.* is not exact'):
        region(torch.randn(16, 32, requires_grad=True) * 2)
    x = torch.randn(4, 4, requires_grad=True)
    reactivate.checkpoint(torch.sin, determinism="values")(x).sum().backward()  # and nothing is left behind


def test_a_write_that_cannot_be_proved_not_to_matter_is_refused_by_name() -> None:
    log = torch.zeros(16, requires_grad=True).clone()

    def writes(x: Tensor, log: Tensor) -> Tensor:
        log.mul_(1.5)
        return (x * log.detach().sum()).sin().exp()

    x = torch.randn(16, 32, requires_grad=True)
    out = reactivate.checkpoint(writes, inputs=SMALL)(x * 2, log + 1)
    with pytest.raises(MutationError, match="is not exact|has been modified"):
        out.sum().backward()


def test_a_storage_that_does_not_say_whether_it_is_exact() -> None:
    class Silent:
        def save(self, tensor: Tensor) -> Any:
            return tensor.clone()

        def load(self, handle: Any) -> Tensor:
            found: Tensor = handle
            return found

    with pytest.raises(UsageError, match="does not say whether it gives back every bit"):
        policies.full(inputs=Silent())  # type: ignore[arg-type]


# -- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POLICIES)
def test_explain(kind: str) -> None:
    model = Stack()
    reactivate.apply(model, POLICIES[kind](SMALL))
    explanation = reactivate.explain(model, torch.randn(16, 32))
    entries = [entry for entry in explanation.walk() if not entry.is_exact]
    assert entries and all(entry.storage == "Lossy" for entry in entries)
    assert len(entries) == {"inputs": 3, "results": 9, "both": 6}[kind]
    text = explanation.text(width=200)
    assert "to Lossy, not exact" in text and "Gradients are not exact" in text
    again = type(explanation).from_json(explanation.to_json())
    assert again == explanation
    size = sum(entry.input_bytes for entry in entries if entry.kind == "region")
    if kind == "inputs":
        assert size == 3 * (16 * 32 + 16 * 32 // 128 * 4)  # the last block returns nothing that is kept elsewhere
    fake = reactivate.explain(model, torch.randn(16, 32), fake=True)
    assert [entry.kept_bytes for entry in fake.walk()] == [entry.kept_bytes for entry in explanation.walk()]


def test_explain_says_nothing_of_exactness_where_all_is_exact() -> None:
    model = Stack()
    reactivate.apply(model, policies.full())
    explanation = reactivate.explain(model, torch.randn(16, 32))
    assert all(entry.is_exact for entry in explanation.walk()) and "xact" not in explanation.text(width=200)


def test_explain_names_the_storage_behind_it(tmp_path: Any) -> None:
    model = Stack()
    lossy = Lossy(least_bytes=0, storage=reactivate.storage.Disk(tmp_path, least_bytes=0))
    reactivate.apply(model, policies.full(inputs=lossy))
    text = reactivate.explain(model, torch.randn(16, 32)).text(width=200)
    assert "inputs to Lossy in Disk, not exact" in text


@pytest.mark.parametrize("kind", POLICIES)
def test_verify(kind: str) -> None:
    torch.manual_seed(0)
    model = Stack()
    verdict = reactivate.verify(model, torch.randn(16, 32), policy=POLICIES[kind](SMALL))
    assert not verdict and not verdict.is_same and verdict.is_deterministic
    assert 0 < verdict.largest_difference < 0.5
    sites = {"inputs": "inputs of `layers.0`", "results": "linear", "both": "layers.0.up (Linear)"}
    assert any(sites[kind] in site for site in verdict.inexact), verdict.inexact
    text = str(verdict)
    assert text.startswith("Not exact, as asked for:") and "Lossy(bits=8" in text and "bit for bit" in text
    assert f"{verdict.largest_difference:.3g}" in text and "gradient of" in text


def test_verify_does_not_excuse_anything_else() -> None:
    """Outputs, buffers and random numbers have nothing to do with what the backward reads."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Stack()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x)
            return out

    from reactivate._inspect.verify import compare

    model = Counts()

    def change(inner: Any) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def changed() -> Any:
            with reactivate.apply(inner, policies.full(inputs=SMALL)):
                yield lambda x: inner(x) + 1e-3

        return changed()

    verdict = compare(model, torch.randn(16, 32), None, change)
    assert not verdict and str(verdict).startswith("Not the same: output is different")


def test_verify_of_exact_storages_is_as_before() -> None:
    verdict = reactivate.verify(Stack(), torch.randn(16, 32), policy=policies.full())
    assert verdict and verdict.inexact == () and verdict.largest_difference == 0


def test_no_policy_chooses_it_by_itself() -> None:
    model = Stack()
    ready = [policies.full(), policies.recompute_every(2), policies.compute_intensive(), policies.save("attention")]
    for policy in ready:
        assert "Lossy" not in repr(policy)
    plan = reactivate.plan(model, torch.randn(16, 32), budget="80%")
    assert "Lossy" not in repr(plan.policy if hasattr(plan, "policy") else plan)
