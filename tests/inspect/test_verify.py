"""`reactivate.verify`: a verdict that is right, the first difference by name, and a model that is left as it was."""

from __future__ import annotations

import copy
import functools
import random
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from journal import Journal
from oracle import random_states
from several import each
from torch import Tensor, nn
from torch.utils import _pytree

import reactivate
from reactivate import policies
from reactivate._inspect.step import leaves_of
from reactivate._inspect.verify import compare
from reactivate._text.words import counted
from reactivate.errors import UsageError
from reactivate.report import Verdict

Change = Callable[[Callable[..., Any]], Callable[..., Any]]


def verify_changed(model: Callable[..., Any], args: Any, *, change: Change | None) -> Verdict:
    """The verdict about what `change` makes of the model."""
    return compare(model, args, None, None if change is None else lambda model: nullcontext(change(model)))


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))


# -- good models ------------------------------------------------------------------------------------------------------


def assert_good(verdict: Verdict, regions: int = 1, *, is_whole: bool = False) -> None:
    assert verdict and verdict.is_same and verdict.is_deterministic and verdict.difference is None, verdict
    assert verdict.regions == verdict.recomputations == regions
    assert verdict.kept_bytes < verdict.plain_bytes
    assert str(verdict).startswith("The same, bit for bit") and counted(regions, "region") in str(verdict)
    assert verdict.is_whole is is_whole is ("The model has no regions, so it was checked as one." in str(verdict))


def test_a_module_with_a_lone_tensor() -> None:
    verdict = reactivate.verify(network(), torch.randn(4, 8))
    assert_good(verdict, is_whole=True)
    # The output, gradients of six parameters, three buffers; torch's, Python's and NumPy's random states.
    assert verdict.compared == 1 + 6 + 3 + 3


def test_the_gradient_of_an_input_is_compared_too() -> None:
    assert reactivate.verify(network(), (leaf(4, 8),)).compared == 1 + 7 + 3 + 3


def test_keyword_arguments_and_containers() -> None:
    @dataclass
    class Output:
        hidden: Tensor
        rest: dict[str, Any]

    def model(x: Tensor, *, pair: tuple[Tensor, float]) -> Output:
        h = (x * pair[0]).sin().exp() * pair[1]
        return Output(h, {"tail": [h.cos()], "nothing": None})

    verdict = reactivate.verify(model, leaf(4, 8), {"pair": (leaf(4, 8), 0.5)})
    assert_good(verdict, is_whole=True)
    assert verdict.compared == 2 + 2 + 3


def test_a_closure_with_a_module_and_a_tensor() -> None:
    weight, block, table = leaf(8, 8), network(), torch.ones(8, 8)
    verdict = reactivate.verify(lambda x: block(x @ weight).sin() @ table, torch.randn(4, 8))
    assert_good(verdict, is_whole=True)
    assert verdict.compared == 1 + 6 + 1 + 3 + 3


class WithRegions(nn.Module):
    """A model that checkpoints its own blocks, one inside of the other."""

    def __init__(self, wrap: Change = reactivate.checkpoint) -> None:
        super().__init__()
        self.first, self.second = network(), network()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wrap(self.second)(self.wrap(self.first)(x)).sin()
        return out


def test_a_model_with_regions_of_its_own_is_compared_with_them_turned_off() -> None:
    assert_good(reactivate.verify(WithRegions(), torch.randn(4, 8)), regions=2)


def test_a_model_with_torchs_regions_and_the_drop_in(whole_heap: None) -> None:
    wrap = lambda fn: functools.partial(torch.utils.checkpoint.checkpoint, fn, use_reentrant=False)  # noqa: E731
    with reactivate.dropin.install():
        verdict = reactivate.verify(WithRegions(wrap), torch.randn(4, 8))
    assert_good(verdict, regions=2)


def test_a_policy_says_what_is_recomputed() -> None:
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout()) for _ in range(3)])
    for policy, regions in (
        (policies.full(), 3),
        (policies.recompute_every(2), 2),
        (policies.first_match(policies.save_ops("tanh"), policies.full()), 3),
        (policies.none(), 0),
    ):
        verdict = reactivate.verify(blocks, torch.randn(4, 8), policy=policy)
        assert bool(verdict) and verdict.regions == regions
        assert verdict.recomputations == regions
        assert reactivate.Handle.of(blocks) is None
    inside = reactivate.verify(lambda x: x.sin().cos().exp(), leaf(4), policy=policies.save_ops("cos"))
    assert bool(inside) and inside.regions == 1
    with pytest.raises(reactivate.errors.UsageError, match="matches nothing"):
        reactivate.verify(blocks, torch.randn(4, 8), policy=policies.recompute_modules("head"))
    assert reactivate.Handle.of(blocks) is None


def test_another_way_to_checkpoint_can_be_held_against_the_plain_model() -> None:
    verdict = verify_changed(network(), torch.randn(4, 8), change=lambda model: model)
    assert verdict and verdict.regions == 0 and verdict.kept_bytes == verdict.plain_bytes
    assert_good(verify_changed(network(), torch.randn(4, 8), change=reactivate.checkpoint))


# -- something is wrong -----------------------------------------------------------------------------------------------


class Halved(torch.autograd.Function):
    """A wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def with_another_output(model: Any) -> Any:
    return lambda x: model(x) + 1


def with_a_wrong_gradient(model: Any) -> Any:
    return lambda x: Halved.apply(model(x))


def without_a_gradient(model: Any) -> Any:
    return lambda x: torch.func.functional_call(model, {"0.bias": model[0].bias.detach()}, (x,))


def with_a_buffer_that_moves_twice(model: Any) -> Any:
    def call(x: Tensor) -> Tensor:
        state = random_states()["torch"]
        model[1](model[0](x).detach())
        torch.set_rng_state(state)
        out: Tensor = model(x)
        return out

    return call


def with_a_shifted_torch(model: Any) -> Any:
    def call(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        torch.rand(1)
        return out

    return call


def with_a_shifted_python(model: Any) -> Any:
    return lambda x: (model(x), random.random())[0]


def with_a_shifted_numpy(model: Any) -> Any:
    return lambda x: (model(x), numpy.random.random())[0]


BROKEN: list[tuple[Change, str]] = [
    (with_another_output, "output is different, by up to 1"),
    (with_a_wrong_gradient, "gradient of args[0] is different, by up to"),
    (without_a_gradient, "gradient of 0.bias is missing"),
    (with_a_buffer_that_moves_twice, "buffer running_mean of BatchNorm1d 2 is different, by up to"),
    (with_a_shifted_torch, "random state of torch's CPU generator is different"),
    (with_a_shifted_python, "random state of Python's random is different"),
    (with_a_shifted_numpy, "random state of NumPy's random is different"),
]


@pytest.mark.parametrize(("policy", "difference"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_the_first_difference_is_named(policy: Change, difference: str) -> None:
    verdict = verify_changed(network(), leaf(4, 8), change=policy)
    assert not verdict and not verdict.is_same and verdict.is_deterministic
    assert verdict.difference is not None and verdict.difference.startswith(difference), verdict
    assert str(verdict).startswith(f"Not the same: {difference}")


def test_a_gradient_that_only_the_checkpointed_model_has_is_a_difference() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x.sin()

    x, y = leaf(4), leaf(4)
    verdict = verify_changed(model, (x, y), change=lambda fn: lambda x, y: fn(x, y) + 0 * y)
    assert not verdict and verdict.difference == "gradient of args[1] is extra"


def test_equal_random_states_that_lie_differently_in_memory_are_the_same() -> None:
    """A generator that was set to a state has other bytes in unused places than one that was seeded."""

    def forward(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            mask = torch.rand(x.shape)
        return (x * mask).sin().exp()

    torch.manual_seed(0)
    verdict = reactivate.verify(forward, (torch.ones(4, requires_grad=True),))
    assert verdict and verdict.recomputations == 1, verdict


def test_the_sign_of_zero_is_a_difference() -> None:
    verdict = verify_changed(lambda x: x * 0, torch.ones(4, requires_grad=True), change=lambda fn: lambda x: -fn(x))
    assert not verdict and str(verdict.difference).startswith("output is different")


def test_without_a_guard_the_verdict_is_no() -> None:
    guards = reactivate.guards.DEFAULT.without("rng")
    wrap = functools.partial(reactivate.checkpoint, guards=guards, check="metadata")
    verdict = verify_changed(network(), leaf(4, 8), change=wrap)
    assert not verdict and "gradient of" in str(verdict.difference)


# -- a model that differs from itself ---------------------------------------------------------------------------------


def test_a_nondeterministic_model_is_reported_as_that() -> None:
    calls = Journal()

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(None)
            return x.sin() * len(calls)

    verdict = reactivate.verify(Counting(), leaf(4))
    assert not verdict and not verdict.is_deterministic
    assert str(verdict).startswith("The plain model differs between two runs of itself: output is different")
    assert verdict.regions == verdict.recomputations == 0, "nothing was checkpointed"


def test_a_model_that_nothing_can_be_learnt_of_is_refused() -> None:
    for model, x in ((lambda x: x.detach(), leaf(4)), (lambda x: x.sin(), torch.randn(4))):
        with pytest.raises(UsageError, match="requires a gradient"):
            reactivate.verify(model, x)


def test_a_model_without_values_is_refused() -> None:
    model, x = network(), torch.randn(4, 8)
    for args in ((model, x.to("meta")), (copy.deepcopy(model).to("meta"), x)):
        with pytest.raises(
            UsageError, match=r"verify compares values.* call reactivate\.explain\(model, args, fake=True\)"
        ):
            reactivate.verify(*args)


@each(
    "call",
    [
        reactivate.verify,
        reactivate.explain,
        functools.partial(reactivate.compare, policy=policies.full()),
        reactivate.plan,
    ],
)
def test_inference_mode_is_refused_by_name(call: Any) -> None:
    with (
        torch.inference_mode(),
        pytest.raises(UsageError, match=r"runs under torch\.inference_mode\(\).* outside of that"),
    ):
        call(network(), torch.randn(4, 8))


# -- the model is left as it was --------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Everything that a forward pass can change, and a part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.frozen = network().eval()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.zeros(8, 8))
        self.history: list[float] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.calls += 1
        self.history.append(random.random())
        with torch.no_grad():
            self.table.add_(x.T @ x)
        out: Tensor = self.frozen(self.net(x)) * float(numpy.random.rand()) + self.table.mean()
        return out


def state_of(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    state |= {f"identity of {name}": id(value) for name, value in model.state_dict(keep_vars=True).items()}
    state |= {f"gradient of {name}": value.grad for name, value in model.named_parameters()}
    state |= {f"training of {name}": child.training for name, child in model.named_modules()}
    state |= {f"hooks of {name}": len(child._forward_hooks) for name, child in model.named_modules()}
    state |= random_states()
    if isinstance(model, Stateful):
        state |= {"calls": model.calls, "history": list(model.history)}
    return state


def assert_unchanged(before: dict[str, Any], model: nn.Module) -> None:
    after = state_of(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, name


def prepared() -> tuple[nn.Module, Tensor]:
    model, x = Stateful(), leaf(4, 8)
    model(x).sum().backward()
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None
    return model, x


@pytest.mark.parametrize("policy", [None, reactivate.checkpoint, with_a_wrong_gradient], ids=["", "policy", "broken"])
def test_the_model_is_as_it_was(policy: Change | None) -> None:
    model, x = prepared()
    before, gradient, contents = state_of(model), x.grad, x.detach().clone()
    verdict = verify_changed(model, x, change=policy)
    assert bool(verdict) == (policy is not with_a_wrong_gradient), verdict
    assert_unchanged(before, model)
    assert x.grad is gradient and torch.equal(x, contents)


@pytest.mark.parametrize("when", ["plain", "checkpointed", "recomputation"])
def test_the_model_is_as_it_was_after_an_exception(when: str) -> None:
    model, x = prepared()

    def policy(model: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            out: Tensor = model(x)
            if when == "checkpointed" or reactivate.is_recomputing():
                raise ValueError("in the middle")
            return out.exp()

        return reactivate.checkpoint(call)

    def fails(x: Tensor) -> Tensor:
        model(x)
        raise ValueError("in the middle")

    before = state_of(model)
    with pytest.raises(ValueError, match="in the middle"):
        verify_changed(fails if when == "plain" else model, x, change=policy)
    assert_unchanged(before, model)
    assert reactivate.verify(model, x), "and works"


def test_the_model_may_be_under_no_grad_and_the_verdict_is_the_same() -> None:
    with torch.no_grad():
        assert_good(reactivate.verify(network(), torch.randn(4, 8)), is_whole=True)
        assert not torch.is_grad_enabled()


class Output(OrderedDict[str, Tensor]):
    """Registered as diffusers registers its outputs: a mapping, without keys."""


class Pair:
    """Registered without keys, and no mapping."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


_pytree.register_pytree_node(
    Output, lambda output: (list(output.values()), list(output)), lambda values, keys: Output(zip(keys, values))
)
_pytree.register_pytree_node(Pair, lambda pair: ([pair.first, pair.second], None), lambda values, _: Pair(*values))


class Wrapping(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        x = x["sample"] if isinstance(x, Output) else x.first if isinstance(x, Pair) else x
        for layer in self.layers:
            x = layer(x)
        return self.wrap(x)


WRAPPED: dict[str, Callable[[Tensor], Any]] = {
    "mapping": lambda x: Output(sample=x),
    "object": lambda x: Pair(x, None),
    "inside": lambda x: {"out": [Pair(x, x * 2), 3], "rest": (x.exp(), Output(sample=x))},
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_containers_that_are_registered_without_keys(wrap: Callable[[Tensor], Any]) -> None:
    x = torch.randn(2, 4)
    for batch in (x, (Output(sample=x),), (Pair(x, None),)):
        assert reactivate.verify(Wrapping(wrap), batch, policy=reactivate.policies.full()).regions == 2
        assert reactivate.explain(Wrapping(wrap), batch).outside_bytes > 0
        assert reactivate.explain(Wrapping(wrap), batch, fake=True).is_fake
        assert reactivate.plan(Wrapping(wrap), batch, budget="100%").predicted.peak_bytes > 0


def test_leaves_of_containers_without_keys_have_names() -> None:
    one = torch.ones(1)
    value = {"a": [Pair(one, 3)], "b": Output(sample=one), "c": (one, [one])}
    assert list(leaves_of("output", value)) == [
        "output['a'][0][0]",
        "output['b']['sample']",
        "output['c'][0]",
        "output['c'][1][0]",
    ]


class Momentum(nn.Module):
    """Its second encoder follows the first one, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.second.parameters(), self.first.parameters()):
                own.lerp_(other, 0.1)
        return self.first(x) - self.second(x)


TOOLS = {
    "verify": reactivate.verify,
    "verify, policy": functools.partial(reactivate.verify, policy=policies.full()),
    "explain": reactivate.explain,
    "compare": functools.partial(reactivate.compare, policy=policies.full()),
    "plan": functools.partial(reactivate.plan, budget="100%"),
}


@each("name", TOOLS)
def test_parameters_that_the_forward_writes_to_are_put_back_from_the_second_run_on(name: str) -> None:
    model, x = nn.Sequential(Momentum(), Momentum()), torch.randn(2, 4)
    start = copy.deepcopy(model.state_dict())
    with pytest.warns(
        UserWarning, match=r"writes to parameters or arguments in its forward: .*\.second\.weight.* and 1 more"
    ):
        found = TOOLS[name](model, x)
    assert not isinstance(found, Verdict) or found
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    model(x)
    for key, value in model.state_dict().items():
        assert torch.equal(value, after[key]), "as after one run"
    again = TOOLS[name](model, x)
    assert not isinstance(again, Verdict) or again
    for key, value in model.state_dict().items():
        assert torch.equal(value, after[key]), "as before"
