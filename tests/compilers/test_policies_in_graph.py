"""Policies under torch.compile: the region is in the graph, and its backward recomputes what the policy says."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import reactivate
from reactivate import policies
from reactivate._torch.dynamo import names_reach_graphs
from reactivate.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH = 16


class Block(nn.Module):
    """Five linear layers, one of them in an inner module, one in a named call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.attn(self.norm(x)))
        hidden = reactivate.site(self.up, name="up")(x)
        return x + torch.tanh(self.down(torch.tanh(hidden)))


def model() -> nn.Module:
    return nn.Sequential(Block(), Block())


def graphs_of(fn: Callable[..., Any]) -> tuple[Counter[str], Counter[str]]:
    """The ops of the forward and of the backward graph."""
    found: list[Counter[str]] = []

    def note(graph: Any, _: Any) -> Any:
        found.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return graph

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    torch.compile(fn, backend=backend, fullgraph=True)(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    assert len(found) == 2, "one graph each"
    return found[0], found[1]


def recomputed(policy: Any, op: str = "aten.addmm.default") -> int:
    """Count how often the backward of a model with the policy runs the forward's op."""
    made = model()
    if policy is not None:
        reactivate.apply(made, policy)
    return graphs_of(made)[1][op]


def regions_in(fn: Callable[..., Any]) -> int:
    """Count the checkpoint operators in dynamo's graph."""
    found: list[str] = []

    def note(graph: Any, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(fn, backend=note, fullgraph=True)(torch.randn(4, WIDTH, requires_grad=True))
    return sum("checkpoint" in name for name in found)


def test_regions_of_an_applied_model_are_in_the_graph() -> None:
    plain, ours = model(), model()
    reactivate.apply(ours, policies.full())
    assert regions_in(plain) == 0
    torch._dynamo.reset()
    assert regions_in(ours) == 2
    torch._dynamo.reset()
    assert regions_in(lambda x: ours(x) * 2) == 2


# Two blocks of four linear layers. What the last one computes is needed by the tanh after it.
@pytest.mark.parametrize(
    ("policy", "linears"),
    [
        (None, 0),
        (policies.full(), 8),
        (policies.recompute_every(2), 4),
        (policies.first_match(policies.save_ops("linear"), policies.full()), 0),
        (policies.first_match(policies.save_ops("linear", within="*.attn.*"), policies.full()), 4),
        (policies.first_match(policies.save_modules("*.down", "*.attn"), policies.full()), 2),
        (policies.first_match(policies.save_modules(nn.Sequential), policies.full()), 4),
        (policies.first_match(policies.every_nth(2, policies.save_ops("linear")), policies.full()), 4),
        (policies.first_match(policies.compute_intensive(), policies.full()), 0),
        (policies.exclude(policies.full(), policies.recompute_modules("0")), 4),
        (
            policies.first_match(
                lambda site: reactivate.Save() if site.op == "linear" and site.path.endswith("down") else None,
                policies.full(),
            ),
            6,
        ),
    ],
)
def test_the_backward_recomputes_what_the_policy_says(policy: Any, linears: int) -> None:
    assert recomputed(policy) == linears


def test_calls_with_a_name() -> None:
    policy = policies.first_match(policies.save_names("up"), policies.full())
    if names_reach_graphs:
        assert recomputed(policy) == 6
    else:
        with pytest.raises(Exception, match="torch 2.10"):
            recomputed(policy)


def test_named_functions_and_elementwise_ops() -> None:
    assert recomputed(policies.full(), "aten.tanh.default") == 8
    torch._dynamo.reset()
    kept = policies.first_match(policies.save_ops("tanh"), policies.full())
    assert recomputed(kept, "aten.tanh.default") == 0  # that of `nn.Tanh` as well
    torch._dynamo.reset()
    module = policies.first_match(policies.save_modules(nn.Tanh), policies.full())
    assert recomputed(module, "aten.tanh.default") == 6


@pytest.mark.parametrize("where", ["model", "block", "function"])
def test_bitwise(where: str) -> None:
    """One compiled code runs with and without the policy."""
    policy = policies.first_match(policies.save_ops("linear", within="*.down"), policies.full())

    def make(is_applied: bool) -> Callable[[], oracle.Case]:
        def case() -> oracle.Case:
            made = model()
            if is_applied:
                reactivate.apply(made, policy)
            fn: Any = made
            if where == "block":
                for block in made:
                    block.compile(backend="aot_eager", fullgraph=True)
            elif where == "model":
                fn = torch.compile(made, backend="aot_eager", fullgraph=True)
            else:
                fn = torch.compile(lambda x: made(x), backend="aot_eager", fullgraph=True)
            return oracle.Case(fn, (torch.randn(4, WIDTH, requires_grad=True),), modules=[made])

        return case

    oracle.assert_same(oracle.run(make(False)), oracle.run(make(True)))


BLOCKS = 10  # more than torch.compile makes graphs of one code


def kinds_of_blocks() -> list[type[Block]]:
    """Return classes of blocks that each have code of their own."""
    source = "def forward(self, x):\n    return Block.forward(self, x) * {}"
    made: list[dict[str, Any]] = [{"Block": Block} for _ in range(BLOCKS)]
    for number, names in enumerate(made):
        exec(source.format(number + 1), names)
    return [type(f"Block{number}", (Block,), {"forward": names["forward"]}) for number, names in enumerate(made)]


def linears_of_blocks(policy: Any, kinds: list[type[Block]], *, is_copied: bool = False) -> list[int]:
    """Count the linear layers in each graph of backwards, where each block is compiled on its own, and does what it did."""
    found: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        found.append(sum(str(node.target) == "aten.addmm.default" for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )

    def make(is_applied: bool) -> Callable[[], oracle.Case]:
        def case() -> oracle.Case:
            made = nn.Sequential(*(kind() for kind in kinds))
            if is_applied:
                reactivate.apply(made, policy)
            if is_copied:
                made = copy.deepcopy(made)
            for block in made:
                block.compile(backend=backend)
            return oracle.Case(made, (torch.randn(4, WIDTH, requires_grad=True),), modules=[made])

        return case

    plain = oracle.run(make(False))
    found.clear()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        oracle.assert_same(plain, oracle.run(make(True)))
    return sorted(found)


@pytest.mark.parametrize(
    ("policy", "linears"),
    [
        (policies.full(), [4]),
        (policies.first_match(policies.save_modules("*.attn"), policies.full()), [2]),
        (policies.recompute_modules("*.attn"), [1]),
        (policies.first_match(policies.save_modules("0.attn"), policies.full()), [2, 4]),
        (policies.first_match(policies.save_ops("linear", within="0.attn.*"), policies.full()), [2, 4]),
        (
            policies.first_match(policies.save_ops("linear", within=("0.attn.*", "*.attn.0")), policies.full()),
            [2, 3],
        ),
        (
            policies.first_match(
                *(policies.save_ops("linear", within=f"{i}.attn.*") for i in range(BLOCKS)), policies.full()
            ),
            [2],
        ),
        (
            policies.first_match(
                policies.exclude(policies.save_ops("linear"), policies.save_ops("linear", within="1.attn.*")),
                policies.full(),
            ),
            [0, 2],
        ),
    ],
)
def test_blocks_that_are_compiled_one_by_one_share_a_graph_if_the_same_is_saved(
    policy: Any, linears: list[int]
) -> None:
    assert linears_of_blocks(policy, [Block] * BLOCKS) == linears


def test_blocks_of_a_copy_that_are_compiled_one_by_one() -> None:
    policy = policies.first_match(policies.save_ops("linear", within="0.attn.*"), policies.full())
    assert linears_of_blocks(policy, [Block] * 3, is_copied=True) == [2, 4]


def test_blocks_of_many_kinds_that_are_compiled_one_by_one() -> None:
    assert linears_of_blocks(policies.full(), kinds_of_blocks()) == [4] * BLOCKS


def test_a_checkpointed_function_with_a_policy() -> None:
    block = Block()
    region = reactivate.checkpoint(block, policy=policies.save_ops("linear"))
    assert graphs_of(lambda x: region(x))[1]["aten.addmm.default"] == 0
    torch._dynamo.reset()
    assert graphs_of(lambda x: reactivate.checkpoint(block)(x))[1]["aten.addmm.default"] > 0


def test_a_copy_is_translated_too() -> None:
    made = model()
    reactivate.apply(made, policies.first_match(policies.save_modules("*.down"), policies.full()))
    assert graphs_of(copy.deepcopy(made))[1]["aten.addmm.default"] == 6


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (policies.save_ops(Double), "custom autograd functions \\(Double\\)"),
        (policies.save_ops("linear", storage=reactivate.storage.Host()), "stays on the device"),
    ],
)
def test_what_cannot_be_translated_is_refused_with_the_reason(policy: Any, says: str) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    region = reactivate.checkpoint(lambda x: Double.apply(linear(x)).exp(), policy=policy)
    with pytest.raises(Exception, match=says) as caught:
        torch.compile(region, backend="aot_eager", fullgraph=True)(torch.randn(4, WIDTH, requires_grad=True))
    chain: BaseException | None = caught.value
    kinds = []
    while chain is not None:
        kinds.append(type(chain))
        chain = chain.__cause__ or chain.__context__
    assert UnsupportedError in kinds or "UnsupportedError" in str(caught.value)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_storage_for_inputs_is_refused(backend: str, fullgraph: bool) -> None:
    """Also where dynamo may end its graph before the region: it would run in eager, and nobody would know."""
    block, host = Block(), reactivate.storage.Host()
    region = reactivate.checkpoint(block, inputs=host)
    says = (
        "UnsupportedError: A region has inputs=.*under torch.compile that stays on the device.*torch.compiler.disable"
    )
    for fn in (region, lambda x: reactivate.checkpoint(block, inputs=host)(x)):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=backend, fullgraph=fullgraph)
        with pytest.raises(RuntimeError, match=says):
            compiled(torch.randn(4, WIDTH, requires_grad=True))
    disabled = torch.compile(torch.compiler.disable(region), backend=backend)
    disabled(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()


def test_a_region_that_is_made_in_the_graph() -> None:
    """Bitwise against the same graph without a region, and with its policy. (That of torch 2.9 breaks there.)"""
    linear, kept = nn.Linear(WIDTH, WIDTH), []
    for policy in (None, policies.save_ops("linear"), policies.save_modules("0")):
        block, x = nn.Sequential(linear, nn.Tanh()), torch.ones(4, WIDTH, requires_grad=True)

        def fn(x: Tensor, policy: Any = policy, block: nn.Module = block) -> Tensor:
            out: Tensor = block(x) if policy is None else reactivate.checkpoint(block, policy=policy)(x)
            return out.sin()

        linear.zero_grad()
        torch.compile(fn, backend="aot_eager", fullgraph=names_reach_graphs)(x).sum().backward()
        kept.append([x.grad, linear.weight.grad, linear.bias.grad])
    for other in kept[1:]:
        for gradient, plain in zip(other, kept[0], strict=True):
            oracle.assert_bitwise(plain, gradient, "gradient")
