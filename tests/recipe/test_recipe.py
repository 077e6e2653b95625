"""Recipes: their options, our own spelling of policies, and the files and values that they come from."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtune
import yaml
from omegaconf import OmegaConf
from oracle import Case
from recipe_cases import ALL, FORCED, MODELS, OP, TORCHTITAN, TORCHTUNE, WIDTH, Plain, check, plain, torchtitan_llama

import reactivate
from reactivate import policies, storage
from reactivate.errors import RecomputeMismatchError, UsageError
from reactivate.guards import DEFAULT
from reactivate.integrations import recipe
from reactivate.policies._base import ReadyMade

# -- the other options ------------------------------------------------------------------------------------------------


def test_the_options_of_torchtitan_reach_the_engine() -> None:
    def settings(**options: Any) -> recipe.Settings:
        return recipe.load({"mode": "full"} | options).settings()

    assert settings() == recipe.Settings(DEFAULT, False, "first")
    assert settings(preserve_rng_state=False).guards == DEFAULT.without("rng")
    assert settings(early_stop=True).early_stop is True
    assert settings(determinism_check="none").check == "none"
    assert settings(debug=True).check == "every"


def test_apply_hands_the_options_on() -> None:
    source = {"mode": "full", "preserve_rng_state": False, "early_stop": False, "debug": True}
    model = Plain()
    handle = recipe.apply(model, source)
    options = model.layers[0].forward.__self__.applied.options
    assert options.guards == DEFAULT.without("rng").members
    assert options.early_stop is False and options.check == "every"
    handle.remove()
    assert "forward" not in vars(model.layers[0])


def test_without_the_rng_guard_a_model_that_draws_nothing_is_exact() -> None:
    check(torchtitan_llama, {"mode": "full", "preserve_rng_state": False}, ALL)


def test_without_the_rng_guard_dropout_differs() -> None:
    options = {"mode": "full", "preserve_rng_state": False}
    with pytest.raises(RecomputeMismatchError, match="computes other values"):
        check(plain, options, ALL)
    with pytest.raises(AssertionError, match="differs"):
        check(plain, {**options, "determinism_check": "none"}, ALL)


# -- our own spelling -------------------------------------------------------------------------------------------------

ON_HOST = storage.Host()
SPELLED: list[tuple[Any, ReadyMade]] = [
    ("full", policies.full()),
    ({"full": {"inputs": "host"}}, policies.full(inputs=ON_HOST)),
    ({"full": {"save": ["linear", "attention"]}}, policies.full(save=["linear", "attention"])),
    (
        {"recompute_every": {"k": 2, "inputs": {"host": {"limit": 1000}}}},
        policies.recompute_every(2, inputs=storage.Host(1000)),
    ),
    ({"full": {"inputs": {"host": {"limit": "1KiB"}}}}, policies.full(inputs=storage.Host(1024))),
    ({"full": {"inputs": {"disk": "tensors"}}}, policies.full(inputs=storage.Disk("tensors"))),
    (
        {"save_names": {"names": ["q"], "storage": {"disk": {"path": "tensors", "limit": 1000}}}},
        policies.save_names("q", storage=storage.Disk("tensors", limit=1000)),
    ),
    ("none", policies.none()),
    ("compute_intensive", policies.compute_intensive()),
    ({"compute_intensive": {"storage": "host"}}, policies.compute_intensive(ON_HOST)),
    ({"recompute_every": 2}, policies.recompute_every(2)),
    ({"recompute_every": {"k": 3, "offset": 1}}, policies.recompute_every(3, offset=1)),
    ({"recompute_modules": ["layers.*"]}, policies.recompute_modules("layers.*")),
    ({"loss_by_rows": ["lm_head"]}, policies.loss_by_rows("lm_head")),
    ({"save": ["attention", "routing"]}, policies.save("attention", "routing")),
    ({"save_ops": ["linear", "matmul"]}, policies.save_ops("linear", "matmul")),
    (
        {"save_ops": {"ops": ["linear"], "within": ["*.up", "*.down"], "storage": "host"}},
        policies.save_ops("linear", within=("*.up", "*.down"), storage=ON_HOST),
    ),
    ({"save_modules": ["*.moe"]}, policies.save_modules("*.moe")),
    ({"save_names": {"names": ["q"], "storage": "host"}}, policies.save_names("q", storage=ON_HOST)),
    (
        {"first_match": [{"save_ops": ["linear"]}, "full"]},
        policies.first_match(policies.save_ops("linear"), policies.full()),
    ),
    ({"union": ["full", "none"]}, policies.union(policies.full(), policies.none())),
    (
        {"exclude": ["full", {"recompute_modules": ["layers.0"]}]},
        policies.exclude(policies.full(), policies.recompute_modules("layers.0")),
    ),
    (
        {"every_nth": {"n": 2, "policy": {"save_ops": ["linear"]}, "offset": 1}},
        policies.every_nth(2, policies.save_ops("linear"), offset=1),
    ),
]


@pytest.mark.parametrize(("spelling", "policy"), SPELLED, ids=lambda value: str(value)[:40])
def test_a_policy_in_plain_words(spelling: Any, policy: ReadyMade) -> None:
    """A spelled policy is the one that Python makes, and comes back as it was written: through YAML as well."""
    loaded = recipe.load({"policy": spelling})
    assert loaded.policy_for(Plain()) == policy
    assert loaded.to_dict() == {"policy": spelling}
    again = recipe.load(yaml.safe_load(yaml.safe_dump(loaded.to_dict())))
    assert again == loaded and hash(again) == hash(loaded)


def test_every_policy_can_be_spelled() -> None:
    spelled = {next(iter(spelling)) if isinstance(spelling, dict) else spelling for spelling, _ in SPELLED}
    assert spelled == {name for name in policies.__all__ if name[0].islower()}


def test_longer_spellings_are_shortened() -> None:
    for spelling in ({"full": {}}, "full"):
        assert recipe.load({"policy": spelling}).to_dict() == {"policy": "full"}
    for spelling in ({"save_ops": "linear"}, {"save_ops": {"ops": "linear"}}, {"save_ops": ("linear",)}):
        assert recipe.load({"policy": spelling}).to_dict() == {"policy": {"save_ops": ["linear"]}}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_policies_of_ours_train_every_model(make: Callable[[], Case]) -> None:
    source = {
        "policy": {"first_match": [{"every_nth": {"n": 2, "policy": {"save_ops": ["linear"]}}}, "full"]},
        "check": "every",
        "early_stop": False,
    }
    loaded = check(make, source, ALL)
    assert loaded.to_dict() == source
    assert loaded.settings() == recipe.Settings(DEFAULT, False, "every")


def test_guards_can_be_left_out_by_name() -> None:
    loaded = recipe.load({"policy": "full", "without_guards": ["rng", "ambient"]})
    assert loaded.settings().guards == DEFAULT.without("rng", "ambient")
    assert loaded.to_dict() == {"policy": "full", "without_guards": ["rng", "ambient"]}


# -- where recipes come from ------------------------------------------------------------------------------------------


def test_a_recipe_is_a_frozen_value() -> None:
    loaded = recipe.load({"ac_mode": "selective", "ac_option": 2})
    with pytest.raises(FrozenInstanceError):
        loaded.ac_option = 3
    assert loaded == recipe.load({"ac_option": 2, "ac_mode": "selective"})
    assert loaded != recipe.load({"ac_mode": "full"})
    assert recipe.load(loaded.to_dict()) == copy.deepcopy(loaded)
    assert recipe.apply(Plain(), loaded).regions == ("layers.1", "layers.3")


@pytest.mark.parametrize("source", [*TORCHTUNE, *TORCHTITAN, OP | {FORCED: ["w1"]}], ids=str)
def test_the_peers_recipes_come_back_as_they_were(source: dict[str, Any]) -> None:
    loaded = recipe.load(source)
    written = loaded.to_dict()
    assert written.items() <= source.items()
    assert recipe.load(written) == loaded and hash(loaded) == hash(recipe.load(written))
    assert repr(loaded).startswith(("Torchtune(", "Torchtitan("))


def test_a_copy_has_the_recipe_too() -> None:
    model, x = Plain().eval(), torch.randn(1, 2, WIDTH)
    recipe.apply(model, OP)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        handle = reactivate.Handle.of(copied)
        assert handle is not None and handle.regions == ALL
        assert handle.policy == recipe.load(OP).policy_for(Plain())
        assert torch.equal(copied(x), model(x))


def test_the_yaml_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (policy,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert recipe.load(yaml.safe_load(policy)).to_dict() == yaml.safe_load(policy)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("policy:\n  first_match:\n  - save_ops: [linear]\n  - full\nearly_stop: false\n")
    expected = {"policy": {"first_match": [{"save_ops": ["linear"]}, "full"]}, "early_stop": False}
    for source in (path, str(path)):
        assert recipe.load(source).to_dict() == expected
        assert recipe.apply(Plain(), source).regions == ALL


def test_a_section_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("training:\n  steps: 10\nactivation_checkpoint:\n  mode: selective\n  selective_ac_option: '2'\n")
    assert recipe.apply(Plain(), path, section="activation_checkpoint").regions == ("layers.1", "layers.3")
    with pytest.raises(UsageError, match=r"no section 'checkpoint'. There are: 'training', 'activation_checkpoint'"):
        recipe.load(path, section="checkpoint")
    with pytest.raises(UsageError, match=r"no field 'training'"):
        recipe.load(path)


def test_the_fields_of_a_recipe_of_torchtunes_own() -> None:
    """One that comes with it, by the reader that it uses."""
    place = Path(torchtune.__file__).parent.parent / "recipes" / "configs" / "dev"
    whole = OmegaConf.load(place / "8B_full_experimental.yaml")
    names = [item.name for item in fields(recipe.load({"ac_mode": "full"}))]
    ours = OmegaConf.masked_copy(whole, names)
    assert len(ours) == 4
    assert recipe.apply(Plain(), ours).regions == ("layers.1", "layers.3")
    spelled = OmegaConf.create({"policy": {"first_match": [{"save_ops": ["linear"]}, "full"]}})
    assert recipe.load(spelled).to_dict() == OmegaConf.to_object(spelled)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ac_mode: full\nac_mode: none\n", r"line 1: 'ac_mode' stands twice"),
        (
            "policy:\n  first_match:\n  - save_ops: {ops: [linear], ops: [mm]}\n  - full\n",
            r"line 3: 'ops' stands twice",
        ),
        ("ac_mode: [full\n", "is no YAML"),
        ("", "mapping"),
        ("- full\n", "mapping"),
        ("mode: !!python/object:builtins.object {}\n", "is no YAML"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        recipe.load(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent.yaml cannot be read: No such file"):
        recipe.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize(("module", "source"), [("pydantic", {"ac_mode": "full"}), ("yaml", "recipe.yaml")])
def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, module: str, source: Any) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"needs {module}: pip install pydantic pyyaml"):
        recipe.load(source)
