"""Torch's functions with something of the user's in their place, in regions whose policy looks at functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from several import each
from state_programs import Program, Wrap, backward, check_program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from reactivate import policies
from reactivate._torch import asking

STEPS = 4  # the third call is not compared
POLICIES = {"op": policies.save_ops("linear"), "intensive": policies.compute_intensive(), "recompute": policies.full()}
WEIGHT = torch.linspace(0.5, 1.5, 4)

Call = Callable[[Tensor], Tensor]
PYTHON: dict[str, Call] = {
    "silu": lambda x: F.silu(x),
    "relu": lambda x: F.relu(x),
    "layer_norm": lambda x: F.layer_norm(x, (4,), WEIGHT),
    "softmax": lambda x: F.softmax(x, -1),
    "dropout": lambda x: F.dropout(x, 0.25),
    "max_pool1d": lambda x: F.max_pool1d(x, 2, 1, 1)[..., :4],
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, -2), torch.arange(x.numel() // 4) % 4) * x,
}
ORIGINAL = {name: getattr(F, name) for name in PYTHON}
METHODS: dict[str, Call] = {
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: x.norm(dim=-1, keepdim=True) * x,
    "sin": lambda x: x.sin(),
}


class Halved:
    """A callable object in the place of a function, of a package that is near torch."""

    __module__ = "torchnear.patches"

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs) * 0.5

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def call(self, *args: Any, **kwargs: Any) -> Tensor:
        return self(*args, **kwargs)


def wrapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 0.5


PATCHES: dict[str, Callable[[Any], Any]] = {"function": wrapped, "object": Halved, "method": lambda fn: Halved(fn).call}


def train(forward: Call, policy: Any, change: Callable[[int], None], wrap: Wrap) -> Any:
    """Train for a few steps; `change(step)` comes before each."""
    checkpointed, found = wrap(forward, policy=policy), []
    for step in range(STEPS):
        change(step)
        x = torch.randn(2, 3, 4, requires_grad=True)
        y = checkpointed(x)
        backward(y)
        found += [y.detach(), x.grad]
    return found


@each("kind", PATCHES, ids=str)
@pytest.mark.parametrize("name", PYTHON)
def test_a_patch_runs_once(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, name, PATCHES[kind](ORIGINAL[name]))
    for policy in POLICIES.values():
        check_program(Program(partial(train, lambda x: PYTHON[name](x.sin()).sin(), policy, lambda step: None)))


@pytest.mark.parametrize("name", METHODS)
def test_a_patched_method_runs_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(Tensor, name)
    monkeypatch.setattr(Tensor, name, lambda x, *args, **kwargs: original(x, *args, **kwargs) * 0.5)
    for policy in POLICIES.values():
        check_program(Program(partial(train, lambda x: METHODS[name](x * 2).cos(), policy, lambda step: None)))


def test_a_function_is_itself_after_its_name_stands_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    relu = F.relu
    monkeypatch.setattr(F, "relu", F.silu)
    for policy in POLICIES.values():
        check_program(Program(partial(train, lambda x: relu(x.sin()) + F.relu(x).sin(), policy, lambda step: None)))


def test_an_argument_that_torch_hides_from_modes_counts() -> None:
    def forward(x: Tensor) -> Tensor:
        return x.sin() * F.l1_loss(x.cos(), torch.ones_like(x), weight=torch.linspace(0, 1, 4).expand_as(x))

    for policy in POLICIES.values():
        check_program(Program(partial(train, forward, policy, lambda step: None)))


def test_a_function_that_was_patched_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_found", {})  # as if the library were imported after the patch
    for name in ("silu", "layer_norm"):
        monkeypatch.setattr(F, name, wrapped(getattr(F, name)))
    power = Tensor.__pow__
    monkeypatch.setattr(Tensor, "__pow__", lambda x, other: power(x, other) * 0.5)
    for policy in POLICIES.values():
        forward = lambda x: PYTHON["layer_norm"](F.silu(x.sin()) ** 2)  # noqa: E731
        check_program(Program(partial(train, forward, policy, lambda step: None)))


class Attention(nn.Module):
    """Attention, of which a policy looks at what its function calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.25, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=True)[0].sin()


@pytest.mark.parametrize("name", ["softmax", "linear", "dropout"])
def test_patches_below_attention_come_and_go(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(F, name)

    def change(step: int) -> None:
        setattr(F, name, wrapped(original) if step in (1, 2) else original)

    monkeypatch.setattr(F, name, original)  # which puts it back
    for policy in POLICIES.values():
        check_program(
            Program(lambda wrap, policy=policy: train(Attention(), policy, change, wrap), recomputations=STEPS)
        )


class Doubling(TorchFunctionMode):
    """A mode that doubles what some functions return, and knows what it was told of."""

    def __init__(self, *functions: Any) -> None:
        self.functions, self.told = functions, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in self.functions:
            return result
        self.told += 1
        return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result * 2


@pytest.mark.parametrize("function", [F.multi_head_attention_forward, F.linear, F.softmax], ids=lambda fn: fn.__name__)
def test_modes_are_told_of_the_whole_attention(function: Any) -> None:
    def run(policy: Any, wrap: Wrap) -> Any:
        told = []

        def change(step: int) -> None:
            told.append(mode.told)

        mode = Doubling(function)
        with mode:
            return train(Attention(), policy, change, wrap), told[-1] > 0

    for policy in POLICIES.values():
        check_program(Program(partial(run, policy), recomputations=STEPS))


def test_a_subclass_is_told_of_the_whole_attention() -> None:
    class Doubled(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(func, types, args, kwargs or {})
            return (result[0] * 2, *result[1:]) if func is F.multi_head_attention_forward else result

    def run(policy: Any, wrap: Wrap) -> Any:
        model = Attention()
        model.attention.in_proj_weight = nn.Parameter(model.attention.in_proj_weight.detach().as_subclass(Doubled))
        found = train(model, policy, lambda step: None, wrap)
        return [item.as_subclass(Tensor) for item in found]

    for policy in POLICIES.values():
        check_program(Program(partial(run, policy), recomputations=STEPS))


class Below(nn.Module):
    """Calls one function or module, and draws random numbers behind it."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.conv, self.norm = nn.Linear(4, 4), nn.Conv1d(3, 3, 1), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.call, self.count = call, 0

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.call(self, x.sin()).sin(), 0.5).sin() * (1 + self.count)


MODULES = policies.save_modules("linear", "conv", "norm", "attention")
BELOW: dict[str, tuple[Any, str, Callable[[Any, Tensor], Tensor], Any]] = {
    "linear": (F, "linear", lambda model, x: model.linear(x), MODULES),
    "conv1d": (F, "conv1d", lambda model, x: model.conv(x), MODULES),
    "layer_norm": (torch, "layer_norm", lambda model, x: F.layer_norm(x, (4,)), policies.save_ops("layer_norm")),
    "norm": (torch, "layer_norm", lambda model, x: model.norm(x), MODULES),
    "embedding": (
        torch,
        "embedding",
        lambda model, x: F.embedding(torch.arange(3), x[0]),
        policies.save_ops("embedding"),
    ),
    "softmax": (Tensor, "softmax", lambda model, x: F.softmax(x, -1), policies.save_ops("softmax")),
    "attention": (
        F,
        "linear",
        lambda model, x: model.attention(x, x, x)[0],
        policies.save_ops("multi_head_attention_forward"),
    ),
    "attention module": (F, "linear", lambda model, x: model.attention(x, x, x)[0], MODULES),
    "distance": (
        F,
        "pairwise_distance",
        lambda model, x: F.triplet_margin_with_distance_loss(
            x, x.cos(), x.exp(), distance_function=F.pairwise_distance
        ),
        policies.save_ops("triplet_margin_with_distance_loss"),
    ),
}


@pytest.mark.parametrize("is_draw", [True, False], ids=["draw", "count"])
@each("name", BELOW, ids=str)
def test_an_effect_below_a_saved_call_is_there_once(name: str, is_draw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, patched, call, policy = BELOW[name]
    original = getattr(owner, patched)

    def run(wrap: Wrap) -> Any:
        model, counts = Below(call), []

        def patch(*args: Any, **kwargs: Any) -> Tensor:
            model.count += not is_draw
            return original(*args, **kwargs) * (torch.rand(()) if is_draw else 1)

        def change(step: int) -> None:  # with an effect in calls that are not compared alone
            counts.append(model.count)
            monkeypatch.setattr(owner, patched, patch if step == 2 else original)

        return train(model, policy, change, wrap), counts

    check_program(Program(run, recomputations=STEPS))
