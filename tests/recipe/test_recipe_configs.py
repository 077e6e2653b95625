"""Recipes as today's packages write them: their own configurations, whole and with their defaults."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
import types
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchtune
import yaml
from oracle import Case, assert_same, run
from several import each
from torch import Tensor, nn

from reactivate import policies
from reactivate.errors import PlanInfeasible, UsageError
from reactivate.guards import DEFAULT
from reactivate.integrations import recipe
from reactivate.planner.candidates import KEEP
from reactivate.planner.plan import Plan

if importlib.util.find_spec("triton") is None:  # which torchtitan 0.2 imports for kernels that no model here runs
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules.setdefault(kernels.__name__, kernels)

INSTALLED = tuple(map(int, version("torchtitan").split(".")[:2]))
WIDTH, LAYERS = 16, 4
ALL = tuple(f"layers.{number}" for number in range(LAYERS))
FORCED = "force_recompute_mm_shapes_by_fqns"
BATCH = (4, 8, WIDTH)


class Layer(nn.Module):
    """A mixture of experts as far as it matters here: a router that chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = nn.ModuleDict({"router": nn.ModuleDict({"gate": nn.Linear(WIDTH, 4, bias=False)})})
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        best, _ = self.moe["router"]["gate"](h).softmax(-1).topk(2, -1)
        return x + self.dropout(self.down(F.silu(self.up(h)))) * best.sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def case() -> Case:
    return Case(Model(), (torch.randn(BATCH),))


def check(source: Any, regions: tuple[str, ...], **options: Any) -> None:
    """Under the recipe the model does what it does without, and the regions are these."""
    handles = []

    def applied(model: nn.Module) -> nn.Module:
        handles.append(recipe.apply(model, source, **options))
        return model

    without, ours = run(case), run(case, applied)
    assert_same(without, ours)
    assert handles[0].regions == regions and ours.regions == ours.recomputations == len(regions)
    assert (ours.kept_bytes < without.kept_bytes) == bool(regions)


# -- torchtitan 0.3 ---------------------------------------------------------------------------------------------------
# These mirror torchtitan 0.3.0: names of classes, fields, defaults and what `to_dict` of a configuration gives.


class Configurable:
    @dataclass(kw_only=True)
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return asdict(self)


class ActivationCheckpointing(Configurable):
    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False


class FullAC(ActivationCheckpointing):
    @dataclass(kw_only=True)
    class Config(ActivationCheckpointing.Config):
        pass


class SelectiveAC(ActivationCheckpointing):
    @dataclass(kw_only=True)
    class Config(ActivationCheckpointing.Config):
        force_recompute_mm_shapes_by_fqns: list[str] = field(default_factory=lambda: ["moe.router.gate"])


class MemoryBudgetAC(ActivationCheckpointing):
    @dataclass(kw_only=True)
    class Config(ActivationCheckpointing.Config):
        memory_budget: float = 0.5
        visualize_memory_budget_pareto: bool = False


class Trainer(Configurable):
    @dataclass(kw_only=True)
    class Config(Configurable.Config):
        steps: int = 10
        activation_checkpoint: Any = field(default_factory=SelectiveAC.Config)


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (FullAC, {"mode": "FullAC"}),
    (SelectiveAC, {"mode": "SelectiveAC", FORCED: ["moe.router.gate"]}),
    (MemoryBudgetAC, {"mode": "MemoryBudgetAC", "memory_budget": 0.5}),
]


@pytest.mark.parametrize(("kind", "expected"), CLASSES, ids=lambda item: getattr(item, "__name__", ""))
def test_a_class_by_name_as_an_object_and_as_a_dump(kind: Any, expected: dict[str, Any]) -> None:
    config = kind.Config()
    trainer = Trainer.Config(activation_checkpoint=config)
    written = json.loads(json.dumps(trainer.to_dict()))
    section = "activation_checkpoint"
    found = [
        recipe.load({"mode": kind.__name__, **config.to_dict()}),
        recipe.load(config),
        recipe.load(config.to_dict()),
        recipe.load(trainer, section=section),
        recipe.load(written, section=section),
    ]
    assert all(loaded == found[0] for loaded in found)
    assert found[0].to_dict() == expected
    assert recipe.load(found[0].to_dict()) == found[0] and hash(found[0]) == hash(found[1])
    assert repr(found[0]).startswith(f"TorchtitanClasses(mode='{kind.__name__}'")


def test_none_is_no_checkpointing() -> None:
    for source in (Trainer.Config(activation_checkpoint=None), {"activation_checkpoint": None}):
        assert recipe.load(source, section="activation_checkpoint").policy_for(Model()) == policies.none()
    check({"mode": "none"}, ())
    with pytest.raises(UsageError, match="mapping"):
        recipe.load(None)


@pytest.mark.parametrize(
    "source",
    [
        FullAC.Config(),
        {"mode": "FullAC"},
        SelectiveAC.Config(),
        {"mode": "SelectiveAC"},
        SelectiveAC.Config(debug=True),
    ],
    ids=str,
)
def test_every_layer_is_a_region_and_every_bit_the_same(source: Any) -> None:
    check(source, ALL)


def test_the_names_of_its_command_line() -> None:
    assert recipe.load({"mode": "memory-budget"}) == recipe.load({"mode": "MemoryBudgetAC"})
    assert recipe.load({"mode": "selective", FORCED: ["up"]}) == recipe.load(SelectiveAC.Config(**{FORCED: ["up"]}))


def test_early_stop_is_off_as_it_has_it() -> None:
    for kind in (FullAC, SelectiveAC):
        assert recipe.load(kind.Config()).settings() == recipe.Settings(DEFAULT, False, "first")
        options = {"preserve_rng_state": False, "determinism_check": "none"}
        assert recipe.load(kind.Config(**options)).settings() == recipe.Settings(DEFAULT.without("rng"), False, "none")
        assert recipe.load(kind.Config(debug=True)).settings().check == "every"
    assert recipe.load({"mode": "full"}).settings().early_stop is False
    model = Model()
    recipe.apply(model, FullAC.Config())
    assert model.layers[0].forward.__self__.applied.options.early_stop is False


def test_the_class_is_0_2s_mode_op() -> None:
    before = {"mode": "selective", "selective_ac_option": "op"}
    for names in (["moe.router.gate"], ["up"], []):
        ours = recipe.load(SelectiveAC.Config(**{FORCED: names})).policy_for(Model())
        assert ours == recipe.load(before | {"per_op_sac_" + FORCED: names}).policy_for(Model())


def test_its_own_list_may_match_nothing_and_no_other() -> None:
    dense = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(2))})
    assert recipe.apply(dense, SelectiveAC.Config()).regions == ("layers.0", "layers.1")
    with pytest.raises(UsageError, match=r"'moe.rooter' is in none of these"):
        recipe.load(SelectiveAC.Config(**{FORCED: ["moe.rooter"]})).policy_for(dense)


# -- a memory budget --------------------------------------------------------------------------------------------------


def planned(source: Any) -> Plan:
    plan = recipe.load(source).policy_for(Model(), recipe.Example((torch.randn(BATCH),)))
    assert isinstance(plan, Plan)
    return plan


def test_a_memory_budget_becomes_a_plan() -> None:
    """From the least memory with which the step runs, 0, to that of the plain step, 1."""
    least, half, most = (planned(MemoryBudgetAC.Config(memory_budget=share)) for share in (0.0, 0.5, 1.0))
    assert most.budget_bytes == most.plain.peak_bytes and {item.candidate for item in most.decisions} == {KEEP}
    assert least.predicted.peak_bytes == least.budget_bytes < half.budget_bytes < most.budget_bytes
    assert half.budget_bytes == least.budget_bytes + round(0.5 * (most.budget_bytes - least.budget_bytes))
    assert least.predicted.peak_bytes <= half.predicted.peak_bytes <= half.budget_bytes
    with pytest.raises(PlanInfeasible, match="no plan keeps"):
        half.at(least.budget_bytes - 1)


@pytest.mark.parametrize(
    "source", [MemoryBudgetAC.Config(memory_budget=0.0), {"mode": "memory_budget", "memory_budget": 0}]
)
def test_a_memory_budget_is_applied(source: Any) -> None:
    regions = recipe.apply(Model(), source, torch.randn(BATCH), loss=torch.sum).regions
    check(source, regions, args=torch.randn(BATCH), loss=torch.sum)
    assert len(regions) >= LAYERS - 1
    settings = recipe.load(source).settings()
    assert settings == recipe.Settings(DEFAULT, True, "metadata")  # those of the plan's simulation


def test_a_memory_budget_needs_a_batch() -> None:
    with pytest.raises(UsageError, match=r"memory_budget=0.5 becomes a plan.*recipe.apply\(model, source, batch\)"):
        recipe.apply(Model(), MemoryBudgetAC.Config())


# -- torchtitan 0.2 ---------------------------------------------------------------------------------------------------

# What `asdict(ActivationCheckpoint())` of torchtitan 0.2.2 gives.
DUMP = {
    "mode": "selective",
    "selective_ac_option": "2",
    "per_op_sac_" + FORCED: ["moe.router.gate"],
    "early_stop": False,
    "memory_budget": 0.5,
    "visualize_memory_budget_pareto": False,
    "preserve_rng_state": True,
    "determinism_check": "default",
    "debug": False,
}


@each(
    ("changes", "expected"),
    [
        ({}, {"mode": "selective", "selective_ac_option": "2"}),
        ({"mode": "none"}, {"mode": "none"}),
        ({"mode": "full", "early_stop": True}, {"mode": "full", "early_stop": True}),
        (
            {"selective_ac_option": "op"},
            {"mode": "selective", "selective_ac_option": "op", "per_op_sac_" + FORCED: ["moe.router.gate"]},
        ),
        ({"mode": "memory_budget", "early_stop": True}, {"mode": "memory_budget", "memory_budget": 0.5}),
    ],
    ids=str,
)
def test_0_2s_whole_dump_has_the_options_of_every_mode(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    loaded = recipe.load(DUMP | changes)
    assert loaded.to_dict() == expected and recipe.load(expected) == loaded


def test_0_2s_whole_dump_is_checked_as_any_other_recipe() -> None:
    with pytest.raises(UsageError, match=r"mode='Full' is not allowed. Did you mean 'full'"):
        recipe.load(DUMP | {"mode": "Full"})
    with pytest.raises(UsageError, match=r"selective_ac_option='0' is not allowed"):
        recipe.load(DUMP | {"selective_ac_option": "0"})
    check(DUMP, ("layers.1", "layers.3"))
    check(DUMP | {"selective_ac_option": "op"}, ALL)


# -- refusals ---------------------------------------------------------------------------------------------------------


class OwnAC(SelectiveAC):
    @dataclass(kw_only=True)
    class Config(SelectiveAC.Config):
        pass


@each(
    ("source", "parts"),
    [
        ({"mode": "fullac"}, ["mode='fullac'", "'FullAC'"]),
        ({"mode": "FullAC", FORCED: ["up"]}, [f"{FORCED} is an option of mode='SelectiveAC'", "'FullAC'"]),
        ({"mode": "FullAC", "early_stop": True}, ["'early_stop' of torchtitan;", "'mode' of torchtitan 0.3"]),
        ({"mode": "SelectiveAC", "selective_ac_option": "2"}, ["'selective_ac_option' of torchtitan;"]),
        ({"mode": "SelectiveAC", "memory_budget": 0.5}, ["memory_budget=0.5 is an option of mode='MemoryBudgetAC'"]),
        ({"mode": "full", "memory_budget": 0.0}, ["memory_budget=0.0 is an option of mode='memory_budget'", "'full'"]),
        ({"mode": "full", "visualize_memory_budget_pareto": True}, ["is an option of mode='memory_budget'"]),
        ({"mode": "memory_budget", "memory_budget": 1.5}, ["memory_budget=1.5", "from 0", "to 1"]),
        ({"mode": "memory_budget", "memory_budget": "0.5"}, ["memory_budget='0.5'", "a number from 0 to 1"]),
        ({"mode": "memory_budget", "memory_budget": -0.1}, ["memory_budget=-0.1"]),
        ({"mode": "memory_budget", "early_stop": True}, ["early_stop=True is an option of mode='full'"]),
        (MemoryBudgetAC.Config(visualize_memory_budget_pareto=True), ["writes no files", "Plan.frontier"]),
        (FullAC.Config(debug=True, determinism_check="none"), ["debug=True", "Leave one out"]),
        (OwnAC.Config(), ["OwnAC.Config", "FullAC, SelectiveAC, MemoryBudgetAC", "may save other ops"]),
        (Trainer.Config(), ["Trainer.Config is none of the classes"]),
    ],
    ids=lambda item: str(item)[:60],
)
def test_refused(source: Any, parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        recipe.load(source)
    for part in parts:
        assert part in str(caught.value)


def test_a_section_that_an_object_does_not_have() -> None:
    with pytest.raises(UsageError, match="no section 'checkpoint'. There are: 'steps', 'activation_checkpoint'"):
        recipe.load(Trainer.Config(), section="checkpoint")


# -- torchtune --------------------------------------------------------------------------------------------------------


def test_torchtunes_option_may_be_text() -> None:
    check({"ac_mode": "selective", "ac_option": "2"}, ("layers.1", "layers.3"))
    assert recipe.load({"ac_mode": "selective", "ac_option": "3"}).to_dict() == {
        "ac_mode": "selective",
        "ac_option": "3",
    }


@pytest.mark.parametrize("option", [2, "2", "op"])
def test_torchtunes_option_is_ignored_but_in_selective_mode(option: Any) -> None:
    check({"ac_mode": "full", "ac_option": option}, ALL)
    check({"ac_mode": "none", "ac_option": option}, ())


# -- the packages' own ------------------------------------------------------------------------------------------------

CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
NAMES = ("enable_activation_checkpointing", "enable_activation_offloading", "ac_mode", "ac_option")


def test_every_configuration_of_torchtunes_own_is_read() -> None:
    read = offloaded = 0
    for path in sorted(CONFIGS.rglob("*.yaml")):
        whole = yaml.safe_load(path.read_text())
        given = {name: whole[name] for name in NAMES if name in whole}
        if not given:
            continue
        read += 1
        handle = recipe.apply(Model(), given)
        is_on = given.get("enable_activation_checkpointing") or given.get("ac_mode", "none") != "none"
        assert bool(handle.regions) == is_on, path
        is_offloaded = "inputs=Host(" in repr(handle.policy)
        assert is_offloaded == bool(given.get("enable_activation_offloading")), path
        offloaded += is_offloaded
    assert read > 50 and offloaded


@pytest.fixture
def titan_02() -> Any:
    if INSTALLED >= (0, 3):
        pytest.skip(f"torchtitan {version('torchtitan')} is installed: its configuration is that of 0.3")
    return importlib.import_module("torchtitan.config.job_config")


def test_the_default_configuration_of_torchtitan_0_2(titan_02: Any) -> None:
    config = titan_02.ActivationCheckpoint()
    assert asdict(config) == DUMP
    loaded = recipe.load(config)
    assert loaded == recipe.load(DUMP) == recipe.load(asdict(config))
    job = titan_02.JobConfig()
    assert loaded == recipe.load(job, section="activation_checkpoint")
    assert loaded == recipe.load(job.to_dict(), section="activation_checkpoint")
    assert recipe.load(replace(config, mode="none")).policy_for(Model()) == policies.none()


@pytest.fixture
def titan_03() -> Any:
    if INSTALLED < (0, 3):
        pytest.skip(f"torchtitan {version('torchtitan')} is installed: its classes came with 0.3")
    return importlib.import_module("torchtitan.distributed.activation_checkpoint")


@pytest.mark.parametrize("mirror", [FullAC, SelectiveAC, MemoryBudgetAC], ids=lambda kind: kind.__name__)
def test_the_default_configurations_of_torchtitan_0_3(titan_03: Any, mirror: Any) -> None:
    config = getattr(titan_03, mirror.__name__).Config()
    assert config.to_dict() == mirror.Config().to_dict()
    assert [item.name for item in dataclasses.fields(config)] == [
        item.name for item in dataclasses.fields(mirror.Config)
    ]
    assert recipe.load(config) == recipe.load(config.to_dict()) == recipe.load(mirror.Config())
    if mirror is not MemoryBudgetAC:
        check(config, ALL)


def test_the_ops_that_torchtitan_0_3_saves(titan_03: Any) -> None:
    """Ops of ATen that users do not call go by what they are called through: a convolution by conv2d, and so on."""
    ops = {op.name() for op in titan_03.SelectiveAC(titan_03.SelectiveAC.Config()).get_save_ops()}
    names = {name.removeprefix("aten::").replace("::", ".") for name in ops} - {"convolution_backward"}
    assert names <= set(policies.compute_intensive().ops)  # type: ignore[attr-defined]
