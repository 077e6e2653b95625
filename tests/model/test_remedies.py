"""Calls that are nearly right: each error names the call to write (Rule 17); batches are taken as they come."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from several import each
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import reactivate
from reactivate import policies
from reactivate._text.words import RENAMED
from reactivate.errors import UsageError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = x + self.down(self.up(x).tanh())
        return x if scale is None else x * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale)
        return x


class OfADict(nn.Module):
    """Takes its batch as one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, batch: Any) -> Tensor:
        return self.model(batch["x"] if isinstance(batch, dict) else torch.stack(batch))


def squashed(x: Tensor) -> Tensor:
    return x.sin().exp()


X = torch.randn(2, 4)
LOADER = DataLoader(TensorDataset(torch.randn(4, 4), torch.randn(4, 4)), batch_size=2)


def call(name: str) -> Callable[..., Any]:
    """A function that takes a model and example arguments."""
    function: Callable[..., Any] = getattr(reactivate, name)
    return lambda *given: function(*given, **({"budget": "100%"} if name == "plan" else {}))


EXAMPLES = ["plan", "explain", "verify"]


# -- torch's style ----------------------------------------------------------------------------------------------------


@each(
    ("wrong", "remedies"),
    [
        (
            lambda: reactivate.checkpoint(squashed, X),
            ["checkpoint(squashed)(...)", "reactivate.dropin.torch.checkpoint"],
        ),
        (
            lambda: reactivate.checkpoint(squashed, X, use_reentrant=False),
            ["checkpoint(squashed)(...)", "leave out use_reentrant", "reactivate.dropin.torch.checkpoint"],
        ),
        (lambda: reactivate.checkpoint(Block(), X), ["checkpoint(Block(...))(...)"]),
        (lambda: reactivate.checkpoint(squashed, use_reentrant=False), ["Leave out use_reentrant"]),
        (lambda: reactivate.checkpoint(use_reentrant=True), ["Leave out use_reentrant"]),
        (
            lambda: reactivate.checkpoint(squashed, preserve_rng_state=False),
            ['guards=reactivate.guards.DEFAULT.without("rng")'],
        ),
        (lambda: reactivate.checkpoint(squashed, preserve_rng_state=True), ["Leave out preserve_rng_state"]),
        (lambda: reactivate.checkpoint(squashed, debug=True), ['check="every"']),
        (lambda: reactivate.checkpoint(squashed, determinism_check="none"), ['check="none"']),
        (lambda: reactivate.checkpoint(squashed, context_fn=lambda: None), ["guards.ContextPair", "policy="]),
        (lambda: reactivate.checkpoint(squashed, polcy=policies.full()), ["polcy", "Did you mean 'policy'?"]),
        (lambda: reactivate.checkpoint(squashed, scale=2.0), ["scale", "checkpoint(squashed)(...)"]),
        (lambda: reactivate.checkpoint(X), ["Tensor", "checkpoint(f)(x)"]),
        (lambda: reactivate.checkpoint(Block), ["checkpoint(Block(...))"]),
        (lambda: reactivate.checkpoint(3), ["3"]),
    ],
)
def test_checkpoint_names_the_remedy(wrong: Any, remedies: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        wrong()
    for remedy in remedies:
        assert remedy in str(caught.value)


# -- policies ---------------------------------------------------------------------------------------------------------


@each(
    "use",
    [
        lambda policy: reactivate.apply(Model(), policy),
        lambda policy: reactivate.checkpoint(squashed, policy=policy),
        lambda policy: reactivate.verify(Model(), X, policy=policy),
        lambda policy: policies.first_match(policies.save_ops("linear"), policy),
        lambda policy: policies.union(policy),
        lambda policy: policies.exclude(policies.full(), policy),
        lambda policy: policies.every_nth(2, policy),
    ],
)
@each(
    ("policy", "remedies"),
    [
        (policies.full, ["policies.full()"]),
        (policies.save_ops, ["policies.save_ops(...)"]),
        ("full", ["policies.full()"]),
        ("ful", ["policies.full()"]),
        ([policies.full()], ["first_match"]),
        (3, ["3", "policies.full()"]),
        (Block, ["recompute_modules(Block)"]),
    ],
)
def test_what_is_no_policy(use: Any, policy: Any, remedies: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        use(policy)
    for remedy in remedies:
        assert remedy in str(caught.value)


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(AttributeError, match=r"no 'ful'\. Did you mean 'full'\?"):
        policies.ful()
    with pytest.raises(AttributeError, match=r"no 'recompute_ever'\. Did you mean 'recompute_every'"):
        policies.recompute_ever
    with pytest.raises(AttributeError, match=r"no 'explian'\. Did you mean 'explain'"):
        reactivate.explian
    for name, place in (
        ("full", "policies.full"),
        ("Host", "storage.Host"),
        ("offload", "storage"),
        ("UsageError", "errors.UsageError"),
    ):
        with pytest.raises(AttributeError, match=rf"no '{name}'\. .* in a namespace: reactivate\.{place}\."):
            getattr(reactivate, name)
    assert not hasattr(policies, "__wrapped__")


def test_an_older_name_says_the_newer() -> None:
    with pytest.raises(AttributeError, match=r"no 'guard_memory'\. It is called 'retry_on_oom' now"):
        reactivate.guard_memory
    for name, now in RENAMED.items():
        if name != "determinism":  # an option
            with pytest.raises(AttributeError, match=f"It is called '{now}' now"):
                getattr(reactivate, name)
            assert resolve_name(f"reactivate.{now}") is not None
    with pytest.raises(UsageError, match=r'Write check="every"'):
        reactivate.checkpoint(squashed, determinism="values")
    with pytest.raises(UsageError, match=r"determinism=\. It is called 'check' now"):
        reactivate.apply(Model(), policies.full(), determinism="values")


EACH_ALONE = """
import os, sys, torch, reactivate
for name in sys.argv[1:]:
    if not os.fork():
        try:
            if name.startswith("planner."):
                reactivate.report  # it brings in a part of that room
            eval(f"reactivate.{name}")
        except AttributeError as error:
            print(name, error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_name_on_the_pages_is_there_after_the_import_of_the_package() -> None:
    """In a program that has imported nothing else: what one name says must not lead to another that is not there."""
    docs = Path(__file__).parents[2] / "docs"
    reference, migration = ((docs / page).read_text(encoding="utf-8") for page in ("reference.md", "migration.md"))
    names = re.findall(r"^::: reactivate\.(\S+)", reference, re.MULTILINE)
    names += [name for name in re.findall(r"`reactivate\.([\w.]+)", migration) if name not in RENAMED]
    names += [now for name, now in RENAMED.items() if name != "determinism"]
    run = subprocess.run([sys.executable, "-c", EACH_ALONE, *names], capture_output=True, text=True, check=True)
    assert len(names) > 30 and not run.stdout, run.stdout


def test_a_policy_that_selects_nothing_is_not_found_again() -> None:
    model = Model()
    assert reactivate.apply(model, policies.none()) is not reactivate.apply(model, policies.none())
    assert reactivate.Handle.of(model) is None


def test_the_names_on_one_screen() -> None:
    """Few enough to be read at once, and `help` shows no address."""
    spaces = [name for name in reactivate.__all__ if inspect.ismodule(getattr(reactivate, name))]
    assert spaces == ["dropin", "errors", "guards", "integrations", "loss", "policies", "storage"]
    assert len(reactivate.__all__) - len(spaces) <= 17
    assert " at 0x" not in "".join(
        map(str, (inspect.signature(reactivate.apply), inspect.signature(reactivate.checkpoint)))
    )
    assert repr(reactivate.guards.DEFAULT) == "Guards(rng, ambient, modules)"


# -- example arguments ------------------------------------------------------------------------------------------------


@each("name", EXAMPLES)
@each(
    "args",
    [X, (X,), [X], {"x": X}, (X, X), [X, X], {"x": X, "scale": X}, UserDict(x=X), next(iter(LOADER))],
    ids=["tensor", "tuple", "list", "dict", "two", "list of two", "dict of two", "mapping", "batch"],
)
def test_a_batch_is_taken_as_it_comes(name: str, args: Any) -> None:
    assert call(name)(Model(), args)


@each("name", EXAMPLES)
@each("batch", [{"x": X}, [X[0], X[1]]])
def test_a_batch_that_is_one_argument(name: str, batch: Any) -> None:
    assert call(name)(OfADict(), (batch,))
    with pytest.raises(UsageError, match=rf"{name}\(model, \(batch,\)\)"):
        call(name)(OfADict(), batch)


@each("name", EXAMPLES)
@each(
    ("given", "remedies"),
    [
        ((Model(), LOADER), ["DataLoader", "next(iter("]),
        ((Model(), iter(LOADER)), ["next("]),
        ((Model(), TensorDataset(X)), ["TensorDataset", "DataLoader"]),
        ((Model(), {"x": X}, {"scale": X}), ["kwargs="]),
        ((Model(), X, [X]), ["kwargs=", "dict"]),
        ((Model(), Block()), ["Block", "example"]),
        ((Model(), policies.full()), ["example"]),
        ((X, Model()), ["Tensor", "{}(model, "]),
        ((Model, X), ["Model(...)"]),
        (([Model()], X), ["list"]),
    ],
)
def test_what_is_no_batch(name: str, given: Any, remedies: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        call(name)(*given)
    assert str(caught.value).startswith(name)
    for remedy in remedies:
        assert remedy.format(name) in str(caught.value)


@each(
    ("given", "remedies"),
    [
        ((Model(), X), ["apply(model, policies.full())", "explain(model, "]),
        ((Model(), {"x": X}), ["apply(model, policies.full())"]),
        ((Model(), LOADER), ["apply(model, policies.full())"]),
        ((X, policies.full()), ["Tensor"]),
        ((Model, policies.full()), ["Model(...)"]),
        ((policies.full(), Model()), ["apply(model, policy)"]),
        (([Model()], policies.full()), ["each"]),
    ],
)
def test_apply_takes_a_model_and_a_policy(given: Any, remedies: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        reactivate.apply(*given)
    for remedy in remedies:
        assert remedy in str(caught.value)


@each(
    ("options", "remedies"),
    [
        ({"optimizer": torch.optim.AdamW}, ["optimizer=torch.optim.AdamW(model.parameters())"]),
        ({"optimizer": "adamw"}, ["torch.optim.AdamW(model.parameters())"]),
        ({"optimizer": X}, ["optimizer"]),
        ({"loss": X}, ["loss"]),
        ({"step": X}, ["step"]),
        ({"loss": nn.CrossEntropyLoss}, ["loss", "CrossEntropyLoss"]),
    ],
)
def test_plan_names_the_remedy(options: dict[str, Any], remedies: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        reactivate.plan(Model(), X, budget="100%", **options)
    for remedy in remedies:
        assert remedy in str(caught.value)


def test_site_takes_a_function() -> None:
    with pytest.raises(UsageError, match=r"site\(fn, name='q'\)\(x\)"):
        reactivate.site(X, name="q")  # type: ignore[type-var]
