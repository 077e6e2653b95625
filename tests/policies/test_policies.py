"""The language of policies: what they select, and how they compose (Rule 17)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_bitwise
from policy_cases import LINEAR, Block, Model, Sites, saved_in
from several import each
from torch import Tensor, nn

import reactivate
from reactivate import Recompute, Save, Site, policies
from reactivate._modules.blocks import blocks_of
from reactivate._passes.observing import observed_by
from reactivate.errors import UsageError
from reactivate.policies import canonical
from reactivate.policies._select import matches
from reactivate.storage import Host


class Other(nn.Module):
    """A layer of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Numbered(nn.Module):
    """Stages under numbered names, each with numbered layers, as RegNets have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Other(), nn.Linear(4, 2)
        for name in ("s1", "s2", "s3"):
            stage = self.add_stage(name)
            stage.b1, stage.b2 = Block(), Block()

    def add_stage(self, name: str) -> Any:
        self.add_module(name, Stage())
        return getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.s3(self.s2(self.s1(self.stem(x)))))


class Stage(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def at(path: str = "", **options: Any) -> Site:
    return Site(path, **options)


# -- selectors --------------------------------------------------------------------------------------------------------


@each(
    ("pattern", "path", "is_matched"),
    [
        ("layers.0", "layers.0", True),
        ("layers.*", "layers.12", True),
        ("layers.*", "decoder.layers.1", True),
        ("layers.*", "layers.0.mlp", False),
        ("*.mlp", "layers.0.mlp", True),
        ("*.mlp", "mlp", False),
        ("mlp", "layers.0.mlp", True),
        ("mlp", "layers.0.bigmlp", False),
        ("**.mlp", "mlp", True),
        ("encoder.**.mlp", "model.encoder.layers.3.mlp", True),
        ("encoder.**.mlp", "decoder.layers.3.mlp", False),
        ("q_?roj", "layers.0.q_proj", True),
        ("a.b", "axb", False),
        ("w+", "w+", True),
        ("w+", "ww", False),
    ],
)
def test_patterns_match_the_end_of_a_path(pattern: str, path: str, is_matched: bool) -> None:
    assert matches(pattern, path) is is_matched


@pytest.mark.parametrize("selector", ["layers.*", Block, lambda site: isinstance(site.module, Block)])
def test_modules_are_selected_by_path_class_or_predicate(selector: Any) -> None:
    handle = reactivate.apply(Model(), policies.recompute_modules(selector))
    assert handle.regions == ("layers.0", "layers.1", "layers.2", "layers.3")


@pytest.mark.parametrize("selector", ["*.up", lambda site: site.path.endswith("up")])
def test_saved_modules_are_those_inside_of_regions(selector: Any) -> None:
    model = Model(2)
    assert saved_in(model, policies.first_match(policies.save_modules(selector), policies.full())) == [
        ["layers.0.up (Linear)"],
        ["layers.1.up (Linear)"],
    ]


def test_a_saved_class_of_modules_outside_of_regions_is_plain() -> None:
    model = Model(2)
    handle = reactivate.apply(model, policies.first_match(policies.save_modules(nn.Linear), policies.full()))
    assert handle.saved == ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


def test_within_limits_ops_to_modules() -> None:
    within = policies.save_ops("linear", "tanh", within=("*.up", "layers.1"))
    assert saved_in(Model(2), policies.first_match(within, policies.full())) == [["linear"], ["linear", "tanh"]]


@each(
    ("function", "name"),
    [
        (torch.matmul, "matmul"),
        (Tensor.matmul, "matmul"),
        (Tensor.__matmul__, "matmul"),
        (torch.ops.aten.matmul, "matmul"),
        (torch.ops.aten.mm.default, "mm"),
        (F.linear, "linear"),
        (F.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (torch.linalg.norm, "linalg.norm"),
        (Tensor.relu_, "relu_"),
        (F.relu, "relu"),
        (torch.conv2d, "conv2d"),
        (F.conv2d, "conv2d"),
    ],
)
def test_an_op_has_one_name(function: Any, name: str) -> None:
    assert canonical.name_of(function) == name
    canonical.check(name, "a test")


@each("call", [lambda x, w: x @ w, torch.matmul, Tensor.matmul, lambda x, w: torch.ops.aten.matmul(x, w)])
def test_an_op_is_saved_however_it_is_called(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    sites = Sites()
    x, w = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    fn = reactivate.checkpoint(lambda x, w: call(x, w).exp().sin(), policy=policies.save_ops("matmul"))
    with observed_by(sites):
        found = torch.autograd.grad(fn(x, w).sum(), [x, w])
    assert sites.labels == [["matmul"]]
    for one, other in zip(found, torch.autograd.grad(call(x, w).exp().sin().sum(), [x, w])):
        assert_bitwise(one, other, "gradient")


class Routed(nn.Module):
    """Attention, and a choice of rows."""

    def __init__(self, attends: str) -> None:
        super().__init__()
        self.attends, self.attention = attends, nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        if self.attends == "module":
            h = self.attention(h, h, h, need_weights=True)[0]
        elif self.attends == "op":
            h = F.scaled_dot_product_attention(h, h, h)
        else:
            h = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(h[None], h[None], h[None])[0][0]
        best, indices = h.tanh().topk(2, -1)
        return (best.exp() * h.cos().gather(-1, indices)).tanh()


@each("attends", ["module", "op", "kernel"])
@each("kinds", [("attention",), ("routing",), ("attention", "routing")], ids="+".join)
def test_calls_of_a_kind_are_saved_by_whatever_op(kinds: tuple[str, ...], attends: str) -> None:
    policy = policies.save(*kinds)
    assert repr(policy) == f"save({', '.join(map(repr, kinds))})"
    sites = Sites()
    found = []
    for wrap in (lambda fn: fn, lambda fn: reactivate.checkpoint(fn, policy=policy)):
        torch.manual_seed(0)
        module, x = Routed(attends), torch.randn(2, 3, 4, requires_grad=True)
        with observed_by(sites):
            wrap(module)(x).sum().backward()
        found.append([x.grad, *(item.grad for item in module.parameters() if item.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert_bitwise(one, other, "gradient")
    assert [len(labels) for labels in sites.labels] == [len(kinds)]


def test_collectives_are_a_kind() -> None:
    """Compute in several processes: `test_distributed`."""
    ops = policies.save("collectives").ops  # type: ignore[attr-defined]
    assert "_c10d_functional.all_to_all_single" in ops and "_c10d_functional.reduce_scatter_tensor" in ops
    with pytest.raises(UsageError, match=r"'attention', 'routing', 'collectives'; 'attn' is none"):
        policies.save("attn")
    with pytest.raises(UsageError, match=r"\['attention'\] is none"):
        policies.save(["attention"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="none is given"):
        policies.save()


def test_full_but_for_some_results() -> None:
    saving = policies.full(save=["linear", "attention"])
    assert saving == policies.first_match(policies.save_ops("linear"), policies.save("attention"), policies.full())
    assert policies.full(save=[]) == policies.full()
    assert policies.full(save=[F.linear, torch.autograd.Function]) == policies.first_match(
        policies.save_ops("linear", torch.autograd.Function), policies.full()
    )
    for wrong in ("linear", 3):
        with pytest.raises(UsageError, match=r"full\(save=\.\.\.\) takes a list"):
            policies.full(save=wrong)  # type: ignore[arg-type]


@each(
    ("op", "message"),
    [
        (3, "takes names of ops, functions of torch and Function classes, and kinds of calls ('attention', 'rou"),
        ("linaer", "knows no op 'linaer'. Did you mean 'linear'"),
        ("atention", "knows no op 'atention'. Did you mean 'attention'?"),
        ("sdpa", "Did you mean 'scaled_dot_product_attention'? 'attention' saves attention by whatever op."),
        ("relu_", "cannot save 'relu_'"),
        (nn.Linear, "takes ops; got the class Linear."),
    ],
)
def test_a_wrong_op_of_full_is_refused_with_what_was_called(op: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^full\(save=\.\.\.\) .*{re.escape(message)}"):
        policies.full(save=[op])


@pytest.mark.parametrize(
    "policy", [policies.recompute_every(100), policies.first_match(LINEAR, policies.recompute_every(5))]
)
def test_more_than_the_blocks_there_are_is_refused(policy: Any) -> None:
    with pytest.raises(UsageError, match=r"recompute_every\(\d+\).* the 4 blocks .*layers\.0.*takes 1 to 4"):
        reactivate.apply(Model(4), policy)
    assert reactivate.apply(Model(4), policies.recompute_every(4)).regions == ("layers.0",)


@pytest.mark.parametrize("make", [Numbered, lambda: Model(1), lambda: nn.Sequential(Block(), Other(), Block())])
def test_every_block_is_recomputed_bitwise(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert saved_in(model, policies.full()) == [[]] * len(blocks_of(model))


@pytest.mark.parametrize(("name", "first", "count"), [("regnety_002", "s1", 4), ("efficientnet_b0", "blocks.0.0", 16)])
def test_the_blocks_of_models_of_timm(name: str, first: str, count: int) -> None:
    model = pytest.importorskip("timm").create_model(name)
    found = list(blocks_of(model))
    assert (found[0], len(found)) == (first, count)
    assert reactivate.verify(model, torch.randn(2, 3, 64, 64), policy=policies.full())


# -- blocks -----------------------------------------------------------------------------------------------------------


def mixture() -> nn.Module:
    layer = nn.ModuleDict({"experts": nn.ModuleList(Block() for _ in range(3)), "gate": nn.Linear(4, 3)})
    return nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))


@each(
    ("make", "expected"),
    [
        (Model, ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (lambda: nn.ModuleDict({"first": Block(), "second": Block()}), ["first", "second"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []),
        (lambda: nn.Sequential(Block(), nn.Sequential(nn.ReLU())), ["0"]),
        (lambda: nn.ModuleDict({"encoder": Model(2), "decoder": Model(2)}), ["encoder", "decoder"]),
        (lambda: nn.Transformer(4, 1, 2, 2, 4), [f"{part}coder.layers.{i}" for part in ("en", "de") for i in (0, 1)]),
        (lambda: nn.Sequential(*[Block()] * 3), ["0"]),
        (lambda: nn.Sequential(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU())), []),
        (lambda: nn.Sequential(Block(), Other(), Block(), Block()), ["0", "1", "2", "3"]),
        (lambda: nn.ModuleList([Other(), Block(), Block(), Other()]), ["0", "1", "2", "3"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.LayerNorm(4), Other()), ["1", "2", "4"]),
        (lambda: nn.Sequential(Block(), Model(2), Block()), ["0", "1.layers.0", "1.layers.1", "2"]),
        (lambda: Model(1), ["layers.0"]),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 1), ["layers.0"]),
        (lambda: nn.ModuleList([Block(), Other()]), ["0", "1"]),
        (lambda: nn.Sequential(nn.Sequential(Other()), nn.Sequential(Block(), Block())), ["0.0", "1.0", "1.1"]),
        (lambda: nn.Sequential(nn.Sequential(Block()), nn.Linear(4, 4)), ["0.0"]),
        (Numbered, ["s1", "s2", "s3"]),
        (lambda: nn.Linear(4, 4), []),
    ],
)
def test_blocks_are_the_outermost_repeated_layers(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert list(blocks_of(make())) == expected


@each(
    ("policy", "expected"),
    [
        (policies.full(), [0, 1, 2, 3]),
        (policies.recompute_every(1), [0, 1, 2, 3]),
        (policies.recompute_every(2), [0, 2]),
        (policies.recompute_every(3, offset=1), [1]),
        (policies.recompute_every(4, 3), [3]),
        (policies.exclude(policies.full(), policies.recompute_modules("layers.2")), [0, 1, 3]),
        (policies.first_match(policies.recompute_modules("layers.1"), policies.recompute_every(2)), [0, 1, 2]),
        (policies.union(policies.recompute_every(2), policies.recompute_modules("layers.3")), [0, 2, 3]),
        (policies.none(), []),
        (lambda site: Recompute() if site.block == site.blocks - 1 else None, [3]),
    ],
)
def test_which_blocks_are_regions(policy: Any, expected: list[int]) -> None:
    assert reactivate.apply(Model(), policy).regions == tuple(f"layers.{index}" for index in expected)


# -- composition ------------------------------------------------------------------------------------------------------


def test_first_match_takes_the_first_answer() -> None:
    site, host = at(op="linear", function=F.linear), Host()
    policy = policies.first_match(policies.save_ops("relu"), policies.save_ops("linear", storage=host), LINEAR)
    assert policy(site) == Save(host)
    assert policy(at(op="exp", function=torch.exp)) is None


def test_either_prefers_to_save() -> None:
    module = nn.Linear(1, 1)
    policy = policies.union(policies.recompute_modules(nn.Linear), policies.save_modules(nn.Linear))
    assert policy(at("x", module=module)) == Save()


def test_except_leaves_out_what_an_exception_names() -> None:
    policy = policies.exclude(policies.save_ops("linear", "tanh"), policies.save_ops("linear", within="*.up"))
    assert saved_in(Model(1 + 1), policies.first_match(policy, policies.full())) == [["tanh", "linear"]] * 2


@each(("n", "offset", "expected"), [(1, 0, 4), (2, 0, 2), (2, 1, 2), (3, 0, 2), (3, 2, 1), (4, 3, 1)])
def test_every_nth_counts_in_each_call_of_a_region(n: int, offset: int, expected: int) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            x = F.linear(x, weight).sin()
        return x

    weight, x, sites = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True), Sites()
    region = reactivate.checkpoint(fn, policy=policies.every_nth(n, LINEAR, offset))
    with observed_by(sites):
        for _ in range(3):
            found = torch.autograd.grad(region(x).sum(), [x, weight])
    assert [len(labels) for labels in sites.labels] == [expected] * 3
    for one, other in zip(found, torch.autograd.grad(fn(x).sum(), [x, weight])):
        assert_bitwise(one, other, "gradient")


def test_every_nth_counts_what_its_policy_saves_and_nothing_else() -> None:
    policy = policies.first_match(policies.every_nth(2, policies.save_ops("linear"), 1), policies.full())
    assert saved_in(Model(2), policy) == [["linear"]] * 2
    both = policies.first_match(policies.every_nth(2, policies.save_ops("linear", "tanh")), policies.full())
    assert saved_in(Model(2), both) == [["linear", "linear"]] * 2


def test_every_nth_of_modules() -> None:
    policy = policies.first_match(policies.every_nth(2, policies.save_modules(nn.Linear), 1), policies.full())
    assert saved_in(Model(2), policy) == [["layers.0.down (Linear)"], ["layers.1.down (Linear)"]]


def test_names_select_marked_calls_of_functions_and_modules() -> None:
    project = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        return reactivate.site(project, name="project")(reactivate.site(torch.exp, name="grow")(x)).sin()

    x, sites = torch.randn(2, 4, requires_grad=True), Sites()
    leaves = [x, *project.parameters()]
    for names, expected in [(("grow",), ["site 'grow'"]), (("project", "grow"), ["site 'grow'", "site 'project'"])]:
        with observed_by(sites):
            found = torch.autograd.grad(reactivate.checkpoint(fn, policy=policies.save_names(*names))(x).sum(), leaves)
        assert sites.labels.pop() == expected
        for one, other in zip(found, torch.autograd.grad(fn(x).sum(), leaves)):
            assert_bitwise(one, other, "gradient")


def test_a_users_own_policy_sees_where_it_is_asked() -> None:
    seen: list[tuple[str, str | None, int]] = []

    def policy(site: Site) -> Save | Recompute | None:
        if site.block is not None:
            return Recompute()
        if site.op == "linear":
            seen.append((site.path, site.op, site.index))
            return Save()
        return None

    assert saved_in(Model(2), policy) == [["linear"] * 2] * 2
    assert seen == [
        (f"layers.{i}.{name}", "linear", index) for i in (0, 1) for index, name in enumerate(("up", "down"))
    ]


def test_policies_are_values() -> None:
    one = policies.first_match(policies.save_ops("linear", within="*.up"), policies.recompute_every(2))
    other = policies.first_match(policies.save_ops("linear", within="*.up"), policies.recompute_every(2))
    assert one == other and hash(one) == hash(other)
    assert repr(one) == "first_match(save_ops('linear', within=('*.up',)), recompute_every(2))"
