"""The benchmark of plans: peers do what they say, verdicts follow from times, and a run as short as can be has every row."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _frontier_measure as measuring
import _frontier_results as results
import _frontier_steps as steps
import _subjects as subjects
import _training as models
import frontier
from _presentation import read, show
from _timing import Estimate
from count_ops import CountOps
from matplotlib.figure import Figure
from matplotlib.text import Text

from reactivate.planner.solve import Chain, Option, Problem, Solution

CPU = torch.device("cpu")
TINY = {"gpt": models.Size(4, 32, 2, 32), "llama": models.Size(4, 64, 2, 16), "resnet": models.Size(4, 8, 2, 16)}
TINY |= {"moe": models.Size(4, 64, 2, 16), "vit": models.Size(4, 64, 2, 16), "unet": models.Size(5, 8, 2, 16)}
SETTINGS = results.Settings(seconds=0.0, fewest=2, backend="aot_eager_decomp_partition", compiled=("gpt",), sizes=TINY)
EAGER = {"none", *models.EVERY, models.SAVED_OPS}


@pytest.fixture(scope="module")
def found() -> results.Frontier:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "BUDGETS", (1.0, 0.0))
        (one,) = frontier.measure(["gpt"], SETTINGS, CPU)
    return one


# -- models and peers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", subjects.MODELS)
def test_copies_share_parameters_and_nothing_else(name: str) -> None:
    subject = subjects.make_subject(name, TINY[name], CPU)
    copied = subject.copied()
    assert all(one is other for one, other in zip(subject.model.parameters(), copied.parameters(), strict=True))
    assert not {*map(id, subject.model.modules())} & {*map(id, copied.modules())}
    assert not {*map(id, subject.model.buffers())} & {*map(id, copied.buffers())}
    assert len(subject.blocks_of(copied)) == TINY[name].layers
    assert all(parameter.grad is not None for parameter in copied.parameters())


@pytest.mark.parametrize("name", subjects.MODELS)
def test_peers_recompute_what_they_say(name: str) -> None:
    """A mark in each block says how often it runs."""
    subject = subjects.make_subject(name, TINY[name], CPU)
    count = TINY[name].layers
    expected = {"none": count} | {mode: count + len(range(0, count, k)) for mode, k in models.EVERY.items()}
    for way in models.torch_ways(subject.blocks_of, models.EVERY):
        model, runs = subject.copied(), []
        for block in subject.blocks_of(model):
            inner = next(block.children())
            inner.forward = _marked(inner.forward, runs)  # type: ignore[method-assign]
        subject.step_of(way.make(model))()
        assert len(runs) == expected.get(way.mode, 2 * count), way.name


def _marked(fn, runs):  # type: ignore[no-untyped-def]
    def run(*args, **kwargs):  # type: ignore[no-untyped-def]
        runs.append(None)
        return fn(*args, **kwargs)

    return run


@pytest.mark.parametrize(("name", "ops"), [("gpt", ("addmm", "mm")), ("resnet", ("convolution",))])
def test_selective_checkpointing_saves_products(name: str, ops: tuple[str, ...]) -> None:
    subject = subjects.make_subject(name, TINY[name], CPU)
    counted = {}
    for way in models.torch_ways(subject.blocks_of, models.EVERY):
        step = subject.step_of(way.make(subject.copied()))
        with CountOps() as count:
            step()
        counted[way.mode] = [count.ops.get(op, 0) for op in ops]
    assert counted[models.SAVED_OPS] == counted["none"]
    assert counted["full"] > counted["none"]


def test_compiled_peers_have_graphs_of_their_own() -> None:
    """A budget would be the other's if torch found that one's graphs; and equal blocks are compiled once."""
    subject = subjects.make_subject("gpt", TINY["gpt"], CPU)
    peaks = {}
    ways = {way.name: way for way in steps.compiled_peers(subject, "aot_eager_decomp_partition")}
    for name in (f"{steps.WHOLE}: budget 1", f"{steps.BLOCKS}: budget 1", f"{steps.BLOCKS}: budget 0"):
        way = ways[name]
        counters.clear()
        peaks[way.name] = steps.ready(way.name, subject, way.make, CPU, way.first).peak_bytes
        # torch 2.9 compiles equal blocks one by one.
        are_known = torch.__version__ >= "2.10" or way.system == steps.WHOLE
        assert counters["stats"]["unique_graphs"] == (1 if are_known else TINY["gpt"].layers), way.name
        assert way.is_compiled
    assert peaks[f"{steps.BLOCKS}: budget 0"] < peaks[f"{steps.BLOCKS}: budget 1"]


@pytest.mark.parametrize("index", [0, 1])
def test_compiled_plans_keep_what_the_plan_keeps(index: int) -> None:
    """In a graph as out of it: more bytes the more is kept, and products that are kept run no second time."""
    subject = subjects.make_subject("gpt", TINY["gpt"], CPU)
    way = steps.compiled_plans(subject, "aot_eager_decomp_partition")[index]
    least = steps.make_plans(subject, {}, 0, lambda: None).found["least"]
    peaks = {}
    for name, make in (("plain", way.make), ("least", lambda model: way.make(steps.applied(least, model)))):
        peaks[name] = steps.ready(name, subject, make, CPU, way.first).peak_bytes
    assert peaks["least"] < peaks["plain"]


def test_a_step_that_leaves_something_else_is_found() -> None:
    subject = subjects.make_subject("resnet", TINY["resnet"], CPU)
    same = steps.ready("same", subject, lambda model: model, CPU)
    half = steps.ready("half", subject, lambda model: lambda x: model(x) / 2, CPU)
    torchs = next(way for way in models.torch_ways(subject.blocks_of, models.EVERY) if way.mode == "full")
    assert same.differences == []
    assert half.differences == ["loss", "gradients"]
    assert steps.ready("torch", subject, torchs.make, CPU).differences == ["buffers"]  # BatchNorm's, updated twice


# -- plans and verdicts -----------------------------------------------------------------------------------------------


def test_plans_are_for_the_budgets_that_were_asked_for() -> None:
    subject = subjects.make_subject("gpt", TINY["gpt"], CPU)
    plain = steps.ready("plain", subject, lambda model: model, CPU).peak_bytes
    made = steps.make_plans(subject, {"nothing": 10, "plain": plain + 1000}, plain, lambda: None)
    assert "nothing" not in made.found
    assert steps.does(made.found["plain"]) == {"keep": 4}
    assert steps.budget_of(made.found["plain"]) == plain + 1000
    assert steps.budget_of(made.found["75 %"]) == plain * 75 // 100
    assert made.least_bytes == steps.budget_of(made.found["least"]) <= min(map(steps.budget_of, made.found.values()))
    same = {made.name_of(label): steps.does(plan) for label, plan in made.found.items()}
    assert same[made.name_of("plain")] == {"keep": 4}
    assert len(same) <= len(made.found)


@pytest.mark.parametrize(
    ("times", "rival", "words"),
    [
        ((10, 20, 15), "b: full", "faster"),
        ((10, 20, 20), "b: full", "not separable"),
        ((10, 15, 20), "b: full", "slower"),
    ],
)
def test_verdicts_of_made_up_times(times: tuple[int, int, int], rival: str, words: str) -> None:
    """Peers a (plain) and b (full), and one plan for b's peak."""
    noise = np.random.default_rng(0).normal(0, 0.1, (3, 20))
    rows = [np.full(20, time) + part for time, part in zip(times, noise, strict=True)]
    measured = dict(zip([("a: none", 1), ("b: full", 1), ("ours", 1)], rows, strict=True))
    levels = [Estimate(time, time, time) for time in times]
    others = [
        results.Peer("a", "none", False, 100, levels[0], 0.0, []),
        results.Peer("b", "full", False, 50, levels[1], 0.0, []),
    ]
    planned = [results.PlanContents("reactivate", "b: full", "ours", 50, 49, 1.0, 49, levels[2], True, {}, [])]
    first, second = results.verdicts(others, planned, measured)
    assert (first.rival, first.words, first.ratio, first.holds) == ("a: none", "no plan fits", None, None)
    assert (second.rival, second.words, second.holds) == (rival, words, True)
    assert second.ratio is not None
    assert second.ratio.value == pytest.approx(times[2] / times[1], abs=0.02)


def test_a_verdict_takes_the_fastest_step_of_a_plan_that_holds() -> None:
    measured = {(name, 1): np.full(20, time) for name, time in (("a: none", 10.0), ("eager", 9.0), ("compiled", 8.0))}
    others = [results.Peer("a", "none", False, 100, Estimate(10, 10, 10), 0.0, [])]
    eager = results.PlanContents("eagerly", "a: none", "eager", 100, 90, 1.0, 90, Estimate(9, 9, 9), True, {}, [])
    compiled = replace(eager, system="compiled", step="compiled", seconds=Estimate(8, 8, 8))
    for holds, system, time in ((True, "compiled", 8), (False, "eagerly", 9)):
        (said,) = results.verdicts(others, [eager, replace(compiled, holds=holds)], measured)
        assert (said.system, said.holds) == (system, True)
        assert said.ratio is not None
        assert said.ratio.value == pytest.approx(time / 10)
    (said,) = results.verdicts(others, [replace(eager, holds=False)], measured)
    assert said.holds is False


def test_rounds_end_when_every_interval_is_narrow() -> None:
    """Or when there is no more time; what later sittings measure joins what was there."""
    others = [results.Peer("a", "none", False, 100, Estimate(10, 10, 10), 0.0, [])]
    ours = [results.PlanContents("reactivate", "a: none", "ours", 100, 90, 1.0, 90, Estimate(9, 9, 9), True, {}, [])]
    rng = np.random.default_rng(0)

    def rounds_at(noise: float) -> int:
        def measure(count: int) -> dict[tuple[str, int], np.ndarray]:
            return {(name, 1): rng.normal(time, noise, count) for name, time in (("a: none", 10.0), ("ours", 9.0))}

        settings = results.Settings(fewest=4, width=0.03)
        judge = lambda times: measuring._judged(others, ours, times)  # noqa: E731
        rounds, found = measuring.in_sittings(measure, judge, settings, 400)
        assert found.are_narrow(0.03) or rounds == 400
        return rounds

    assert rounds_at(0.01) == 100 < rounds_at(0.8) <= 400 == rounds_at(5.0)


def test_the_solver_is_held_against_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)

    def entry(index: int) -> Option:
        return Option(str(index), rng.random(), rng.randrange(100), rng.randrange(100))

    chain = Chain(tuple(tuple(map(entry, range(6))) for _ in range(8)), tuple(rng.randrange(100) for _ in range(9)))
    short = steps.shortened(chain)
    assert len(short.menus) == 6  # 6 ** 6 = 46656
    short = Chain(short.menus[:4], (*short.outside[:4], short.outside[-1]))
    said = steps.against_every_choice(short)
    assert (said.blocks, said.choices, said.worst) == (4, 6**4, 0.0)
    assert said.equal == said.budgets > 3

    class Lazy(Problem):
        def solve(self, budget_bytes: float) -> Solution:
            found = super().solve(budget_bytes)
            return replace(found, seconds=2 * found.seconds)

    monkeypatch.setattr(steps, "Problem", Lazy)
    said = steps.against_every_choice(short)
    assert said.equal == 0
    assert said.worst == pytest.approx(1.0)


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_step_is_there_and_holds(found: results.Frontier) -> None:
    eager = [peer for peer in found.peers if not peer.is_compiled]
    assert {peer.mode for peer in eager} == EAGER
    assert len(found.peers) == len(eager) + 2 * 2
    assert not any(peer.differences for peer in eager)
    systems = {item.system for item in found.planned}
    assert systems == {"reactivate", *(f"reactivate in {how}" for how in (steps.WHOLE, steps.BLOCKS))}
    labels = {item.label for item in found.planned if item.system == "reactivate"}
    assert len(found.planned) == 3 * len(labels)
    assert "least" in labels
    assert {"90 %", "plain: none", "torch non-reentrant: full"} <= labels
    for item in found.planned:
        assert item.holds == (item.peak_bytes <= item.budget_bytes)
        assert item.promised_bytes <= item.budget_bytes
        assert item.system != "reactivate" or (item.holds and not item.differences)
        assert sum(item.does.values()) == TINY["gpt"].layers
    assert found.least_bytes == min(item.budget_bytes for item in found.planned)
    assert found.optimum.equal == found.optimum.budgets > 3
    assert found.rounds == 2


@pytest.mark.slow
def test_verdicts_are_at_the_peaks_of_peers(found: results.Frontier) -> None:
    everyone = {peer.name: peer for peer in found.peers}
    eager = [peer.name for peer in found.peers if not peer.is_compiled]
    assert [item.budget_of for item in found.verdicts] == eager
    assert [item.budget_of for item in found.verdicts_with_compiled] == list(everyone)
    for item in (*found.verdicts, *found.verdicts_with_compiled):
        assert item.budget_bytes == everyone[item.budget_of].peak_bytes
        rival = everyone[item.rival]
        fitting = [peer for peer in everyone.values() if peer.peak_bytes <= item.budget_bytes]
        assert rival.peak_bytes <= item.budget_bytes
        if item in found.verdicts_with_compiled:
            assert rival.seconds.value == min(peer.seconds.value for peer in fitting)
        assert (item.ratio is None) == (item.words == results.NO_PLAN)
        assert item.ratio is None or math.isfinite(item.ratio.value)


@pytest.mark.slow
def test_json_is_read_as_it_was_written(found: results.Frontier, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(found.to_json(), encoding="utf-8")
    assert read(results.Frontier, path) == found


@pytest.mark.slow
def test_page_has_every_table(found: results.Frontier) -> None:
    infeasible = replace(found.verdicts[0], ratio=None, words=results.NO_PLAN, holds=None)
    found = replace(found, verdicts=[infeasible, *found.verdicts[1:]])
    text = frontier.to_markdown([found])
    assert "## A byte-level GPT\n" in text
    for table in (*frontier.tables(found), frontier.what_is_done(found)):
        assert table.to_markdown() in text
        assert {len(row) for row in table.rows} == {len(table.header)}
    assert frontier.in_short(found) in text
    assert "torch.compile, whole model: budget 1: " in text  # is not the plain step bit for bit
    assert "Nothing has been measured" in frontier.to_markdown([])


@pytest.mark.slow
def test_labels_of_the_plot_cover_nothing(
    found: results.Frontier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: drawn.append(self))
    eager = [peer for peer in found.peers if not peer.is_compiled]
    frontier.plot(replace(found, peers=eager), tmp_path / "plot.png")
    (axes,) = drawn[0].axes
    boxes = {}
    for text in axes.texts:
        text.get_window_extent()
        boxes[text.get_text()] = Text.get_window_extent(text)
    assert {*boxes} == EAGER
    others = [*boxes.values(), axes.get_legend().get_window_extent()]
    assert not any(one.overlaps(other) for index, one in enumerate(others) for other in others[:index])


@pytest.mark.slow
def test_terminal_has_every_table(
    found: results.Frontier, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show(frontier.on_terminal(found))
    said = capsys.readouterr().out
    for part in ("every 2nd block", frontier.in_short(found)):
        assert "".join(part.split()) in "".join(said.split())


@pytest.mark.slow
def test_command_line_writes_results_plot_and_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frontier, "Settings", lambda: replace(SETTINGS, compiled=()))
    out, written = tmp_path / "results", tmp_path / "page.md"
    frontier.main(["--models", "resnet", "--seconds", "0", "--out", str(out), "--json"])
    (said,) = json.loads(capsys.readouterr().out)
    assert said["model"] == "resnet"
    name = f"frontier-resnet-cpu-torch{torch.__version__.partition('+')[0]}"
    assert {path.name for path in out.iterdir()} == {f"{name}.json", f"{name}.png"}
    frontier.main(["--models", "", "--out", str(out), "--page", str(written)])
    assert "## A ResNet with BatchNorm\n" in written.read_text(encoding="utf-8")


@pytest.mark.parametrize(("options", "words"), [(["--models", "vgg"], "vgg"), (["--page", "page.md"], "--out")])
def test_command_line_refuses(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        frontier.main(options)
    assert words in capsys.readouterr().err


# -- each block compiled ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", subjects.BY_BLOCK)
def test_blocks_that_are_compiled_have_one_graph(name: str) -> None:
    subject = subjects.make_subject(name, TINY[name], CPU, by_block=True)
    model = steps.in_place(subject, "aot_eager", subject.copied())
    counters.clear()
    subject.step_of(model)()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_peers_and_plans_with_each_block_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "BUDGETS", (1.0, 0.25))
    (found,) = frontier.measure(["gpt"], replace(SETTINGS, by_block=True), CPU)
    assert found.name.startswith("frontier-gpt-by-block-") and not found.verdicts_with_compiled
    assert [peer.mode for peer in found.peers] == ["budget 1", "budget 0.25"]
    assert all(peer.is_compiled and not peer.differences for peer in found.peers)
    assert all(item.holds and not item.differences for item in found.planned)
    assert len(found.verdicts) == 2 and all(item.holds for item in found.verdicts)
    assert any(name.startswith("compiler keeps") for item in found.planned for name in item.does)
    assert "## A byte-level GPT, each block compiled" in frontier.to_markdown([found])
