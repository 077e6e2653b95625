"""Rules 5 and 16 to 18: what cannot be recomputed is refused, with the place and the remedy; what can be is right."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from journal import Journal
from oracle import Case, check, leaf
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import policies
from reactivate._passes.observing import observed_by
from reactivate.errors import (
    MutationError,
    PlanInfeasible,
    ReactivateError,
    RecomputeMismatchError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from reactivate.guards import DEFAULT, ContextPair, Guard


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the line in `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    return next(first + index for index, line in enumerate(lines) if text in line)


# -- a recomputation that does something else (Rule 16) ----------------------------------------------------------------------


def recomputing() -> bool:
    return reactivate.is_recomputing()


def saves_fewer(x: Tensor) -> Tensor:
    y = x.sin()
    if recomputing():
        return y
    return y.exp().cos()  # the first that is missing


def saves_more(x: Tensor) -> Tensor:
    y = x.sin()
    return y.exp() if recomputing() else y  # one too many


def has_another_shape(x: Tensor) -> Tensor:
    y = x.sin()
    if recomputing():
        y = y[:2]
    return y.exp().sum()  # another shape


def has_another_dtype(x: Tensor) -> Tensor:
    y = x.sin()
    if recomputing():
        y = y.double()
    return y.exp()  # another dtype


def has_another_device(x: Tensor) -> Tensor:
    y = x.sin()
    if recomputing():
        y = y.to("meta")
    return y.exp()  # another device


MISMATCHES = [
    (saves_fewer, "fewer", "missing", ("3 in the forward", "1 in the recomputation", "float32[4, 3] on cpu"), True),
    (saves_more, "more", "too many", ("1 tensors", "float32[4, 3] on cpu"), False),
    (has_another_shape, "metadata", "another shape", ("float32[4, 3] on cpu", "float32[2, 3] on cpu"), True),
    (has_another_dtype, "metadata", "another dtype", ("float32[4, 3] on cpu", "float64[4, 3] on cpu"), True),
    (has_another_device, "metadata", "another device", ("float32[4, 3] on cpu", "float32[4, 3] on meta"), True),
]


@pytest.mark.parametrize(
    ("fn", "kind", "mark", "facts", "early_stop"), MISMATCHES, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_first_difference(
    fn: Callable[[Tensor], Tensor], kind: str, mark: str, facts: tuple[str, ...], early_stop: bool
) -> None:
    out = reactivate.checkpoint(fn, early_stop=early_stop, name="block 7")(leaf(4, 3)).sum()
    with pytest.raises(RecomputeMismatchError) as raised:
        out.backward()
    message = str(raised.value)
    assert raised.value.kind == kind
    assert f"{__file__}:{line_of(fn, mark)} in {fn.__name__}" in message, message
    assert all(fact in message for fact in ("block 7", *facts)), message
    assert "check=" in message, "what to do"


def test_more_saves_than_in_the_forward_pass_do_no_harm_with_early_stop() -> None:
    x = leaf(4, 3)
    reactivate.checkpoint(saves_more, check="metadata")(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().sum(), x)[0])


class Drifting:
    """A function whose result differs when it runs again, with the same metadata."""

    def __call__(self, x: Tensor) -> Tensor:
        y = x.sin()
        return (y + 1.0 if recomputing() else y).exp()


def test_calls_are_counted_for_each_policy() -> None:
    """Also if the wrapper and its policy are made for each call, and with several policies in turn."""
    module, compared = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Journal()

    class Looks:
        def forward_done(self, record: Any) -> None:
            compared.append(record.check is not None)

        def recomputation_done(self, record: Any) -> None:
            """Nothing to see."""

    made = [lambda: None, lambda: policies.save_ops("linear"), lambda: policies.save_ops("tanh")]
    with observed_by(Looks()):
        for _ in range(9):
            for make in made:
                reactivate.checkpoint(module, policy=make())(leaf(2, 4)).sum().backward()
    for index in range(3):
        assert list(compared)[index::3] == [number in (1, 2, 4, 8) for number in range(1, 10)]


def test_first_compares_some_calls_and_leaves_the_others_alone() -> None:
    """The 1st, 2nd, 4th, 8th, ... call of a region: what its recomputation saves and returns is compared."""
    fn, refused = reactivate.checkpoint(Drifting()), []
    for number in range(1, 10):
        out = fn(leaf(4, 3)).sum()
        try:
            out.backward()
        except RecomputeMismatchError:
            refused.append(number)
    assert refused == [1, 2, 4, 8]


def test_first_finds_a_write_past_the_version_counter() -> None:
    x, w = leaf(200, 200), torch.randn(200, 200)
    out = reactivate.checkpoint(lambda x: (x.sin() * w.cos()).exp())(x).sum()
    w.data.add_(1)
    with pytest.raises(RecomputeMismatchError, match="computes other values"):
        out.backward()


def test_first_warns_of_a_difference_of_rounding_size() -> None:
    class Rounding:
        def __call__(self, x: Tensor) -> Tensor:
            y = x.sin()
            return (y * (1 + 1e-7) if recomputing() else y).exp()

    out = reactivate.checkpoint(Rounding())(leaf(64, 64)).sum()
    with pytest.warns(UserWarning, match="no more than rounding"):
        out.backward()


class Fickle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if recomputing():
            x = x.double()
        return x.exp()  # in a module


def test_a_difference_in_a_submodule_is_named_by_path_and_line() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), Fickle()))
    out = reactivate.checkpoint(model)(leaf(4, 3)).sum()
    with pytest.raises(RecomputeMismatchError) as raised:
        out.backward()
    line = f"{__file__}:{line_of(Fickle, 'in a module')} in"
    forward, recomputation = (text for text in str(raised.value).splitlines() if text.startswith("  "))
    assert line in forward and "(module 1.1)" in forward
    assert line in recomputation and "(module 1.1)" in recomputation


def test_a_difference_in_a_module_of_torchs_is_named_by_path() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Identity(), nn.Tanh()))
    model[1][0].register_forward_hook(lambda module, args, out: out.double() if recomputing() else None)
    out = reactivate.checkpoint(model)(leaf(4, 3)).sum()
    with pytest.raises(RecomputeMismatchError, match=r"recomputation: .*\(module 1\.1\)"):
        out.backward()


def test_none_compares_no_metadata_and_still_counts() -> None:
    out = reactivate.checkpoint(has_another_dtype, check="none")(leaf(4, 3))
    out.sum().backward()
    out = reactivate.checkpoint(saves_fewer, check="none")(leaf(4, 3))
    with pytest.raises(RecomputeMismatchError, match="1 in the recomputation"):
        out.sum().backward()


# -- values (Rule 16) -------------------------------------------------------------------------------------------------


def has_other_values(x: Tensor) -> Tensor:
    y = x.sin()
    y = y + (1.0 if recomputing() else 2.0)  # other values
    return y.exp()


@contextmanager
def noted(notes: list[str], note: str) -> Iterator[None]:
    notes.append(note)
    yield


@pytest.mark.parametrize("contexts", [False, True], ids=["", "with contexts"])
def test_values_name_the_first_op_that_differs_with_both_traces(contexts: bool) -> None:
    notes: list[str] = []
    pair = ContextPair(lambda: (noted(notes, "forward"), noted(notes, "recomputation")))
    guards = DEFAULT.adding(pair) if contexts else DEFAULT
    out = reactivate.checkpoint(has_other_values, check="every", guards=guards)(leaf(4, 3)).sum()
    with pytest.raises(RecomputeMismatchError, match="Op 2 is the first that differs") as raised:
        out.backward()
    assert raised.value.kind == "values"
    forward, recomputation = str(raised.value).split("forward:\n")[1].split("recomputation:\n")
    line = f"{__file__}:{line_of(has_other_values, 'other values')} in has_other_values"
    for trace in (forward, recomputation):
        (marked,) = [text for text in trace.splitlines() if "->    2 " in text]
        assert "aten.add.Tensor" in marked and line in marked
        assert "aten.sin.default" in trace
    assert "aten.exp.default" in forward and "aten.exp.default" not in recomputation, (
        "the recomputation ends where it differs"
    )
    assert notes == (["forward", "recomputation"] if contexts else [])


def test_values_name_the_users_line_of_ops_in_torchs_own_layers() -> None:
    """Of the recomputation too, whose own caller is the backward."""

    def activation(x: Tensor) -> Tensor:
        return x.relu() + int(recomputing())  # the first that differs

    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, activation=activation)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    reactivate.apply(model, policies.full(), check="every")

    def forward() -> Tensor:
        return model(leaf(2, 3, 4)).sum()  # the call of the model

    out = forward()
    with pytest.raises(RecomputeMismatchError) as caught:
        out.backward()
    called, differs = line_of(forward, "the call of the model"), line_of(activation, "the first that differs")
    first, second = str(caught.value).split("recomputation:")
    for part in (first, second):
        ops = [line for line in part.splitlines() if " aten." in line]
        lines = {line.partition("   at ")[2].split(" in ")[0] for line in ops}
        assert lines == {f"{__file__}:{called}", f"{__file__}:{differs}"}


def test_values_and_every_guard_agree_where_nothing_differs() -> None:
    def make() -> Case:
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU())
        return Case(lambda x: block(block(x)), (leaf(4, 8),), modules=[block])

    check(make, check="every", guards=DEFAULT.adding(ContextPair(lambda: (nullcontext(), nullcontext()))))


def test_memory_that_is_not_written_to_yet_is_not_compared_by_values() -> None:
    """`copy.deepcopy` of a tensor gives it memory, and then copies to that."""
    contents = Journal()

    def make() -> Case:
        def fn(x: Tensor) -> Tensor:
            contents.append(0)
            memory = torch.from_numpy(numpy.full(4, len(contents), numpy.float32)).untyped_storage()
            scratch = torch.empty(0).set_(memory, 0, (4,), (1,))
            return (x * scratch.copy_(x.detach())).exp()

        return Case(fn, (leaf(4),))

    check(make, check="every")


def test_a_write_past_the_version_counter_is_found_by_values() -> None:
    """`.data`, and memory that NumPy shares: a version counter sees neither."""

    def through_data(w: Tensor) -> None:
        w.data.add_(1)

    def through_numpy(w: Tensor) -> None:
        w.numpy()[:] += 1

    for write in (through_data, through_numpy):
        x, w = leaf(200, 200), torch.randn(200, 200)  # of which there is no copy
        out = reactivate.checkpoint(lambda x, w: (x.sin() * w.cos()).exp(), check="every")(x, w).sum()
        version = w._version
        write(w)
        assert w._version == version
        with pytest.raises(RecomputeMismatchError, match=r"first that differs(.|\n)*aten\.cos"):
            out.backward()


# -- requests (Rules 17, 18) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_it", "allowed"),
    [
        (lambda: reactivate.checkpoint(torch.sin, check="value"), "'every', 'metadata', 'none'"),
        (lambda: reactivate.checkpoint(torch.sin, guards=[3]), "reactivate.guards.Guard"),
        (
            lambda: reactivate.checkpoint(torch.sin, guards="rng"),
            "got 'rng'. To leave guards out, write guards.DEFAULT",
        ),
        (lambda: reactivate.checkpoint(torch.sin, guards=None), "guards= takes a list of `Guard` objects; got None"),
        (lambda: reactivate.checkpoint(3), "a function or a module"),
        (lambda: DEFAULT.without("random"), "rng, ambient, modules"),
    ],
    ids=["check", "guards", "a name", "no guards", "fn", "without"],
)
def test_a_wrong_request_lists_what_is_allowed(request_it: Callable[[], Any], allowed: str) -> None:
    with pytest.raises(UsageError, match=allowed):
        request_it()


def test_the_errors_are_one_tree() -> None:
    errors = [getattr(reactivate.errors, name) for name in reactivate.errors.__all__]
    found = {
        ReactivateError,
        MutationError,
        PlanInfeasible,
        RecomputeMismatchError,
        StorageError,
        UsageError,
        UnsupportedError,
    }
    assert set(errors) == found
    assert all(issubclass(error, ReactivateError) for error in errors)
    assert issubclass(ReactivateError, RuntimeError), "what upstream raises"
    assert issubclass(RecomputeMismatchError, torch.utils.checkpoint.CheckpointError)
    assert issubclass(UsageError, ValueError) and issubclass(UnsupportedError, NotImplementedError)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("an option"),
        RecomputeMismatchError("fewer", kind="fewer"),
        PlanInfeasible("none fits", budget_bytes=3, least_bytes=5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_come_out_of_other_processes(error: ReactivateError) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), copied.args, vars(copied)) == (type(error), error.args, vars(error))
    assert str(copy.deepcopy(error)) == str(error)


class Silent(Guard):
    """A guard that would restore nothing: a spelling mistake away from one that does."""

    def befor(self, call: Any) -> Any:
        return ()

    def recompute(self, snapshot: Any) -> Any:
        raise AssertionError


class Loud(Silent):
    def before(self, call: Any) -> Any:
        return None  # there is no state in this call


def test_a_guard_that_would_restore_nothing_is_refused() -> None:
    """Its `before` is Guard's own, so that its `recompute` would never be called."""
    for ask in (
        lambda guards: reactivate.checkpoint(torch.sin, guards=guards),
        lambda guards: reactivate.apply(nn.Sequential(nn.Linear(2, 2)), policies.full(), guards=guards),
        lambda guards: reactivate.dropin.install(guards=guards),
    ):
        with pytest.raises(
            UsageError, match="the guard Silent has a `recompute` that is never called.*before.self, call."
        ):
            ask(DEFAULT.adding(Silent()))
    x = leaf(3)
    reactivate.checkpoint(torch.sin, guards=DEFAULT.adding(Loud(), Guard()))(x).sum().backward()
    assert x.grad is not None


CALLS = {
    "apply": (lambda: reactivate.apply(nn.Linear(2, 2), polciy=policies.full()), "polciy", "policy"),
    "explain": (lambda: reactivate.explain(nn.Linear(2, 2), leaf(2), fakes=True), "fakes", "fake"),
    "verify": (lambda: reactivate.verify(nn.Linear(2, 2), leaf(2), polcy=policies.full()), "polcy", "policy"),
    "plan": (lambda: reactivate.plan(nn.Linear(2, 2), leaf(2), budgte="50%"), "budgte", "budget"),
    "install": (lambda: reactivate.dropin.install(guard=()), "guard", "guards"),
    "save_ops": (lambda: policies.save_ops("linear", withn="*.mlp"), "withn", "within"),
    "recompute_every": (lambda: policies.recompute_every(2, ofset=1), "ofset", "offset"),
}


@each("name", CALLS)
def test_a_misspelled_keyword_is_refused_with_the_one_that_is_meant(name: str) -> None:
    call, given, meant = CALLS[name]
    with pytest.raises(UsageError, match=f"^{name} does not take {given}=. Did you mean '{meant}'. It takes .*{meant}"):
        call()


def test_an_argument_of_another_function_is_refused_with_that() -> None:
    with pytest.raises(UsageError, match=r"or call reactivate\.compare\(model, args, policy=policy\)\.$"):
        reactivate.explain(nn.Linear(2, 2), leaf(2), policy=policies.full())  # type: ignore[call-arg]


def test_signatures_stay() -> None:
    """Of functions that refuse unknown keywords: what editors show."""
    parameters = inspect.signature(reactivate.apply).parameters
    assert list(parameters) == ["model", "policy", "guards", "early_stop", "check", "replace"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'policy'"):
        reactivate.apply(nn.Linear(2, 2))  # type: ignore[call-arg]


# -- transforms, export (Rule 5) --------------------------------------------------------------------------------------


def test_values_of_nested_regions_are_each_written_down_once() -> None:
    """A log does not see the checksums that a log inside of it takes."""

    def inner(x: Tensor) -> Tensor:
        return x.sin().exp()

    def outer(x: Tensor) -> Tensor:
        y: Tensor = reactivate.checkpoint(inner, check="every")(x.cos())
        return y + (1.0 if recomputing() else 2.0)

    with pytest.raises(RecomputeMismatchError, match="Op 4 is the first that differs") as raised:
        reactivate.checkpoint(outer, check="every", early_stop=False)(leaf(4)).sum().backward()
    forward = str(raised.value).split("forward:\n")[1].split("recomputation:\n")[0]
    assert [line.split("aten.")[1].split(".")[0] for line in forward.splitlines()] == ["cos", "sin", "exp", "add"]


def test_an_error_in_the_recomputation_of_an_outer_region_stays_what_it_is() -> None:
    def outer(x: Tensor) -> Tensor:
        y: Tensor = reactivate.checkpoint(torch.exp)(x.cos())
        if recomputing():
            raise RuntimeError("out of memory")
        return y.sin()

    out = reactivate.checkpoint(outer, early_stop=False)(leaf(4)).sum()
    with pytest.raises(RuntimeError, match="^out of memory$"):
        out.backward()


def test_tensors_of_torchax_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module of their class, so torchax need not be installed here."""
    kind: Any = type("Tensor", (Tensor,), {"__module__": "torchax.tensor"})
    x, model = torch.randn(4, 4).as_subclass(kind), nn.Linear(4, 4)
    calls = [(torch.sin, (x,)), (lambda held: held[0].sin(), ([x],)), (lambda: x.sin(), ()), (model, (torch.ones(4),))]
    monkeypatch.setitem(sys.modules, "torchax", ModuleType("torchax"))
    assert reactivate.checkpoint(model)(torch.ones(4)).requires_grad  # beside torchax
    model.weight = nn.Parameter(x)
    for fn, args in calls:
        with pytest.raises(UnsupportedError, match=r"tensors of torchax.*Use jax\.checkpoint"):
            reactivate.checkpoint(fn)(*args)
        with torch.no_grad():
            reactivate.checkpoint(fn)(*args)
