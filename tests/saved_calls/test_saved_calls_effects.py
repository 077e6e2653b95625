"""Effects of saved calls besides their results: such a call runs again, bit for bit, and its reason says why."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import Case, assert_same, check, run
from saved_call_cases import Reasons
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by

VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=1.0)


class Child(nn.Module):
    """A saved module: it does something, and returns a product."""

    def __init__(self, prepare: Callable[[Any], None], do: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.calls = Journal()
        self.do = do
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        found = self.do(self, x)
        return (x * self.weight).cos() if found is None else found


class Parent(nn.Module):
    def __init__(self, child: Child, read: Callable[[Any], Any], extra: int = 0) -> None:
        super().__init__()
        self.child, self.read = child, read
        self.others = nn.ModuleList(nn.Linear(4, 4) for _ in range(extra))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = self.child(x.sin())
            x = (y.exp() * self.read(self.child) * x).sin()
        return x


def nothing(child: Any) -> None:
    """Prepare nothing."""


def one(child: Any) -> float:
    return 1.0


def counter(child: Any, x: Tensor) -> None:
    child.count = getattr(child, "count", 0) + 1


def buffer(child: Any, x: Tensor) -> None:
    child.total.add_(x.detach().mean())


def with_buffer(child: Any, size: int = 4) -> None:
    child.register_buffer("total", torch.zeros(size))


def silent_buffer(child: Any, x: Tensor) -> None:
    child.total.data.add_(1)


def with_statistics(child: Any, channels: int) -> None:
    child.register_buffer("mean", torch.zeros(channels))
    child.register_buffer("var", torch.ones(channels))


def statistics(child: Any, x: Tensor) -> None:
    F.batch_norm(x.detach().repeat(1, len(child.mean) // 4), child.mean, child.var, training=True)


def gradient(child: Any, x: Tensor) -> None:
    with torch.enable_grad():
        (x.detach() * child.weight).sum().backward()


def cache(child: Any, x: Tensor) -> None:
    child.cached.append(x.detach() * 2)


def with_cache(child: Any) -> None:
    child.cached = []


def with_inner(child: Any) -> None:
    child.box = nn.Module()
    child.box.box = nn.Module()
    child.box.box.inner = nn.Module()
    child.box.box.inner.cached = []
    child.box.box.inner.register_buffer("total", torch.zeros(4))


def inner_cache(child: Any, x: Tensor) -> None:
    child.box.box.inner.cached.append(x.detach() * 2)


def inner_buffer(child: Any, x: Tensor) -> None:
    child.box.box.inner.total.data.add_(x.detach().mean())


def context_variable(child: Any, x: Tensor) -> None:
    VARIABLE.set(VARIABLE.get() * 1.5)


def hook(child: Any, x: Tensor) -> None:
    child.register_forward_hook(lambda module, args, out: out * 2)


def mode(child: Any, x: Tensor) -> None:
    child.train(not child.training)


def setting(child: Any, x: Tensor) -> None:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)


def with_iterator(child: Any) -> None:
    child.items, child.left = iter([0] * 20), 20


def iterator(child: Any, x: Tensor) -> None:
    next(child.items)


def left(child: Any) -> float:
    """Set an attribute between two calls: what the region has noted of the modules is no more what there is."""
    child.left = child.items.__length_hint__()
    return 1.0 + child.left


EFFECTS: dict[str, tuple[Any, Any, Any, str]] = {
    "an attribute": (nothing, counter, lambda child: child.count, "attributes of a module"),
    "a buffer": (with_buffer, buffer, lambda child: child.total.mean(), "a buffer of a module"),
    "a large buffer": (
        partial(with_buffer, size=100_000),
        buffer,
        lambda child: child.total.mean(),
        "a buffer of a module",
    ),
    "a buffer through data": (with_buffer, silent_buffer, lambda child: child.total.mean(), "a buffer of a module"),
    "statistics": (
        partial(with_statistics, channels=4),
        statistics,
        lambda child: child.mean + 2,
        "a buffer of a module",
    ),
    "large statistics": (
        partial(with_statistics, channels=8192),
        statistics,
        lambda child: child.mean.sum() + 2,
        "without a new version",
    ),
    "a cache": (with_cache, cache, lambda child: sum(child.cached).mean(), "a list"),
    "a cache of a child": (with_inner, inner_cache, lambda child: sum(child.box.box.inner.cached).mean(), "a list"),
    "a buffer of a child": (
        with_inner,
        inner_buffer,
        lambda child: child.box.box.inner.total.mean(),
        "a buffer of a module",
    ),
    "an iterator": (with_iterator, iterator, left, "attributes of a module"),
    "a context variable": (nothing, context_variable, lambda child: VARIABLE.get(), "a context variable"),
    "a hook": (nothing, hook, one, "hooks"),
    "training": (nothing, mode, lambda child: 1.0 + child.training, "attributes of a module"),
    "a setting": (nothing, setting, lambda child: torch.ones(()).element_size(), "the guard 'ambient'"),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def twice(region: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Call a region twice: modules of a large tree are recorded as they are reached from the second call on."""
    return lambda x: region(region(x))


def case(fn: Callable[..., Any]) -> Case:
    return Case(fn, (torch.rand(4, 4, requires_grad=True),))


def calls_of_the_child(make: Callable[[], Parent]) -> list[int]:
    """Compare plain and with the child saved, in two regions; return how often it was called in each."""
    models: list[Any] = []

    def made() -> Case:
        models.append(make())
        return case(models[-1])

    plain, ours = run(made, twice), run(made, saving_child)
    assert_same(plain, ours)
    assert ours.regions == 2 and ours.recomputations == 2
    return [len(model.child.calls) for model in models]


def saving_child(model: Any) -> Callable[[Tensor], Tensor]:
    return twice(reactivate.checkpoint(model, policy=policies.save_modules("child")))


@pytest.mark.parametrize("extra", [0, 80])
@pytest.mark.parametrize("name", EFFECTS)
def test_a_saved_module_with_an_effect_runs_again(name: str, extra: int) -> None:
    """In trees of modules that are recorded whole, and in those that are recorded as they are reached."""
    prepare, do, read, reason = EFFECTS[name]

    def make() -> Parent:
        VARIABLE.set(1.0)
        torch.set_default_dtype(torch.float32)
        return Parent(Child(prepare, do), read, extra)

    assert calls_of_the_child(make) == [4, 8]
    reasons = Reasons()
    with observed_by(reasons):
        made = case(make())
        saving_child(made.fn)(*made.args)
    assert len(reasons.found) == 4 and all(reason in str(item) for item in reasons.found), reasons.found


def test_a_saved_module_that_accumulates_a_gradient() -> None:
    make = lambda: case(Parent(Child(nothing, gradient), lambda child: child.weight.grad.mean() + 2))  # noqa: E731
    plain, ours = run(make), run(make, partial(reactivate.checkpoint, policy=policies.save_modules("child")))
    assert_same(plain, ours)
    assert ours.regions == 1 and ours.recomputations >= 1


@pytest.mark.parametrize("extra", [0, 80])
def test_a_saved_module_without_an_effect_is_skipped(extra: int) -> None:
    model = lambda: Parent(  # noqa: E731
        Child(with_buffer, lambda child, x: F.dropout(x * child.total.add(1), 0.5)), one, extra
    )
    assert calls_of_the_child(model) == [4, 4]


class Counting(Parent):
    """Moves a buffer of the saved module and hooks it before the call, which itself has no effect."""

    def forward(self, x: Tensor) -> Tensor:
        self.child.total.data.add_(1)
        hook = self.child.register_forward_hook(lambda module, args, out: out * 2)
        y = self.child(x.sin()).sin()
        hook.remove()
        return y


def test_what_the_region_did_before_a_saved_call_is_no_effect_of_it() -> None:
    model = lambda: Counting(  # noqa: E731
        Child(with_buffer, lambda child, x: (x * child.weight * child.total).cos()), one
    )
    assert calls_of_the_child(model) == [2, 2]


def test_a_saved_call_in_a_recomputation_reads_no_weight_that_was_written_to_since() -> None:
    layer, x = nn.Linear(4, 4), torch.rand(2, 4, requires_grad=True)
    inner = reactivate.checkpoint(
        layer, policy=policies.save_ops("linear")
    )  # alone it saves what comes from the weight
    out = reactivate.checkpoint(lambda x: inner(x.cos()))(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    refused = "`Linear` had saved .* was written to afterwards|reads `Linear.weight`"  # the latter before torch 2.12
    with pytest.raises(reactivate.errors.MutationError, match=refused):
        out.sum().backward()


class Detached(nn.Module):
    """Saves an alias of its argument that autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1, 512))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.detach(), self.weight)


def test_an_alias_of_an_argument_is_derived_and_not_kept() -> None:
    x = torch.rand(512, 512, requires_grad=True)
    model = nn.Sequential(nn.Tanh(), Detached(), nn.Tanh())
    plain, ours = check(lambda: Case(model, (x,)), policy=policies.save_modules("1"))
    assert 2 * ours.kept_bytes < x.nbytes < plain.kept_bytes


class Under:
    __slots__ = ("scale",)


class Over(Under):
    """Has a slot of the same name as its base, and each of them holds something."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale
        Under.scale.__set__(self, 2 * scale)  # type: ignore[attr-defined]


def test_a_result_with_two_slots_of_one_name() -> None:
    calls = Journal()

    def make() -> Case:
        def call(x: Tensor) -> tuple[Tensor, Over]:
            calls.append(1)
            return x.cos(), Over(3.0)

        def fn(x: Tensor) -> Tensor:
            y, found = saved(x.sin())
            return (y.exp() * found.scale * Under.scale.__get__(found)).sin()  # type: ignore[attr-defined, no-any-return]

        saved = reactivate.site(call, name="saved")
        return case(fn)

    check(make, policy=policies.save_names("saved"), saves_memory=False)
    assert len(calls) == 2, "one call in the plain run"


def test_values_that_fill_their_caches_are_no_effect() -> None:
    """A path fills its slots when it is read for the first time: what it says does not change by that."""

    calls = Journal()

    def make() -> Case:
        folder, address = Path("some") / "folder", ip_network("10.0.0.0/8")

        def call(x: Tensor) -> Tensor:
            calls.append(1)
            return x.cos() * len(str(folder)) * len(folder.parts) * len(str(address.broadcast_address))

        saved = reactivate.site(call, name="saved")
        return case(lambda x: (saved(x.sin()).exp() * len(folder.parts)).sin())

    check(make, policy=policies.save_names("saved"), saves_memory=False)
    assert len(calls) == 2, "one call in the plain run"


@pytest.mark.parametrize(("training", "reasons"), [(True, ["it moves running statistics"]), (False, [None])])
def test_an_op_that_moves_running_statistics(training: bool, reasons: list[str | None]) -> None:
    mean, var = torch.zeros(4), torch.ones(4)

    def fn(x: Tensor) -> Tensor:
        return (F.batch_norm(x.sin(), mean, var, training=training).exp() * mean.sum()).sin()

    def make() -> Case:
        mean.zero_()
        var.fill_(1)
        return Case(fn, (torch.rand(8, 4, requires_grad=True),))

    watched = Reasons()
    region = partial(reactivate.checkpoint, policy=policies.save_ops("batch_norm"))
    plain = run(make), mean.clone()
    with observed_by(watched):
        region(fn)(torch.rand(8, 4, requires_grad=True))
    ours = run(make, region), mean.clone()
    assert_same(plain[0], ours[0])
    assert torch.equal(plain[1], ours[1]) and ours[0].regions == 1 and watched.found == reasons


def test_an_op_with_a_constant_among_its_arguments_is_skipped() -> None:
    """A tensor without a gradient is no running statistic, except where the op has such."""
    watched, constant, x = Reasons(), torch.zeros(4), torch.rand(4, requires_grad=True)
    region = reactivate.checkpoint(
        lambda x: torch.where(x > 0.5, x.sin(), constant).exp(), policy=policies.save_ops("where")
    )
    with observed_by(watched):
        region(x).sum().backward()
    assert watched.found == [None] and watched.recomputations == 1


class Level(reactivate.guards.Guard):
    """State of the user's that a guard sees to: of the process, where nothing but the guard finds it."""

    name = "level"

    @property
    def value(self) -> float:
        return sys.getswitchinterval()

    @value.setter
    def value(self, value: float) -> None:
        sys.setswitchinterval(value)

    def before(self, call: Any) -> Any:
        return (self.value,)

    @contextlib.contextmanager
    def recompute(self, snapshot: Any) -> Iterator[None]:
        now, (self.value,) = self.value, snapshot
        yield
        self.value = now


@pytest.mark.parametrize("moves", [True, False])
def test_a_call_that_changes_the_state_of_a_guard(moves: bool) -> None:
    def make(level: Level, calls: Journal) -> Case:
        def call(x: Tensor) -> Tensor:
            calls.append(1)
            if moves:
                level.value += 1
            return x.cos()

        saved = reactivate.site(call, name="saved")
        return case(lambda x: (saved(x.sin()).exp() * level.value).sin())

    calls, level, before = Journal(), Level(), sys.getswitchinterval()
    level.value = 1.0
    options = {"policy": policies.save_names("saved"), "guards": reactivate.guards.DEFAULT.adding(level)}
    try:
        plain = run(partial(make, level, Journal()))
        level.value = 1.0
        ours = run(partial(make, level, calls), partial(reactivate.checkpoint, **options))
        after = level.value
    finally:
        level.value = before
    assert_same(plain, ours)
    assert ours.regions == 1 and len(calls) == 1 + moves and after == 1.0 + moves


def test_a_region_inside_of_a_saved_call_keeps_the_identities_of_those_behind_it() -> None:
    seen = Journal()

    def inner(x: Tensor) -> Tensor:
        seen.append(reactivate.current_region())
        return x.sin().exp()

    saved = reactivate.site(lambda x: reactivate.checkpoint(inner)(x), name="saved")

    def fn(x: Tensor) -> Tensor:
        return reactivate.checkpoint(inner)(saved(x.cos()).tanh()).sin()

    reactivate.checkpoint(fn, policy=policies.save_names("saved"))(torch.rand(4, requires_grad=True)).sum().backward()
    first, second = list(seen)[:2]
    assert first is not second and [item for item in seen if item is not first].count(second) == len(seen) - 2
