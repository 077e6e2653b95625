"""The benchmark of plans beside the exact optimum: the optimum is one, and no plan beats it."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest
import torch
from several import each
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import optimum
from _optimum_graph import Choice, Graph, Node, OpNode, frontier, graph_of, together, undominated
from _presentation import read

from reactivate.planner.trace.records import Cost


def node(number: int) -> Node:
    return number, 0


def some_graph(seed: int) -> Graph:
    """Up to eight ops, each of which reads some of those before it and makes one or two nodes."""
    drawn = random.Random(seed)
    made: list[Node] = []
    graph = Graph()
    for number in range(drawn.randint(2, 8)):
        inputs = frozenset(drawn.sample(made, min(len(made), drawn.randint(0, 2))))
        outputs = frozenset(node(2 * number + half) for half in range(drawn.randint(1, 2)))
        graph.ops.append(OpNode(float(drawn.randint(1, 9)), inputs, outputs))
        graph.sizes |= {item: drawn.randint(1, 9) for item in outputs}
        made += outputs
    graph.needed = frozenset(drawn.sample(made, drawn.randint(1, len(made))))
    return graph


def by_brute_force(graph: Graph) -> list[Choice]:
    """Try every set of nodes that is kept: what else is needed is recomputed, with what that needs."""
    found = []
    for size in range(len(graph.sizes) + 1):
        for kept in itertools.combinations(graph.sizes, size):
            needed, seconds = set(graph.needed), 0.0
            for op in reversed(graph.ops):
                if needed & op.outputs - set(kept):
                    seconds += op.seconds
                    needed |= op.inputs
            found.append(Choice(sum(graph.sizes[item] for item in kept), seconds))
    return undominated(found)


@each("seed", range(20))
def test_the_optimum_is_that_of_all_choices(seed: int) -> None:
    graph = some_graph(seed)
    assert frontier(graph) == by_brute_force(graph)


class _Ones:
    rounding = 1
    has_streams = False

    def of(self, *call: object) -> Cost:
        return Cost(1.0)


def test_a_graph_has_views_writes_and_masks_as_they_are() -> None:
    linear = nn.Linear(64, 64)

    def forward(x: Tensor) -> Tensor:
        made = linear(x)
        written = made.mul(2.0).add_(1.0)  # two nodes of one memory
        mask = torch.ones_like(made).bernoulli_(0.5)
        return (written.view(-1).view(64, 64).exp() * mask).sum(0)

    x = torch.randn(64, 64, requires_grad=True)
    graph = graph_of(forward, x, linear.parameters(), _Ones())
    assert len(graph.ops) == 8  # no view is one
    assert sorted(graph.sizes[item] for item in graph.needed) == [512, 16384]  # exp's result, and the mask as bits
    assert frontier(graph)[-1] == Choice(512 + 16384, 0.0) and frontier(graph)[0].held_bytes == 0


def test_choices_of_blocks_are_added_up() -> None:
    menu = [Choice(0, 2.0), Choice(4, 0.0)]
    assert together([menu, menu]) == [(0, 4.0), (4, 2.0), (8, 0.0)]


@pytest.mark.parametrize("name", optimum.MODELS)
def test_no_plan_beats_the_optimum(name: str, tmp_path: Path) -> None:
    found = optimum.compare(name, small=True)
    for row in found.rows:
        assert -1e-9 <= row.optimum <= row.planned + 1e-9 and row.planned <= row.fixed + 0.05
    assert sum(row.planned for row in found.rows) < sum(row.fixed for row in found.rows)
    optimum.main([name, "--small", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    assert read(optimum.Results, path).models[0].model == optimum.MODELS[name][0]
    assert "distance, points" in path.with_suffix(".md").read_text(encoding="utf-8")
