"""The benchmark of selective checkpointing: its ways keep what they say, and a run as short as can be has every row."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from count_ops import CountOps
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _selective_block as block
import _selective_experiment as experiment
import _timing
import _training
import _ways as ways
import selective
from _overhead_sections import TransformerBlock
from _presentation import read

pytestmark = pytest.mark.usefixtures("whole_heap")

CPU = torch.device("cpu")
TINY = experiment.Settings(
    block=_timing.Settings(rounds=2, batch_seconds=1e-5, calls=2),
    large_width=64,
    large_length=8,
    large_calls=2,
    layers=3,
    dim=16,
    heads=2,
    context=8,
    batch=4,
    experiment_calls=2,
)
WAYS = {way.name: way for way in ways.make_ways()}


@pytest.mark.parametrize("name", WAYS)
def test_ways_compute_again_what_they_do_not_keep(name: str) -> None:
    """A biased linear is an `addmm` in the forward only; two matmuls are 2 `bmm` there and 4 in the backward."""
    way = WAYS[name]
    model, x = block.small_block(CPU)
    fn = way.wrap(model)
    for _ in range(2):  # the first two recomputations are compared, and run to their end
        fn(x).sum().backward()
    with CountOps() as count:
        fn(x).sum().backward()
    keeps_linears = way.keeps != ways.NOTHING
    keeps_matmuls = way.keeps in (ways.EVERYTHING, ways.PRODUCTS)
    assert count.ops["bmm"] == (6 if keeps_matmuls else 8)
    assert count.ops["addmm"] == 5 if keeps_linears else count.ops["addmm"] in (9, 10)  # early stop spares the last
    assert count.ops["native_layer_norm"] == (2 if way.system == ways.PLAIN else 4)


@pytest.mark.parametrize("make", [block.small_block, block.large_block(TINY)], ids=["small", "large"])
def test_ways_are_the_plain_block_bit_for_bit(make: block.Make) -> None:
    found = block.differences(make, CPU)
    assert {*found} == {*WAYS}
    assert not any(found.values()), found


def test_a_way_that_is_not_the_plain_block_is_found() -> None:
    def half(model: TransformerBlock) -> ways.Function:
        return lambda x: model(x) / 2

    changed = ways.Way("half", ways.EVERYTHING, half)
    found = ways.differs_from_plain(block.on_one_model(changed), lambda: block.small_block(CPU))
    assert found == ["output", "gradients"]


def test_ways_keep_the_same() -> None:
    found = block.kept_by("block", block.small_block, CPU)
    kept = {(item.system, item.keeps): item.kept_bytes for item in found}
    x, results = 2 * 8 * 32 * 4, {name: 2 * 8 * 4 * width for name, width in WIDTHS.items()}
    for system in (ways.TORCH, ways.OURS):
        assert kept[system, ways.NOTHING] == x
    for keeps, system in ((ways.ONLY_LINEARS, ways.MODULE_SITES), (ways.PRODUCTS, ways.FUNCTION_SITES)):
        calls = ways.CALLS_OF[keeps]
        assert kept[ways.SAC, keeps] == x + sum(results[name] for name in calls)
        assert kept[system, keeps] == kept[ways.SAC, keeps] - results["down"]  # which nobody reads
    assert kept[ways.PLAIN, ways.EVERYTHING] > max(size for (_, keeps), size in kept.items() if keeps != "everything")
    for item in found:  # nothing is held that is not kept; the block's result is as large as its argument
        beyond = item.allocated_bytes - item.kept_bytes
        assert 0 <= beyond <= (64 if item.system in ways.OUR_BLOCKS else 6000), item  # torch's keep a random state


WIDTHS = {"query_key_value": 96, "out": 32, "gate": 64, "up": 64, "down": 32, "scores": 32, "mix": 32}


def test_kept_bytes_are_of_storages_each_once_without_parameters() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4, requires_grad=True)
    assert block.kept_bytes(lambda: layer(x).sin(), layer) == 2 * 2 * 4 * 4  # x, and what sin was given
    assert block.kept_bytes(lambda: (x * x[:1]) * x, layer) == 2 * 2 * 4 * 4


def test_allocated_bytes_are_those_that_torch_allocates() -> None:
    x = torch.randn(1000, requires_grad=True)
    kept, peak = _training.allocated_bytes(lambda: x.sin().cos(), CPU)
    assert kept == 2 * 4000
    assert peak >= 3 * 4000


def test_recomputed_alone_is_what_a_recomputation_must_do() -> None:
    model, x = block.small_block(CPU)
    expected = {ways.NOTHING: (4, 2), ways.ONLY_LINEARS: (0, 2), ways.PRODUCTS: (0, 0)}
    for keeps, (linears, matmuls) in expected.items():
        step = ways.recomputed_alone(model, keeps, x)
        with CountOps() as count:
            step()
        assert (count.ops.get("addmm", 0), count.ops.get("bmm", 0)) == (linears, matmuls)
        assert count.ops["native_layer_norm"] == 2
        assert count.ops["clone"] == 4  # of query, key and value, and of what is mixed


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.1, 0.2, "met"),
        (0.001, 0.019, "met"),
        (0.001, 0.03, "within noise"),
        (0.021, 0.03, "missed"),
        (-2, -1, "met"),
    ],
)
def test_verdict_on_the_ideal(low: float, high: float, expected: str) -> None:
    assert block.not_above_zero(_timing.Estimate((low + high) / 2, low, high)) == expected


def test_figures_of_made_up_times() -> None:
    """Plain takes 10, SAC 10 more, torch_remat 8 more, ours 4 more."""
    way = WAYS["reactivate, module sites (5 linear)"]
    made = {
        block.PLAIN_KEY: np.full(4, 10.0),
        block.key_of(way): np.full(4, 14.0),
        ("torch SAC (5 linear)", 1): np.full(4, 20.0),
        ("torch_remat (5 linear)", 1): np.full(4, 18.0),
        (block.RECOMPUTED + way.keeps, 1): np.full(4, 2.0),
    }
    found = {row.quantity: row for row in block._rows(way, _timing.SINGLE, made)}
    assert [row.figure.value for row in found.values()] == pytest.approx([4e6, 0.4, 0.5])
    assert [row.verdict for row in found.values()] == [None, "missed", "met"]
    assert block._over_ideal(way, made).figure.value == pytest.approx(2 / 12)


@pytest.mark.parametrize("budget", [99, 100, 119, 420, 1000])
def test_largest_batch_is_the_last_that_fits(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    def peak(model: object, batch: int, *others: object) -> int:
        return 40 + 20 * batch

    monkeypatch.setattr(experiment, "peak_bytes", peak)
    known = experiment.Point("", "", 4, peak(None, 4), _timing.Estimate(1, 1, 1), _timing.Estimate(1, 1, 1))
    assert experiment.largest_batch(None, budget, known, TINY, CPU) == (budget - 40) // 20  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def results() -> selective.Results:
    return selective.measure(selective.PARTS, TINY, CPU)


@pytest.mark.slow
def test_every_way_has_every_figure(results: selective.Results) -> None:
    measured = {(way.system, way.keeps) for way in WAYS.values() if way.system != ways.PLAIN}
    for part, quantity in (
        ("block", block.OVER_PLAIN),
        ("block", block.OF_TORCH),
        ("large", "over the ideal"),
    ):
        rows = [row for row in results.rows if (row.part, row.quantity) == (part, quantity)]
        assert {(row.system, row.keeps) for row in rows} == measured
    for row in results.rows:
        assert np.isfinite([row.figure.value, row.figure.low, row.figure.high]).all()
        assert (row.verdict is None) == (row.target is None)
    judged = {(row.system, row.quantity, row.method) for row in results.rows if row.part == "block" and row.target}
    is_there = find_spec("torch_remat") is not None
    assert judged == {key for key in block.TARGETS if is_there or key[1] != "of torch_remat's"}


@pytest.mark.slow
def test_experiment_has_every_mode_of_every_system(results: selective.Results) -> None:
    found = results.experiment
    assert found is not None
    expected = {(way.system, way.mode) for way in experiment.make_model_ways()}
    for points in (found.at_equal_batch, found.at_equal_memory):
        assert {(point.system, point.mode) for point in points} == expected
    assert not any(found.differences.values()), found.differences
    peaks = {(point.system, point.mode): point.peak_bytes for point in found.at_equal_batch}
    full, second, third = (peaks[ways.OURS, mode] for mode in experiment.EVERY)
    assert full < second < third < peaks[ways.PLAIN, _training.NONE]
    for mode in experiment.EVERY:
        assert peaks[ways.OURS, mode] <= peaks[ways.TORCH, mode]
    for point in found.at_equal_memory:
        assert point.peak_bytes <= found.budget_bytes or point.batch == 1
    plain, *others = found.at_equal_memory
    assert max(point.batch for point in others) > plain.batch


def test_modes_of_the_model_recompute_as_they_say() -> None:
    """3 blocks; each has 4 linears with a bias, and one attention."""
    again = {_training.NONE: (0, 0), experiment.SAVED_OPS: (0, 0), experiment.SAVED_MODULES: (0, 1)}
    again |= dict.fromkeys(experiment.EVERY, (4, 1))
    regions = {_training.NONE: 0, _training.SECOND: 2, _training.THIRD: 1}
    for way in experiment.make_model_ways():
        step = experiment.step_of(experiment.forward_of(experiment.make_model(way, TINY, CPU), 2, TINY, CPU))
        for _ in range(2):  # whose recomputations run to their end
            step()
        with CountOps() as count:
            step()
        linears, attentions = again[way.mode]
        number = regions.get(way.mode, 3)
        attention = count.ops["_scaled_dot_product_flash_attention_for_cpu"]
        assert attention == 3 + attentions * number, way.name
        early = (0, number if linears else 0)  # early stop may spare the last linear
        assert 12 + linears * number - count.ops["addmm"] in early, way.name


@pytest.mark.slow
def test_json_is_read_as_it_was_written(results: selective.Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(results.to_json(), encoding="utf-8")
    assert read(selective.Results, path) == results
    assert {*json.loads(results.to_json())["methods"]} == {"warm batches", "single calls"}


@pytest.mark.slow
def test_page_has_a_section_for_each_part_that_was_measured(results: selective.Results) -> None:
    text = selective.to_markdown(results)
    for part in selective.PARTS:
        section = text.partition(f"[start:{part}] -->")[2].partition(f"<!-- --8<-- [end:{part}]")[0]
        assert f"### {selective.TITLES[part]}\n" in section
        for table in selective.tables(results, part):
            assert table.to_markdown() in section
            assert {len(row) for row in table.rows} == {len(table.header)}
    only = selective.to_markdown(selective.Results(results.machine, results.settings, experiment=results.experiment))
    assert "[start:experiment]" in only
    assert "[start:block]" not in only


@pytest.mark.slow
def test_command_line_measures_one_part_and_writes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(selective, "QUICK", TINY)
    selective.main(["--only", "experiment", "--quick", "--out", str(tmp_path)])
    assert "every 2nd block" in capsys.readouterr().out
    name = f"selective-cpu-torch{torch.__version__.partition('+')[0]}"
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json", f"{name}.md", f"{name}.png"}
    selective.main(["--only", "large", "--quick", "--json"])
    assert {row["part"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"large"}


def test_torch_remat_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ways, experiment):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert ways.REMAT not in {way.system for way in (*ways.make_ways(), *experiment.make_model_ways())}
    rows = block.measure_block(TINY, CPU, _timing.silent)
    assert {row.quantity for row in rows} == {block.OVER_PLAIN, block.OF_TORCH}


def test_a_step_of_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", done.append)
    step = partial(done.append, "step")
    assert _timing.finished(step, CPU) is step
    _timing.finished(step, torch.device("meta"))()
    assert done == ["step", torch.device("meta")]


def test_marks_are_the_seven_products() -> None:
    model, x = block.small_block(CPU)
    seen: list[str] = []

    def mark(name: str, call: ways.Callable[..., Tensor]) -> ways.Callable[..., Tensor]:
        def note(*tensors: Tensor) -> Tensor:
            seen.append(name)
            return call(*tensors)

        return note

    assert torch.equal(ways.MarkedBlock(model, mark)(x), model(x))
    assert sorted(seen) == sorted(ways.CALLS_OF[ways.PRODUCTS])
