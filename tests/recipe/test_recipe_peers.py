"""Recipes of torchtune and torchtitan: the layers and the matrix products that they choose, bit for bit as without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from memory import allocated_by
from oracle import Case
from recipe_cases import (
    ALL,
    BATCH,
    DROPOUT,
    FORCED,
    HEADS,
    LAYERS,
    LENGTH,
    OP,
    TORCHTITAN,
    TORCHTUNE,
    VOCABULARY,
    WIDTH,
    Plain,
    check,
    model_of,
    plain,
    torchtitan_does,
    torchtitan_llama,
    torchtune_does,
    torchtune_llama,
    wrapped_in,
)
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torchtitan.distributed import activation_checkpoint as torchtitan_checkpoint
from torchtune.models.llama2 import llama2
from torchtune.training import activations

import reactivate
from reactivate._types import Policy, Save, Site
from reactivate.integrations import recipe
from reactivate.policies._base import Interest, ReadyMade, interest_of

# -- the peers' own choice --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both peers count layers in the process, so that a second model gets other layers; here each is the first."""
    monkeypatch.setattr(activations.checkpoint_wrapper, "_count", 0, raising=False)
    monkeypatch.setattr(torchtitan_checkpoint, "_layer_sac_count", 0)
    yield
    torch._C._dynamo.eval_frame._set_lru_cache(True)  # torchtitan switches it off


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
