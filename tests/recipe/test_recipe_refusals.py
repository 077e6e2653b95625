"""Refusals of recipes: everything that is not done is named, with what to write in its place."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from recipe_cases import FORCED, LAYERS, OP, WIDTH, Plain
from torch import nn

from reactivate.errors import UsageError
from reactivate.integrations import recipe

NUMBER = "'op', or k for every k-th layer: a whole number of at least 1"
MODES = "'none', 'full' or 'selective'"
TORCHTITANS_MODES = (
    "'none', 'full', 'selective' or 'memory_budget'; since 0.3 'FullAC', 'SelectiveAC' or 'MemoryBudgetAC'"
)
REFUSED: list[tuple[Any, list[str]]] = [
    # what is no recipe
    ({}, ["does not say what to recompute", "'ac_mode'", "'mode'", "'policy'"]),
    ({"early_stop": True}, ["does not say what to recompute"]),
    (None, ["mapping", "None"]),
    (["full"], ["mapping", "['full']"]),
    # keys
    ({"ac_mod": "full"}, ["no field 'ac_mod'", "Did you mean 'ac_mode'?", "torchtitan: mode, "]),
    ({"mode": "full", "selective_ac_options": "2"}, ["Did you mean 'selective_ac_option'?"]),
    ({"policy": "full", "zzz": 1}, ["no field 'zzz'", "reactivate: policy, "]),
    ({1: "full"}, ["no field 1"]),
    ({"ac_mode": "full", "mode": "full"}, ["'ac_mode' of torchtune; 'mode' of torchtitan", "Keep to one"]),
    ({"policy": "full", "ac_mode": "full"}, ["'ac_mode' of torchtune; 'policy' of reactivate"]),
    ({"policy": "full", "mode": "full"}, ["'mode' of torchtitan", "; 'policy' of reactivate"]),
    # torchtune's
    ({"ac_mode": "Full"}, ["ac_mode='Full'", "Did you mean 'full'?", MODES]),
    ({"ac_mode": "SELECTIVE", "ac_option": 2}, ["Did you mean 'selective'?", MODES]),
    ({"ac_mode": "op"}, ["ac_mode='op'", MODES]),
    ({"ac_mode": True}, ["ac_mode=True", MODES]),
    ({"ac_option": 2}, ["ac_option=2 is an option of ac_mode='selective'", "ac_mode is None"]),
    ({"ac_mode": "selective"}, ["needs ac_option", NUMBER]),
    *(
        ({"ac_mode": "selective", "ac_option": option}, [f"ac_option={option!r}", NUMBER])
        for option in (0, -1, 2.7, 2.0, True, False, "0", "02", "ops", "Op", [2])
    ),
    ({"enable_activation_checkpointing": True, "ac_mode": "full"}, ["two switches for one thing"]),
    ({"enable_activation_checkpointing": True, "ac_mode": "none"}, ["two switches for one thing"]),
    ({"enable_activation_checkpointing": "yes"}, ["'yes'", "True or False"]),
    ({"enable_activation_checkpointing": 1}, ["=1", "True or False"]),
    (
        {"enable_activation_checkpointing": False, "enable_activation_offloading": True},
        ["needs enable_activation_checkpointing=True"],
    ),
    # torchtitan's
    ({"mode": "Full"}, ["mode='Full'", "Did you mean 'full'?", TORCHTITANS_MODES]),
    ({"mode": None}, ["mode=None", TORCHTITANS_MODES]),
    ({"preserve_rng_state": False}, ["'mode' is missing", TORCHTITANS_MODES]),
    ({"selective_ac_option": "2"}, ["'mode' is missing", TORCHTITANS_MODES]),
    ({"mode": "selective"}, ["needs selective_ac_option", NUMBER]),
    ({"mode": "full", "selective_ac_option": "2"}, ["is an option of mode='selective'", "'full'"]),
    ({"mode": "none", "selective_ac_option": "op"}, ["is an option of mode='selective'", "'none'"]),
    *(
        ({"mode": "selective", "selective_ac_option": option}, [f"selective_ac_option={option!r}", NUMBER])
        for option in ("0", "-1", "2.7", "", " 2", "Op", "²", "02", 0, -1, 2.7, True)
    ),
    ({"mode": "full", FORCED: ["w1"]}, [FORCED, "mode='selective' with selective_ac_option='op'"]),
    ({"mode": "selective", "selective_ac_option": "2", FORCED: ["w1"]}, [FORCED, "selective_ac_option='2'"]),
    (OP | {FORCED: "w1"}, [f"{FORCED}='w1'", "a list"]),
    (OP | {FORCED: [1]}, ["a list"]),
    (
        OP | {"force_recompute_mm_shapes_by_fqns": ["w1"]},
        ["'selective_ac_option' of torchtitan;", "'force_recompute_mm_shapes_by_fqns' of torchtitan 0.3. Keep to one"],
    ),
    ({"mode": "full", "determinism_check": "values"}, ["determinism_check='values'", "'default' or 'none'"]),
    ({"mode": "full", "determinism_check": "none", "debug": True}, ["debug=True", "Leave one out"]),
    ({"mode": "full", "early_stop": 1}, ["early_stop=1", "True or False"]),
    ({"mode": "full", "preserve_rng_state": "false"}, ["preserve_rng_state='false'", "True or False"]),
    # ours
    ({"policy": "Full"}, ["no policy 'Full'", "Did you mean 'full'?", "'recompute_every'"]),
    ({"policy": None}, ["a policy is a name", "None"]),
    ({"policy": {"full": {}, "none": {}}}, ["a policy is a name"]),
    ({"policy": {"full": 2}}, ["full does not take 2", "It takes 'save', 'inputs'"]),
    ({"policy": {"recompute_every": 0}}, ["at least 1", "0"]),
    ({"policy": {"recompute_every": 2.7}}, ["whole number", "2.7"]),
    ({"policy": {"recompute_every": True}}, ["whole number", "True"]),
    ({"policy": {"recompute_every": {"k": 2, "ofset": 1}}}, ["'ofset'", "Did you mean 'offset'?"]),
    ({"policy": "recompute_every"}, ["recompute_every needs 'k'"]),
    ({"policy": {"every_nth": {"policy": "full"}}}, ["every_nth needs 'n'"]),
    ({"policy": {"save_ops": ["linera"]}}, ["linera", "linear"]),
    ({"policy": {"save_ops": [1]}}, ["a list of texts", "[1]"]),
    ({"policy": {"save_ops": 1}}, ["is a list", "1"]),
    (
        {"policy": {"save_ops": {"ops": ["linear"], "storage": "Host"}}},
        ["the storage 'Host' is not known", "'device', 'disk', 'host'"],
    ),
    ({"policy": {"full": {"inputs": {"disk": 3}}}}, ["Disk: path is a text; got 3"]),
    ({"policy": {"first_match": "full"}}, ["policies is a list"]),
    ({"policy": {"first_match": {"save_ops": ["linear"]}}}, ["policies is a list"]),
    ({"policy": {"first_match": []}}, ["at least one policy"]),
    ({"policy": {"first_match": ["full", "ful"]}}, ["Did you mean 'full'?"]),
    ({"policy": "full", "without_guards": ["rgn"]}, ["'rgn'", "rng, ambient, modules"]),
    ({"policy": "full", "without_guards": "rng"}, ["without_guards='rng'", "a list"]),
    ({"policy": "full", "check": "value"}, ["'first', 'every', 'metadata' or 'none'"]),
]


@pytest.mark.parametrize(("source", "parts"), REFUSED, ids=lambda value: str(value)[:80])
def test_refused(source: Any, parts: list[str]) -> None:
    model = Plain()
    for attempt in (recipe.load, functools.partial(recipe.apply, model)):
        with pytest.raises(UsageError) as caught:
            attempt(source)
        for part in parts:
            assert part in str(caught.value)
    assert not any("forward" in vars(module) for module in model.modules())


REFUSED_BY_THE_MODEL: list[tuple[Any, list[str]]] = [
    ({"ac_mode": "selective", "ac_option": LAYERS + 1}, ["ac_option=6", "the 5 layers", "layers.0", "It takes 1 to 5"]),
    ({"mode": "selective", "selective_ac_option": "6"}, ["selective_ac_option=6", "It takes 1 to 5"]),
    ({"mode": "selective", "selective_ac_option": 6}, ["selective_ac_option=6", "It takes 1 to 5"]),
    (OP | {FORCED: ["mix", "gaet"]}, [FORCED, "'gaet' is in none of these", "layers.*.moe.router.gate"]),
    (OP | {FORCED: [""]}, ["''", "layers.*.mix"]),
    (OP | {FORCED: ["head"]}, ["'head' is in none of these"]),  # it is there, but in no layer
    (OP | {FORCED: ["moe"]}, ["'moe' is in that of layers.0.moe, which is none", "layers.*.moe.up"]),
    (
        {"mode": "selective", "force_recompute_mm_shapes_by_fqns": ["moe.rooter"]},
        ["force_recompute_mm_shapes_by_fqns lists", "'moe.rooter' is in none"],
    ),
    ({"policy": {"recompute_modules": ["*.attention"]}}, ["'*.attention'", "matches nothing"]),
    ({"policy": {"first_match": [{"save_modules": ["*.attention"]}, "full"]}}, ["'*.attention'", "matches nothing"]),
]


@pytest.mark.parametrize(("source", "parts"), REFUSED_BY_THE_MODEL, ids=lambda value: str(value)[:80])
def test_refused_by_the_model(source: Any, parts: list[str]) -> None:
    model = Plain()
    recipe.load(source)
    with pytest.raises(UsageError) as caught:
        recipe.apply(model, source)
    for part in parts:
        assert part in str(caught.value)
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_op_that_the_model_does_not_have_is_told_when_it_runs() -> None:
    model = Plain()
    recipe.apply(model, {"policy": {"first_match": [{"save_ops": ["conv2d"]}, "full"]}})
    with pytest.warns(UserWarning, match=r"conv2d.*matches nothing"):
        model(torch.randn(1, 2, WIDTH, requires_grad=True))


@pytest.mark.parametrize("source", [{"ac_mode": "full"}, {"mode": "full"}, OP], ids=str)
def test_a_model_without_layers_is_refused(source: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"Linear has no layers to choose from.*recompute_modules"):
        recipe.apply(nn.Linear(2, 2), source)


def test_apply_wants_a_module() -> None:
    with pytest.raises(UsageError, match=r"takes a torch.nn.Module; got dict"):
        recipe.apply({"ac_mode": "full"}, Plain())
