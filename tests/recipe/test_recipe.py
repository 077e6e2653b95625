"""Recipes: the layers that the peers choose, bit for bit as without, and a refusal of everything that is not done."""

from __future__ import annotations

import copy
import functools
import importlib.util
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torchtune
import yaml
from memory import allocated_by
from omegaconf import OmegaConf
from oracle import Case, assert_same, run
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import CheckpointPolicy
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import activations, set_activation_checkpointing

import reactivate
from reactivate import policies, storage
from reactivate._types import Policy, Save, Site
from reactivate.errors import RecomputeMismatchError, UsageError
from reactivate.guards import DEFAULT
from reactivate.integrations import recipe
from reactivate.policies._base import Interest, ReadyMade, interest_of

if importlib.util.find_spec("triton") is None:
    # torchtitan imports its Triton kernels for mixtures of experts, and a torch for CPUs comes without Triton. No model
    # here runs them.
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules.setdefault(kernels.__name__, kernels)

from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import activation_checkpoint as torchtitan_checkpoint
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 61, 32, 4, 5, 2, 8
DROPOUT = 0.2
ALL = tuple(f"layers.{number}" for number in range(LAYERS))


# -- models -----------------------------------------------------------------------------------------------------------


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def torchtune_llama() -> Case:
    model = llama2(
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS // 2,
        embed_dim=WIDTH,
        max_seq_len=LENGTH,
        attn_dropout=DROPOUT,
    )
    return Case(model.train(), (tokens(),))


def torchtitan_llama(kv_heads: int = HEADS // 2) -> Case:
    arguments = TransformerModelArgs(
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=kv_heads,
        vocab_size=VOCABULARY,
        multiple_of=8,
        max_seq_len=LENGTH,
    )
    model = Transformer(arguments)
    with torch.no_grad():
        model.init_weights()
    return Case(model, (tokens(),))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)) * self.router(x).amax(-1, keepdim=True))


class PlainLayer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.moe = Experts()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.moe(torch.sin(self.mix(self.norm(x)))))


class Plain(nn.Module):
    """Nobody's model."""

    def __init__(self, bias: bool = False, count: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer(bias) for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def plain() -> Case:
    return Case(Plain(), (torch.randn(BATCH, LENGTH, WIDTH),))


MODELS = [torchtune_llama, torchtitan_llama, plain]


def model_of(make: Callable[[], Case]) -> nn.Module:
    return make().modules[0]


def check(make: Callable[[], Case], source: Any, regions: tuple[str, ...]) -> recipe.Recipe:
    """Under the recipe the model does what it does without, and the regions are these; every one ran and was recomputed."""
    handles = []

    def applied(model: nn.Module) -> nn.Module:
        handles.append(recipe.apply(model, source))
        return model

    without = run(make)
    ours = run(make, applied)
    assert_same(without, ours)
    assert any(gradient is not None and gradient.any() for gradient in without.gradients.values())
    assert handles[0].regions == regions
    assert ours.regions == ours.recomputations == len(regions)
    assert (ours.kept_bytes < without.kept_bytes) == bool(regions)
    return recipe.load(source)


# -- the peers' own choice --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both peers count layers in the process, so that a second model gets other layers; here each is the first."""
    monkeypatch.setattr(activations.checkpoint_wrapper, "_count", 0, raising=False)
    monkeypatch.setattr(torchtitan_checkpoint, "_layer_sac_count", 0)
    yield
    torch._C._dynamo.eval_frame._set_lru_cache(True)  # torchtitan switches it off


def wrapped_in(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        name.replace("._checkpoint_wrapped_module", "")
        for name, module in model.named_modules()
        if isinstance(module, CheckpointWrapper)
    )


def torchtune_does(model: nn.Module, source: dict[str, Any]) -> nn.Module:
    """Apply these fields as torchtune's recipes do."""
    if source.get("enable_activation_checkpointing"):
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    else:
        activations.apply_selective_activation_checkpointing(model, source["ac_mode"], source.get("ac_option"))
    return model


def torchtitan_does(model: nn.Module, source: dict[str, Any]) -> nn.Module:
    if source["mode"] != "none":  # as its parallelize functions do
        config = ActivationCheckpoint(**source)
        torchtitan_checkpoint.apply_ac(model, config, op_sac_save_list=_op_sac_save_list)
    return model


TORCHTUNE: list[dict[str, Any]] = [
    {"enable_activation_checkpointing": True},
    {"enable_activation_checkpointing": True, "enable_activation_offloading": True},
    {"ac_mode": "none"},
    {"ac_mode": "full"},
    {"enable_activation_checkpointing": False, "enable_activation_offloading": False, "ac_mode": "full"},
    *({"ac_mode": "selective", "ac_option": k} for k in range(1, LAYERS + 1)),
]
TORCHTITAN: list[dict[str, Any]] = [
    {"mode": "none"},
    {"mode": "full"},
    *({"mode": "selective", "selective_ac_option": str(k)} for k in range(1, LAYERS + 1)),
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "full", "preserve_rng_state": True, "determinism_check": "none", "early_stop": False},
    {"mode": "selective", "selective_ac_option": "2", "debug": True},
]


@pytest.mark.parametrize("source", TORCHTUNE, ids=str)
def test_torchtune_chooses_these_layers(source: dict[str, Any]) -> None:
    regions = wrapped_in(torchtune_does(model_of(torchtune_llama), source))
    assert bool(regions) == (source.get("ac_mode") != "none")
    check(torchtune_llama, source, regions)


@pytest.mark.parametrize("source", TORCHTITAN, ids=str)
def test_torchtitan_chooses_these_layers(source: dict[str, Any]) -> None:
    regions = wrapped_in(torchtitan_does(model_of(torchtitan_llama), source))
    assert bool(regions) == (source["mode"] != "none")
    check(torchtitan_llama, source, regions)


@pytest.mark.parametrize("source", [*TORCHTUNE[2:], *TORCHTITAN], ids=str)
def test_of_a_model_of_ones_own_too(source: dict[str, Any]) -> None:
    does = torchtune_does if "ac_mode" in source else torchtitan_does
    check(plain, source, wrapped_in(does(model_of(plain), source)))


def test_torchtunes_switch_takes_every_block_of_a_model_that_is_not_torchtunes() -> None:
    check(plain, {"enable_activation_checkpointing": True}, ALL)


def test_torchtunes_switch_takes_its_layers_wherever_they_are() -> None:
    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"decoder": model_of(torchtune_llama), "one": model_of(torchtune_llama).layers[0]})

    source = {"enable_activation_checkpointing": True}
    expected = wrapped_in(torchtune_does(make(), source))
    assert recipe.apply(make(), source).regions == expected == (*(f"decoder.{path}" for path in ALL), "one")


def test_layers_under_another_name() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, DROPOUT, batch_first=True)
    model = nn.ModuleDict({"body": nn.TransformerEncoder(layer, LAYERS)})
    found = recipe.apply(model, {"mode": "selective", "selective_ac_option": "2"}).regions
    assert found == ("body.layers.1", "body.layers.3")


def test_a_layer_elsewhere_whose_path_ends_alike_is_left_alone() -> None:
    model = Plain()
    model.vision = Plain()
    assert recipe.apply(model, {"ac_mode": "full"}).regions == ALL


def test_one_layer_is_enough() -> None:
    make = functools.partial(Plain, count=1)
    expected = wrapped_in(torchtitan_does(make(), {"mode": "full"}))
    assert recipe.apply(make(), {"mode": "full"}).regions == expected == ("layers.0",)


def test_each_model_is_counted_from_its_first_layer() -> None:
    source = {"ac_mode": "selective", "ac_option": 3}
    for _ in range(3):
        assert recipe.apply(Plain(), source).regions == ("layers.2",)


# -- torchtitan's selective mode "op" ---------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Noted(ReadyMade):
    """A policy, and what it said of each call of `linear`: whether it is kept."""

    policy: Policy
    kept: list[bool] = field(default_factory=list, compare=False)

    def __repr__(self) -> str:
        return repr(self.policy)

    def __call__(self, site: Site) -> Any:
        action = self.policy(site)
        if site.op == "linear":
            self.kept.append(isinstance(action, Save))
        return action

    def _interest(self) -> Interest:
        return interest_of(self.policy)

    def _parts(self) -> tuple[Policy, ...]:
        return (self.policy,)


def products_that_torchtitan_keeps(make: Callable[[], Case], source: dict[str, Any]) -> list[bool]:
    """Of all matrix products of a forward pass: which are kept."""
    kept = []
    create = torch.utils.checkpoint.create_selective_checkpoint_contexts

    def noting(policy: Callable[..., CheckpointPolicy]) -> Any:
        def noted(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            decision = policy(ctx, op, *args, **kwargs)
            if op is torch.ops.aten.mm.default and not ctx.is_recompute:
                kept.append(decision is CheckpointPolicy.MUST_SAVE)
            return decision

        return create(noted)

    case = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts", noting)
        torchtitan_does(case.modules[0], source)
        case.fn(*case.args)
    return kept


def products_that_we_keep(make: Callable[[], Case], source: dict[str, Any]) -> list[bool]:
    case = make()
    noted = Noted(recipe.load(source).policy_for(case.modules[0]))
    reactivate.apply(case.modules[0], noted)
    case.fn(*case.args).sum().backward()
    return noted.kept


OP = {"mode": "selective", "selective_ac_option": "op"}
FORCED = "per_op_sac_force_recompute_mm_shapes_by_fqns"
WIDE = functools.partial(torchtitan_llama, HEADS)  # whose query, key, value and output weights have one shape


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (torchtitan_llama, None),
        (torchtitan_llama, []),
        (torchtitan_llama, ["attention.wk"]),
        (torchtitan_llama, ["feed_forward.w1"]),
        (torchtitan_llama, ["w2", "wo"]),
        (torchtitan_llama, ["layers.1.attention.wq"]),
        (WIDE, ["attention.wk"]),
        (torchtune_llama, ["k_proj"]),
        (torchtune_llama, None),
        (plain, None),
        (plain, []),
        (plain, ["moe.router.gate", "mix"]),
    ],
)
def test_op_keeps_the_products_that_torchtitan_keeps(make: Callable[[], Case], names: list[str] | None) -> None:
    source = OP if names is None else OP | {FORCED: names}
    theirs = products_that_torchtitan_keeps(make, source)
    ours = products_that_we_keep(make, source)
    assert ours == theirs
    assert any(ours) and not all(ours) and len(ours) >= 4 * LAYERS


def test_op_and_its_forced_products_are_bitwise_the_plain_model() -> None:
    check(torchtitan_llama, OP | {FORCED: ["attention.wk", "feed_forward.w1"]}, ALL)


def test_op_keeps_of_attention_with_dropout_what_torchtitan_keeps() -> None:
    """Many ops do it on a CPU, of which torchtitan keeps at most the products. We hold the state of the generator as well."""
    model = functools.partial(
        llama2,
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        embed_dim=WIDTH,
        max_seq_len=8 * LENGTH,
        attn_dropout=DROPOUT,
    )

    def kept_bytes(apply: Callable[[nn.Module], Any]) -> int:
        made = model().train()
        apply(made)
        text = torch.randint(0, VOCABULARY, (BATCH, 8 * LENGTH))
        made(text).sum().backward()
        return allocated_by(lambda: made(text)).left_bytes

    plain, theirs = kept_bytes(lambda made: None), kept_bytes(lambda made: torchtitan_does(made, OP))
    assert kept_bytes(lambda made: recipe.apply(made, OP)) < 1.05 * theirs < plain / 2


def test_the_router_is_recomputed_unless_told_otherwise() -> None:
    given, left_out, empty = (
        products_that_we_keep(plain, OP | names) for names in ({FORCED: ["moe.router.gate"]}, {}, {FORCED: []})
    )
    assert given == left_out != empty


def test_the_present_name_of_the_field_says_op_itself() -> None:
    old = recipe.load(OP | {FORCED: ["moe.router.gate"]})
    new = recipe.load({"mode": "selective", "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]})
    model = Plain()
    assert new.policy_for(model) == old.policy_for(model)


def test_torchtunes_op_is_torchtitans() -> None:
    """Its documentation has it, its code does not."""
    source = {"ac_mode": "selective", "ac_option": "op"}
    with pytest.raises(ValueError, match="op"):
        torchtune_does(model_of(torchtune_llama), source)
    check(torchtune_llama, source, ALL)
    model = model_of(torchtune_llama)
    assert recipe.load(source).policy_for(model) == recipe.load(OP).policy_for(model)


def test_a_product_with_bias_is_kept_and_not_counted() -> None:
    def make() -> Case:
        return Case(Plain(bias=True), (torch.randn(BATCH, LENGTH, WIDTH),))

    # mix with bias; gate by the default; up and down are counted.
    assert sorted(products_that_we_keep(make, OP)) == sorted([True, True, False, False] * LAYERS)
    names = [name for name, kept in zip(["mix", "up", "gate", "down"], products_that_we_keep(make, OP)) if kept]
    assert names == ["mix", "up"]
    check(make, OP, ALL)


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


# -- refusals ---------------------------------------------------------------------------------------------------------

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
