"""Refusals of policies, and warnings of what matches nothing (Rule 17)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_bitwise
from policy_cases import LINEAR, Model, Sites, gradients, saved_in
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import Recompute, Save, policies
from reactivate._passes.observing import observed_by
from reactivate.errors import UsageError


@each("answer", ["recompute", True, 42, Recompute, policies.full()], ids=repr)
@each(
    "combine",
    [
        lambda policy: policy,
        lambda policy: policies.first_match(policy, policies.full()),
        lambda policy: policies.union(policy, policies.full()),
        lambda policy: policies.exclude(policies.full(), policy),
        lambda policy: policies.every_nth(2, policy),
    ],
    ids=["alone", "first_match", "union", "exclude", "every_nth"],
)
def test_an_answer_that_is_no_action_is_refused(answer: Any, combine: Any) -> None:
    """Of a module by `apply`, and of a call by the forward: otherwise nothing would be checkpointed, without a word."""
    with pytest.raises(
        UsageError, match=r"returns Recompute\(\), Save\(\) or None; .*<lambda> returned .* for the module"
    ):
        reactivate.apply(Model(2), combine(lambda site: None if site.block is None else answer))
    asked = combine(lambda site: answer if site.op == "linear" else None)
    region = reactivate.checkpoint(lambda x: F.linear(x, x).sin(), policy=asked)
    with pytest.raises(UsageError, match="returned .* for a call of 'linear' in the model itself"):
        region(torch.rand(4, 4, requires_grad=True))


def test_an_action_with_a_storage_that_is_none_is_refused() -> None:
    """Of a module by `apply`, and of a call by the forward: otherwise the engine would find it, or nobody."""
    words = r"The action .*'host'.* that .*<lambda> returned takes a storage, an object with `save` and `load`.*; got 'host'"
    wrong: Any = "host"
    with pytest.raises(UsageError, match=words):
        reactivate.apply(Model(2), lambda site: None if site.block is None else Recompute(wrong))
    region = reactivate.checkpoint(lambda x: F.linear(x, x).sin(), policy=lambda site: Save(wrong) if site.op else None)
    with pytest.raises(UsageError, match=words):
        region(torch.rand(4, 4, requires_grad=True))


@each(
    ("make", "message"),
    [
        (lambda: policies.save_ops(), "at least one op"),
        (lambda: policies.save_ops("linaer"), "knows no op 'linaer'. Did you mean 'linear' or"),
        (
            lambda: policies.save_ops("sdpa"),
            "Did you mean 'scaled_dot_product_attention'? policies.save('attention') saves",
        ),
        (lambda: policies.save_ops("flash"), "Did you mean 'scaled_dot_product_attention'?"),
        (lambda: policies.save_ops("matmul "), "knows no op 'matmul '. Did you mean 'matmul'?"),
        (lambda: policies.save_ops("conv"), "Did you mean 'conv1d' or 'conv2d' or 'conv3d'?"),
        (lambda: policies.save_ops("softmax_"), "Did you mean 'softmax'?"),
        (lambda: policies.save_ops("F.linear"), "Did you mean 'linear'?"),
        (lambda: policies.save_ops("aten.mm.default"), "Did you mean 'mm'?"),
        (lambda: policies.save_ops("aten.mm"), "Did you mean 'mm'?"),  # an op of torch's own has no namespace
        (lambda: policies.save_ops("linear", 3), "names of ops, functions of torch and Function classes; got 3"),
        (lambda: policies.save_ops(nn.Linear), "got the class Linear. To save modules, write save_modules(Linear)."),
        (lambda: policies.save_ops("mul_"), "cannot save 'mul_': it writes into its argument"),
        (lambda: policies.save_ops(Tensor.relu_), "use 'relu'"),
        (lambda: policies.save_ops("linear", within=""), "the end of a module's path"),
        (lambda: policies.save_ops("linear", within=nn.Linear), "the end of a module's path"),
        (lambda: policies.save_modules(), "at least one module"),
        (lambda: policies.save_modules(int), "none of these"),
        (lambda: policies.save_modules(""), "none of these"),
        (
            lambda: policies.save_modules(nn.Linear(2, 2)),
            "a module of class Linear is none of these. Pass its path: the name that it has in model.named_modules().",
        ),
        (lambda: policies.recompute_modules(Model(2)), "a module of class Model is none of these. Pass its path"),
        (lambda: policies.recompute_modules(), "full() takes every block"),
        (lambda: policies.recompute_modules(3), "recompute_modules selects modules by"),
        (lambda: policies.save_names(), "takes names as given to reactivate.site"),
        (lambda: policies.save_names(3), "takes names as given to reactivate.site"),
        (lambda: policies.recompute_every(0), "at least 1; got 0"),
        (lambda: policies.recompute_every(True), "got True"),
        (lambda: policies.recompute_every(2, offset=2), "an offset from 0 to 1; got 2"),
        (lambda: policies.every_nth(0, LINEAR), "at least 1; got 0"),
        (lambda: policies.every_nth(2, LINEAR, -1), "an offset from 0 to 1; got -1"),
        (lambda: policies.every_nth(2, "linear"), "every_nth takes a policy"),
        (lambda: policies.first_match(), "at least one policy"),
        (lambda: policies.first_match(LINEAR, 3), "first_match takes a policy"),
        (lambda: policies.union(None), "union takes a policy"),
        (lambda: policies.exclude(LINEAR), "at least one exception"),
        (lambda: reactivate.apply(Model(), None), "apply takes a policy"),
        (
            lambda: reactivate.apply(Model(), "plan.json"),
            "'plan.json'. To read a plan from a file, write reactivate.Plan.load('",
        ),
        (lambda: reactivate.verify(Model(), (), policy=Path("plan.json")), "write reactivate.Plan.load('plan.json')."),
        (lambda: reactivate.apply(torch.sin, policies.full()), "For a function use checkpoint()"),
        (lambda: reactivate.checkpoint(torch.sin, policy=3), "checkpoint(policy=...) takes a policy"),
        (lambda: reactivate.site(3, name="x"), "Write site(fn, name='x')(x)"),
        (lambda: reactivate.site(torch.sin, name=""), "takes a name"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make()


@each(
    ("policy", "messages"),
    [
        (policies.recompute_modules("*.mpl"), ["recompute_modules('*.mpl')", "layers.0, layers.1", "head"]),
        (
            policies.first_match(policies.save_modules("*.upp"), policies.full()),
            ["save_modules('*.upp')", "Did you mean '*.up'?"],
        ),
        (policies.recompute_modules("layer.*"), ["Did you mean 'layers.*'?"]),
        (policies.recompute_modules("model.layers[1]"), ["matches nothing in Model. Did you mean 'layers.1'?"]),
        (policies.recompute_modules("decoder.*"), ["matches nothing in Model. Its blocks"]),
        (
            policies.first_match(policies.save_modules("head"), policies.full()),
            ["matches head", "the regions: layers.0"],
        ),
        (
            policies.first_match(policies.save_modules("layers.*"), policies.full()),
            ["save_modules('layers.*') matches layers.0, layers.1", "no module is recomputed", "exclude(full(), "],
        ),
        (policies.recompute_every(9, offset=8), ["recompute_every(9, offset=8)", "layers.3"]),
        (LINEAR, ["the policy makes no region", "first_match"]),
        (policies.save_modules("*.up"), ["no module is recomputed"]),
        (
            policies.exclude(policies.recompute_modules("layers.0"), policies.recompute_modules("layers.1")),
            ["recompute_modules('layers.1') as an exception to recompute_modules('layers.0') matches nothing"],
        ),
    ],
)
def test_what_matches_no_module_is_refused_by_apply(policy: Any, messages: list[str]) -> None:
    model = Model()
    with pytest.raises(UsageError) as caught:
        reactivate.apply(model, policy)
    for message in messages:
        assert message in str(caught.value)
    reactivate.apply(model, policies.full())  # nothing is left of the refused one


@each(
    ("policy", "message"),
    [
        (policies.save_ops("einsum"), "save_ops('einsum') matches nothing so far, and so saves nothing. Calls seen: "),
        (policies.save_names("q_proj"), "save_names('q_proj') matches nothing"),
        (policies.save_ops("linear", within="*.upp"), "saves nothing. Did you mean '*.up'? Calls seen: "),
        (policies.every_nth(2, policies.save_ops("einsum")), "save_ops('einsum')"),
        (policies.exclude(LINEAR, policies.save_ops("tanh")), "save_ops('tanh') as an exception to save_ops('linear')"),
    ],
)
def test_what_matches_no_call_is_told_when_the_regions_have_run(policy: Any, message: str) -> None:
    model = Model(2)
    reactivate.apply(model, policies.first_match(policy, policies.full()))
    with pytest.warns(UserWarning, match=re.escape(message)):
        model(torch.randn(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 4))  # once


def test_what_says_that_regions_are_recomputed_is_no_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reactivate.checkpoint(Model().layers[0], policy=policies.full(save=["linear"]))(
            torch.randn(2, 4)
        ).sum().backward()


@pytest.mark.parametrize("policy", [policies.save_modules("up"), policies.save_ops("linear", within="up")])
def test_modules_are_not_selected_in_a_region_that_is_a_function(policy: Any) -> None:
    block = Model().layers[0]
    with pytest.raises(UsageError, match=r"the region is a function, which has none. Checkpoint the module itself"):
        reactivate.checkpoint(lambda x: block(x), policy=policy)(torch.randn(2, 4, requires_grad=True))
    saved = reactivate.checkpoint(block, policy=policy)(torch.randn(2, 4, requires_grad=True))
    method = reactivate.checkpoint(block.forward, policy=policy)(torch.randn(2, 4, requires_grad=True))
    assert saved.requires_grad and method.requires_grad


def test_a_list_for_all_models_may_match_nothing() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Tanh()) for _ in range(2)))
    assert saved_in(model, policies.first_match(policies.compute_intensive(), policies.full())) == [[], []]


def test_a_model_has_one_policy_at_a_time() -> None:
    model = Model()
    handle = reactivate.apply(model, policies.full())
    with pytest.raises(UsageError, match="a policy is applied to this model already"):
        reactivate.apply(model, policies.recompute_every(2))
    handle.remove()
    handle.remove()
    assert reactivate.apply(model, policies.recompute_every(2)).regions == ("layers.0", "layers.2")


def test_a_call_that_the_first_steps_skip_is_saved_once_it_is_made() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = nn.Linear(4, 4)
            self.is_skipped = True

        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sin() if self.is_skipped else self.deep(x.exp()).sin().exp()

    block, x = Skipping(), torch.randn(2, 4, requires_grad=True)
    region = reactivate.checkpoint(block, policy=LINEAR)
    with pytest.warns(UserWarning, match=r"save_ops\('linear'\) matches nothing so far"):
        region(x).sum().backward()
    block.is_skipped = False
    expected, sites = gradients(block, x), Sites()
    with observed_by(sites):
        found = list(torch.autograd.grad(region(x).square().sum(), [x, *block.parameters()]))
    assert sites.labels == [["linear"]]
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert_bitwise(one, other, f"gradient {index}")
