"""Units and their candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from plan_models import GPT, Block, UNet
from several import each
from torch import nn

import reactivate
from reactivate._modules.blocks import blocks_of
from reactivate._types import Recompute, Save, Site
from reactivate.planner.candidates import FULL, KEEP, Assignment, Candidate, list_candidates
from reactivate.planner.table import CallSummary, CandidateTable, TraceSummary, plan_rounds
from reactivate.planner.units import find_units

OPS = frozenset({"linear", "scaled_dot_product_attention", "add", "layer_norm"})


def names(module: nn.Module, ops: frozenset[str] = OPS) -> dict[str, Candidate]:
    return {item.name: item for item in list_candidates(module, ops)}


def test_units_are_the_blocks() -> None:
    model = GPT(layers=3)
    assert list(find_units(model)) == ["blocks.0", "blocks.1", "blocks.2"] == list(blocks_of(model))


def test_units_are_what_is_made_of_modules_where_nothing_repeats() -> None:
    assert list(find_units(UNet())) == ["down1", "down2", "middle", "up2", "up1"]


class Cubic(nn.Module):
    """A layer of the user's, with parameters and ops of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight) ** 3 + x


def in_attributes(make: Callable[[], nn.Module]) -> nn.Module:
    model = nn.Module()
    for number in range(1, 4):
        model.add_module(f"layer{number}", make())
    return model


PLACES: dict[str, tuple[Callable[[Callable[[], nn.Module]], nn.Module], list[str]]] = {
    "list": (lambda make: nn.ModuleList(make() for _ in range(3)), ["0", "1", "2"]),
    "nested lists": (lambda make: nn.ModuleList(nn.ModuleList([make()]) for _ in range(2)), ["0.0", "1.0"]),
    "dict": (lambda make: nn.ModuleDict({"down": make(), "up": make()}), ["down", "up"]),
    "sequential": (lambda make: nn.Sequential(make(), make()), ["0", "1"]),
    "attributes": (in_attributes, ["layer1", "layer2", "layer3"]),
    "beside an embedding": (
        lambda make: nn.ModuleDict({"e": nn.Embedding(4, 8), "a": make(), "b": make()}),
        ["a", "b"],
    ),
}


@each("place", PLACES)
@each(
    "make",
    [lambda: nn.LSTM(8, 8), lambda: nn.GRU(8, 8), lambda: nn.RNN(8, 8), lambda: nn.LSTMCell(8, 8), Cubic],
    ids=["LSTM", "GRU", "RNN", "LSTMCell", "a class of the user's"],
)
def test_layers_without_modules_inside_are_units(place: str, make: Callable[[], nn.Module]) -> None:
    build, expected = PLACES[place]
    assert list(find_units(build(make))) == expected


@each("place", PLACES)
def test_siblings_that_are_made_of_modules_are_units(place: str) -> None:
    build, expected = PLACES[place]
    assert list(find_units(build(lambda: Block(8)))) == expected


def test_recurrent_layers_are_units_beside_others() -> None:
    convolutions = nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU())
    model = nn.ModuleDict({"front": convolutions, "lstm": nn.LSTM(8, 8), "gru": nn.GRU(8, 8), "head": nn.Linear(8, 8)})
    assert list(find_units(model)) == ["front", "lstm", "gru"]
    assert "recompute 1" in names(nn.Sequential(Block(8), nn.LSTM(8, 8)))


def test_layers_that_are_one_op_are_no_units() -> None:
    """A region around one of them would keep its input and drop nothing."""
    for model in (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))):
        assert find_units(model) == {"": model}


def test_a_wrapper_is_looked_into() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = UNet()

    assert list(find_units(Wrapper())) == [f"inner.{path}" for path in find_units(UNet())]


def test_units_beside_blocks() -> None:
    model = nn.ModuleDict({"stem": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "body": GPT(layers=2)})
    assert list(find_units(model)) == ["stem", "body.blocks.0", "body.blocks.1"]


def test_a_model_of_single_layers_is_one_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert find_units(model) == {"": model}


def test_units_lie_beside_one_another() -> None:
    for model in (GPT(layers=2), UNet(), nn.Sequential(Block(8), nn.Sequential(Block(8), Block(8)))):
        units = find_units(model)
        for path in units:
            assert not [other for other in units if other != path and other.startswith(f"{path}.")]


def test_plain_sequentials_repeat_only_if_they_are_alike() -> None:
    stem = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    body = nn.Sequential(Block(8), Block(8))
    assert list(blocks_of(nn.Sequential(stem, body))) == ["0", "1.0", "1.1"]
    assert list(blocks_of(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))))) == ["0", "1"]


def test_candidates_of_a_block() -> None:
    found = names(Block(8))
    assert found["keep"] == KEEP and found["recompute"] == FULL
    assert found["nested recompute"].recompute == ("", "attn", "mlp")
    assert found["recompute mlp"].recompute == ("mlp",)
    assert found["recompute but attention"].save_ops == ("scaled_dot_product_attention",)
    assert found["recompute but long products"].save_modules == ("mlp.3",)  # from four times the width to the width
    assert set(found["recompute but products"].save_modules) == {"attn.qkv", "attn.out", "mlp.1", "mlp.3"}
    assert found["recompute but products"].save_ops == ()


def test_there_is_nothing_to_save_where_nothing_is_computed() -> None:
    assert list(names(nn.Sequential(nn.LayerNorm(8), nn.ReLU()), frozenset({"layer_norm"}))) == ["keep", "recompute"]


def test_an_assignment_is_a_policy() -> None:
    policy = Assignment({"a": Candidate("x", ("", "mlp"), ("mlp.1",), ("softmax",)), "b": KEEP})
    module = nn.Linear(1, 1)
    assert policy(Site("a", module=module)) == policy(Site("a.mlp", module=module)) == Recompute()
    assert policy(Site("a.mlp.1", module=module)) == Save() == policy(Site("a.mlp", op="softmax"))
    assert (
        policy(Site("b", module=module)) is policy(Site("b", op="softmax")) is policy(Site("ab", op="softmax")) is None
    )
    assert policy._inside("a")._interest().ops == {"softmax"}
    assert policy == Assignment(dict(policy.candidates)) and hash(policy) == hash(Assignment(dict(policy.candidates)))


def test_regions_without_anything_to_save_look_at_nothing() -> None:
    model = GPT(layers=2)
    policy = Assignment({"blocks.0": FULL, "blocks.1": Candidate("x", ("",), (), ("scaled_dot_product_attention",))})
    reactivate.apply(model, policy)
    first, second = (block.forward.__self__.options.choice for block in model.blocks)
    assert first is None and second is not None and second.sees_functions
    tokens = torch.randint(64, (2, 8))
    model(tokens).sum().backward()


def table_of(
    units: Mapping[str, nn.Module], plain_bytes: Sequence[int], least_seconds: Sequence[float]
) -> CandidateTable:
    """The figures of units that hold so much, and take so long where everything is recomputed."""

    def reading(calls: Sequence[CallSummary]) -> TraceSummary:
        return TraceSummary(tuple(units), tuple(calls), (0,) * (len(calls) + 1), tuple(units))

    table = CandidateTable(reading([CallSummary(size, 9, 1.0) for size in plain_bytes]), units)
    table.enter(reading([CallSummary(1, 9, seconds) for seconds in least_seconds]), dict.fromkeys(units, FULL))
    return table


def test_a_unit_that_is_called_twice_shares_no_figures_with_one_that_is_called_once() -> None:
    units, paths = {"one": Block(8), "two": Block(8)}, ("one", "two", "two")

    def reading(size: int) -> TraceSummary:
        return TraceSummary(paths, (CallSummary(size, 9, 1.0),) * 3, (0,) * 4, paths)

    table = CandidateTable(reading(5), units)
    table.enter(reading(1), {"two": FULL})
    change = table.change("two", FULL)
    assert change is not None and change.held_bytes == 2 * (1 - 5)
    assert table.change("one", FULL) is None


@each(("last_bytes", "last_seconds"), [(5, 2.0), (6, 2.0), (5, 3.0)])
@each("count", [1, 3, 4, 9, 20])
def test_every_candidate_is_tried_on_every_unit_or_on_an_equal_one(
    count: int, last_bytes: int, last_seconds: float
) -> None:
    units = {f"blocks.{number}": Block(8) for number in range(count)}
    menus = {path: list_candidates(unit, OPS) for path, unit in units.items()}
    table = table_of(units, [5] * (count - 1) + [last_bytes], [2.0] * (count - 1) + [last_seconds])
    rounds = plan_rounds(menus, table)
    tried = {(path, item.name) for candidates in rounds for path, item in candidates.items()}
    if count < 4 and (last_bytes, last_seconds) != (5, 2.0):
        assert tried == {(path, item.name) for path, menu in menus.items() for item in menu if item not in (KEEP, FULL)}
    else:
        assert {name for _, name in tried} == {item.name for item in menus["blocks.0"] if item not in (KEEP, FULL)}
        assert len(rounds) == -(-(len(menus["blocks.0"]) - 2) // count)
