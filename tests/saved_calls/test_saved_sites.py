"""Saved calls: a recomputation skips them, and every bit is that of the plain function (Rules 1, 2, 5 to 13, 16)."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from memory import without_collector
from oracle import Case, assert_bitwise, assert_same, check, double_backward, leaf, run
from saved_call_cases import Reasons, Square, once, several
from torch import Tensor, nn

import reactivate
from reactivate import Save, Site, policies
from reactivate._passes.observing import observed_by
from reactivate.guards import RngTracker
from reactivate.storage import Host

save_ops, site = policies.save_ops, reactivate.site


def everything(at: Site) -> Save:
    return Save()


class Counted(nn.Module):
    """Counts its calls in a journal, which nothing rewinds."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self.calls = Journal()

    def forward(self, *args: Any) -> Any:
        self.calls.append(1)
        return self.inner(*args)

    def count(self) -> int:
        return len(self.calls)


# -- exactness --------------------------------------------------------------------------------------------------------


def case(fn: Callable[..., Any], *shapes: tuple[int, ...], modules: Any = (), **leaves: tuple[int, ...]) -> Case:
    made = {name: leaf(*shape) for name, shape in leaves.items()}
    args = tuple(leaf(*shape) for shape in (shapes or ((4, 4),)))
    return Case(partial(fn, **made), args, leaves=made, modules=list(modules))


def generated(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.rand(4, 4, generator=generator)
    return (torch.bernoulli(noise, generator=generator) * x).exp() * torch.rand(4, 4, generator=generator)


def with_generator() -> Case:
    return Case(generated, (leaf(4, 4), torch.Generator().manual_seed(3)))


def attention(x: Tensor, w: Tensor, *, p: float) -> Tensor:
    q, k, v = F.linear(x, w).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).reshape(2, 6, 8)
    return F.dropout(out, 0.2).exp()


def split(x: Tensor) -> Tensor:
    one, two, three = torch.cat([x, x.sin(), x.cos()]).chunk(3)
    (a, b), c = (one @ two).split(2), two @ three
    return torch.cat([a @ c, b @ one.t()]).exp()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    y.mul_(2).add_(1)
    return F.linear(F.linear(y.sin(), w).relu_(), w).exp()


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(F.linear(x, w).relu(), w)
        return (F.linear(y.sin(), w) @ w).float().exp()


def with_inner_gradient(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w).tanh()
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return (F.linear(slope.sin(), w) * y).exp()


def many(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w)
    return {"one": y.sin(), "two": (y.exp(), None, 3), "three": [x, y]}


CASES: dict[str, Callable[[], Case]] = {
    "dropout": lambda: case(lambda x: F.dropout((F.dropout(x, 0.3).exp() * torch.rand_like(x)), 0.5).sin()),
    "generator": with_generator,
    "attention": lambda: case(partial(attention, p=0.3), (2, 6, 8), w=(24, 8)),
    "broadcast": lambda: case(lambda x, y: ((x * y).exp() @ y.expand(4, 4)).sin() + y, (4, 4), (1, 4)),
    "views": lambda: case(lambda x: (x.t() @ x[1:3].t()).exp().unsqueeze(0).expand(2, 4, 2).sin().flatten(), (4, 4)),
    "non-contiguous": lambda: case(
        lambda x, w: (x.transpose(0, 1) @ w).transpose(1, 2).matmul(w).sin(), (4, 4, 4), w=(4, 4)
    ),
    "several of one node": lambda: case(split),
    "in place": lambda: case(in_place, w=(4, 4)),
    "autocast": lambda: case(under_autocast, w=(4, 4)),
    "inner gradient": lambda: case(with_inner_gradient, w=(4, 4)),
    "containers": lambda: case(many, w=(4, 4)),
    "itself": lambda: case(lambda x: site(lambda x: x, name="same")(x).sin() * F.dropout(x, 0.0).exp()),
    "no gradient": lambda: case(lambda x, w: F.linear(F.linear(torch.ones(4, 4), w).detach().sin(), w) * x, w=(4, 4)),
    "no_grad": lambda: case(lambda x: x.sin() * without_gradient(x.sin()).exp()),
    "item": lambda: case(lambda x: (x.exp() * x.sum().item()).sin() * x.shape[0]),
    "nested": lambda: case(
        lambda x, w: reactivate.checkpoint(nested, policy=everything)(F.linear(x, w), w).sin(), w=(4, 4)
    ),
    "saved region": lambda: case(
        lambda x, w: site(reactivate.checkpoint(nested, policy=save_ops("exp")), name="r")(x.exp(), w).sin(), w=(4, 4)
    ),
    "plain region": lambda: case(lambda x, w: reactivate.checkpoint(nested)(F.linear(x, w), w).sin(), w=(4, 4)),
}


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.exp().sin()


def nested(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(F.linear(x.exp(), w).sin(), 0.3).exp()


def saving(*names: str) -> Callable[[Site], Save | None]:
    """A policy that may match nothing."""
    return lambda at: Save() if (at.name or at.op) in names else None


POLICIES: dict[str, Any] = {
    "linear": saving("linear", "matmul", "scaled_dot_product_attention", "same", "r"),
    "random": saving("dropout", "bernoulli", "rand_like", "scaled_dot_product_attention", "exp"),
    "second": policies.every_nth(2, saving("linear", "exp", "sin", "matmul"), 1),
    "everything": everything,
}


@pytest.mark.parametrize("backward", [once, several, double_backward])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_that_of_the_plain_function(name: str, policy: str, backward: Any) -> None:
    plain = run(CASES[name], None, backward)
    others = ({"early_stop": False}, {"check": "every"}, {"check": "none"}) if backward is once else ()
    for options in ({}, *others):
        ours = run(CASES[name], lambda fn: reactivate.checkpoint(fn, policy=POLICIES[policy], **options), backward)
        assert_same(plain, ours)
        assert ours.regions >= 1, "there was a region"
        runs_again = name == "inner gradient"  # and then nothing is kept
        assert ours.kept_bytes > 0 or policy != "everything" or runs_again, "something was kept"


def test_storage_that_is_not_the_device_gives_the_same_bits() -> None:
    make = lambda: case(lambda x, w: F.linear(F.linear(x, w).sin(), w).exp().sin(), w=(4, 4))  # noqa: E731
    check(make, policy=save_ops("linear", "exp", storage=Host()), saves_memory=False)


def test_a_frozen_first_layer_and_shared_weights() -> None:
    def make() -> Case:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        first.requires_grad_(False)
        return Case(lambda x: second(second(first(x)).tanh()).exp(), (torch.randn(2, 4),), modules=[first, second])

    check(make, policy=save_ops("linear"), saves_memory=False)
    check(make, policy=save_ops("tanh"), saves_memory=False)


def test_no_grad_is_the_plain_call() -> None:
    x, counted = leaf(4, 4), Counted(torch.exp)
    with torch.no_grad():
        found = reactivate.checkpoint(counted, policy=everything)(x)
    assert_bitwise(x.exp().detach(), found, "result")
    assert counted.count() == 1 and found.grad_fn is None


def test_shared_recompute_skips_as_well() -> None:
    def backward(outputs: list[Tensor], inputs: dict[str, Tensor]) -> None:
        with reactivate.shared_recompute():
            for output in outputs:
                output.square().sum().backward(retain_graph=True)

    make = partial(case, lambda x, w: (F.linear(x, w).sin(), F.linear(x.exp(), w).cos().exp()), w=(4, 4))
    check(make, policy=save_ops("linear"), backward=backward)


def test_a_named_tracker_is_where_it_was() -> None:
    tracker = RngTracker()

    def drop(x: Tensor) -> Tensor:
        with tracker.fork("parallel"):
            return F.dropout(x, 0.5)

    def fn(x: Tensor) -> Tensor:
        return drop(site(drop, name="first")(x.sin()).exp()).sin()

    def make() -> Case:
        tracker.set_states({})
        tracker.add("parallel", 5)
        return Case(fn, (leaf(4, 4),))

    check(make, policy=policies.save_names("first"))
    expected = tracker.get_states()["parallel"]["cpu"]
    run(make)
    assert_bitwise(expected, tracker.get_states()["parallel"]["cpu"], "the stream afterwards")


# -- how often things run ---------------------------------------------------------------------------------------------


def test_a_saved_call_runs_once_and_a_recomputed_one_twice() -> None:
    saved, recomputed, unneeded = Counted(torch.sin), Counted(torch.exp), Counted(torch.cos)

    def fn(x: Tensor) -> Tensor:
        y = site(saved, name="saved")(site(recomputed, name="recomputed")(x))
        return site(unneeded, name="saved")(recomputed(y))

    x = leaf(4, 4)
    out = reactivate.checkpoint(fn, policy=policies.save_names("saved"), check="metadata")(x)
    out.sum().backward()
    assert (saved.count(), recomputed.count(), unneeded.count()) == (1, 4, 1)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    assert_bitwise(expected, x.grad, "gradient")


def test_a_saved_call_runs_once_for_several_backwards() -> None:
    saved, recomputed = Counted(torch.sin), Counted(torch.exp)
    fn = lambda x: recomputed(site(saved, name="saved")(recomputed(x)))  # noqa: E731
    out = reactivate.checkpoint(fn, policy=policies.save_names("saved"))(leaf(4, 4)).sum()
    for _ in range(3):
        out.backward(retain_graph=True)
    assert (saved.count(), recomputed.count()) == (1, 2 + 3 * 2)


def test_nothing_runs_again_when_all_is_saved() -> None:
    counted = Counted(lambda x: x.sin().exp())
    fn = lambda x: site(counted, name="all")(x)  # noqa: E731
    policy = policies.save_names("all")
    x = leaf(4, 4)
    reactivate.checkpoint(fn, policy=policy)(x).sum().backward()
    assert counted.count() == 1
    assert_bitwise(torch.autograd.grad(fn(x).sum(), x)[0], x.grad, "gradient")


@pytest.mark.parametrize(
    ("fn", "label", "reason"),
    [
        (lambda x: x.sin().mul_(2).exp(), "sin", "written to afterwards"),
        (lambda x: x.sin().mul_(2).exp(), "mul_", "it writes into its arguments"),
        (lambda x: x.t().sin(), "t", "a view of an argument"),
        (lambda x: x.sin() * x.dim(), "dim", "it computes no tensor"),
        (with_inner_gradient, "linear", "a backward inside of the region"),
        (
            lambda x, w: x * torch.autograd.grad(F.linear(x, w).sum(), w)[0].sin(),
            "sum",
            "a backward inside of the region",
        ),
        (lambda x, w: x * torch.autograd.grad((x + w).sum(), w)[0].sin(), "add", "a backward inside of the region"),
    ],
)
def test_a_call_that_cannot_be_skipped_runs_again_and_says_why(fn: Any, label: str, reason: str) -> None:
    def make() -> Case:
        return case(fn, **({"w": (4, 4)} if "w" in fn.__code__.co_varnames else {}))

    made = make()
    with observed_by(reasons := Reasons()):
        reactivate.checkpoint(made.fn, policy=everything)(*made.args)
    assert reason in str(dict(zip(reasons.labels, reasons.found))[label])
    assert_same(run(make), run(make, lambda fn: reactivate.checkpoint(fn, policy=everything)))


def mapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: F.linear(row, w).sin())(F.linear(x, w)).cos().exp()


def pushed(x: Tensor, w: Tensor) -> Tensor:
    return (torch.func.jvp(lambda z: F.linear(z, w).sin().exp(), (x,), (x.cos(),))[1] * x).exp()


def mapped_site(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(site(lambda row: F.linear(row, w).sin(), name="part"))(x).cos().exp()


def measured(x: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        size = F.linear(x, w).sin().sum().item()
    return F.linear(x, w).sin() * size


def measured_by_a_function(x: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        size = Square.apply(F.linear(x, w)).sum().item()
    return Square.apply(F.linear(x, w)).sin() * size


def views_of_inference(x: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = w.clone()
    with torch.no_grad():
        taken = scale.t()[0].clone()
    return F.linear(x, w).sin() * taken


UNFENCED = pytest.mark.unfenced(reason="refused there: an alias of a tensor is none for a transform")

SAVERS: dict[str, Any] = {
    "sin": saving("sin"),
    "linear": saving("linear"),
    "part": saving("part"),
    "on the host": lambda at: Save(storage=Host()) if at.op in ("sin", "linear") else None,
    "compute": policies.first_match(policies.compute_intensive(), saving("sin")),
    "everything": everything,
}


@pytest.mark.parametrize("policy", SAVERS)
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        *(pytest.param(fn, "torch.func", marks=UNFENCED) for fn in (mapped, pushed, mapped_site)),
        (measured, "it runs in inference mode"),
        (measured_by_a_function, "it runs in inference mode"),
        (views_of_inference, "was made in inference mode"),
    ],
)
def test_calls_inside_of_transforms_and_in_inference_mode_run_again(fn: Any, reason: str, policy: str) -> None:
    def make() -> Case:
        return case(fn, w=(4, 4))

    plain = run(make)
    for options in ({}, {"early_stop": False}, {"check": "metadata"}, {"check": "every"}):
        ours = run(make, lambda fn: reactivate.checkpoint(fn, policy=SAVERS[policy], **options))
        assert_same(plain, ours)
        assert ours.regions >= 1 and ours.recomputations >= 1
    with observed_by(reasons := Reasons()):
        reactivate.checkpoint(fn, policy=everything)(*make().args, leaf(4, 4))
    assert any(reason in str(found) for found in reasons.found)


@UNFENCED
def test_a_policy_that_matches_only_inside_of_a_transform() -> None:
    def make() -> Case:
        return case(lambda x, w: torch.func.vmap(lambda row: row.sin())(F.linear(x, w)).cos(), w=(4, 4))

    check(make, policy=save_ops("sin"))


def test_what_turns_gradients_off_is_no_call_of_a_policy() -> None:
    """As a finalizer does that runs whenever the collector comes by: here in recomputations alone."""

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        if reactivate.is_recomputing():
            with torch.no_grad():
                pass
        return (y * x.exp()).tanh()

    asked = Journal()

    def policy(at: Site) -> Save | None:
        asked.append(at.op)
        return None if at.op == "sin" else Save()

    check(lambda: case(fn), policy=policy)
    assert set(asked) == {"sin", "exp", "mul", "tanh"}


# -- what is kept -----------------------------------------------------------------------------------------------------


def alive() -> int:
    return sum(isinstance(item, Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("name", ["attention", "autocast", "in place", "several of one node", "nested", "saved region"])
def test_nothing_outlives_the_backward_without_the_collector(name: str) -> None:
    made = CASES[name]()
    fn = reactivate.checkpoint(made.fn, policy=everything)

    def step() -> None:
        fn(*made.args).float().sum().backward()

    step()
    step()  # which meets gradients, and so makes objects of them
    with without_collector():
        before = alive()
        for _ in range(300):
            step()
        after = alive()
    assert before == after, "as many tensors as after the second step"


def test_modules_that_a_policy_has_looked_at_go_without_the_collector() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    reactivate.checkpoint(model, policy=policies.save_modules("0"))(leaf(4, 4)).sum().backward()
    gone = [weakref.ref(model), weakref.ref(model[0])]
    with without_collector():
        del model
        assert [item() for item in gone] == [None, None]


@pytest.mark.parametrize("is_replaced", [False, True], ids=["of its class", "of its own"])
def test_what_stood_for_a_forward_in_a_region_is_that_forward_afterwards(is_replaced: bool) -> None:
    """Another thread may find it there, and call it when the region is over."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            if is_replaced:
                own = self.linear.forward
                self.linear.forward = lambda x: own(x).tanh()

        def forward(self, x: Tensor) -> Tensor:
            found.append(self.linear.forward)
            return self.linear(x.sin()).exp()

    found, model, x = Journal(), Model(), leaf(4, 4)
    own, region = model.linear.forward, reactivate.checkpoint(model, policy=policies.save_modules("linear"))
    for _ in range(3):
        region(x).sum().backward()
    assert model.linear.forward == own
    assert len(found) == 6
    for forward in found:
        assert forward != own
        assert torch.equal(forward(x), own(x))


# -- failures, threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["linear", "everything"])
def test_after_an_exception_the_same_backward_can_be_tried_again(policy: str) -> None:
    failing = False

    def fn(x: Tensor) -> Tensor:
        y = F.dropout(F.linear(x.sin(), weight), 0.3).exp()
        if failing:
            raise OSError
        return y.sin()

    x, weight = leaf(4, 16), leaf(16, 16)
    region, state = reactivate.checkpoint(fn, policy=POLICIES[policy], early_stop=False), torch.get_rng_state()
    failing = True
    with pytest.raises(OSError):  # noqa: PT011
        region(x)
    failing = False
    torch.set_rng_state(state)
    out = region(x).sum()
    after = torch.get_rng_state()
    failing = True
    with contextlib.suppress(OSError):  # nothing is left to recompute where all is saved
        out.backward(retain_graph=True)
    x.grad = weight.grad = None
    failing = False
    out.backward()
    assert_bitwise(after, torch.get_rng_state(), "random numbers")
    torch.set_rng_state(state)
    assert_bitwise(torch.autograd.grad(fn(x).sum(), x)[0], x.grad, "gradient")
