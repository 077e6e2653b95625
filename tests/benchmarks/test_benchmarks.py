"""The overhead benchmark: its statistics on numbers made up for them, and a run that is as short as can be."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from count_ops import CountOps
from journal import Journal
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import reactivate
from reactivate._passes.observing import observed_by

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _overhead_sections as sections
import _timing
import _ways
import overhead
from _presentation import with_interval

pytestmark = pytest.mark.usefixtures("whole_heap")

CPU = torch.device("cpu")
TINY = _timing.Settings(rounds=2, batch_seconds=1e-5, calls=2)
ONE, OTHER = ("one", 1), ("other", 1)


def times(one: list[float], other: list[float]) -> _timing.Times:
    return {ONE: np.array(one), OTHER: np.array(other)}


def difference(view: _timing.View) -> _timing.Array:
    return view.over(ONE, OTHER)


def test_warm_batches_subtract_minima_of_different_rounds() -> None:
    assert _timing.estimate(difference, times([9, 5, 7], [1, 4, 2]), _timing.WARM).value == 4  # 5 - 1


def test_single_calls_take_the_median_of_paired_differences() -> None:
    assert _timing.estimate(difference, times([9, 5, 7], [1, 2, 5]), _timing.SINGLE).value == 3  # of 8, 3 and 2


@pytest.mark.parametrize("method", _timing.METHODS, ids=lambda method: method.name)
def test_interval_is_a_point_where_all_rounds_agree(method: _timing.Method) -> None:
    found = _timing.estimate(difference, times([3] * 20, [1] * 20), method)
    assert (found.low, found.value, found.high) == (2, 2, 2)


def test_interval_of_the_median_holds_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        noise = generator.exponential(1.0, size=(2, 80))
        found = _timing.estimate(difference, {ONE: 3 + noise[0], OTHER: noise[1]}, _timing.SINGLE)
        hits += found.low <= 3 <= found.high
    assert 180 <= hits <= 199  # 190 expected


def test_interval_of_the_minimum_shows_that_one_round_decides() -> None:
    found = _timing.estimate(difference, times([2] + [4] * 19, [1] * 20), _timing.WARM)
    assert (found.value, found.low, found.high) == (1, 1, 3)  # half of the halves have it not


def test_halves_are_rounds_without_repetition() -> None:
    drawn = _timing.halves(7, np.random.default_rng(0))
    assert drawn.shape == (_timing.DRAWS, 4)
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    assert set(drawn.ravel().tolist()) == set(range(7))


def test_ratio_is_of_the_same_draw() -> None:
    """One and other rise and fall together: their ratio is certain, each of them is not."""
    together = np.random.default_rng(0).exponential(1.0, 60)
    made = {ONE: 3 * together, OTHER: together, ("zero", 1): np.zeros(60)}
    found = _timing.estimate(
        lambda view: view.over(ONE, ("zero", 1)) / view.over(OTHER, ("zero", 1)), made, _timing.SINGLE
    )
    assert (found.low, found.value, found.high) == pytest.approx((3, 3, 3))
    alone = _timing.estimate(lambda view: view.level(ONE), made, _timing.SINGLE)
    assert alone.high > alone.low


def test_slope_of_a_line_is_its_slope() -> None:
    sizes = (1, 2, 4, 8)
    values = [np.array([5 + 3 * size, 7 - 2 * size], dtype=float) for size in sizes]
    assert sections.slope(sizes, values) == pytest.approx([3, -2])


def test_slope_is_the_least_squares_one() -> None:
    values = [np.array([value]) for value in (1.0, 4.0, 4.0, 9.0)]
    expected = np.polyfit([1, 2, 4, 8], [1.0, 4.0, 4.0, 9.0], 1)[0]
    assert sections.slope((1, 2, 4, 8), values) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.3, 0.4, "met"), (0.41, 0.5, "missed"), (0.35, 0.45, "within noise")]
)
def test_verdict_is_by_the_interval(low: float, high: float, expected: str) -> None:
    assert _timing.verdict(_timing.Estimate(0.4, low, high), 0.4) == expected


def cost(subject: str, size: int) -> float:
    """Made-up seconds: plain has 1 an op and 10 a call, torch adds 8 + 4 a tensor, we add 2 + 2 a tensor."""
    own = {_ways.PLAIN: (0, 0), _ways.TORCH: (8, 4), _ways.OURS: (2, 2)}
    if subject == sections.FORWARD:
        return size
    fixed, each = own[subject]
    return 10 + size + fixed + each * size


def rows_of(section: str, sizes: tuple[int, ...], method: _timing.Method) -> dict[str, overhead.Row]:
    (found,) = (item for item in sections.SECTIONS if item.name == section)
    subjects = (_ways.PLAIN, _ways.TORCH, _ways.OURS, sections.FORWARD)
    made = {(name, size): np.full(4, cost(name, size)) for name in subjects for size in sizes}
    return {
        quantity.name: overhead.make_row(section, quantity, _ways.OURS, method, made) for quantity in found.quantities
    }


@pytest.mark.parametrize("method", _timing.METHODS, ids=lambda method: method.name)
def test_figures_of_made_up_times(method: _timing.Method) -> None:
    fixed = rows_of("fixed", (1,), method)["over plain"]
    assert fixed.figure.value == pytest.approx(4e6)
    assert fixed.of_torch is not None
    assert fixed.of_torch.value == pytest.approx(4 / 12)
    assert fixed.verdict == "met"
    block = rows_of("transformer", (1,), method)["beyond one extra forward"]
    assert block.of_torch is not None
    assert block.of_torch.value == pytest.approx(3 / 11)
    slopes = rows_of("slope", sections.SAVED_TENSORS, method)
    ratios = [row.of_torch.value for row in slopes.values() if row.of_torch is not None]
    assert ratios == pytest.approx([2 / 4, 1 / 3])
    regions = rows_of("regions", (10, 1000), method)
    growth = regions["a region of 1,000 against one of 10"]
    assert growth.of_torch is None
    assert growth.figure.value == pytest.approx((2002 / 1000) / (22 / 10))


def test_every_round_calls_every_step_and_shuffles_them() -> None:
    calls: list[str] = []
    steps = {(name, 1): lambda name=name: calls.append(name) for name in "abcd"}
    found = _timing.single_calls(steps, 20, _timing.Timer(CPU, "cpu"), lambda: calls.append("|"))
    rounds = "".join(calls)[4:].split("|")[:-1]
    assert {"".join(sorted(one)) for one in rounds} == {"abcd"}
    assert len(set(rounds)) > 5
    assert all(len(taken) == 20 and (taken >= 0).all() for taken in found.values())


def test_batches_are_as_many_calls_as_last_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    def step() -> None:
        nonlocal now
        now += 2000

    monkeypatch.setitem(_timing.CLOCKS, "made up", lambda: now)
    timer = _timing.Timer(CPU, "made up")
    assert timer.calls_in(1e-4, step) == 50
    found = _timing.warm_batches({ONE: step}, 3, 1e-4, timer, lambda: None)
    assert found[ONE] == pytest.approx([2e-6] * 3)


def test_quiet_leaves_nothing_behind() -> None:
    gc.unfreeze()  # what Python 3.12 itself has frozen
    threads, frozen = torch.get_num_threads(), gc.get_freeze_count()
    with _timing.quiet():
        assert torch.get_num_threads() == 1
        assert gc.get_freeze_count() > frozen
        assert gc.isenabled()
    assert (torch.get_num_threads(), gc.get_freeze_count()) == (threads, frozen)


def test_subjects_are_what_they_are_called() -> None:
    """Ours run on our engine, also the installed one; torch's and torch_remat do not, and recompute as well."""
    for name, wrap in _ways.make_subjects().items():
        runs = Journal()

        def probe(x: Tensor, runs: Journal = runs) -> Tensor:
            runs.append(name)
            return x.sin()

        ran = oracle.Ran()
        with observed_by(ran):
            wrap(probe)(torch.ones(1, requires_grad=True)).backward()
        assert len(runs) == (1 if name == _ways.PLAIN else 2), name
        assert (ran.regions, ran.recomputations) == ((1, 1) if name in _ways.ALL_OURS else (0, 0)), name


def test_a_subject_that_is_not_what_it_is_called_is_refused() -> None:
    with pytest.raises(RuntimeError, match="reactivate is not what it is measured as"):
        _ways._check(_ways.OURS, lambda fn: fn)


def test_torch_remat_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ways, "find_spec", lambda name: None)
    subjects = _ways.make_subjects()
    assert {*subjects} == {_ways.PLAIN, *_ways.EVERY} - {_ways.REMAT}
    rows = overhead.measure(sections.SECTIONS[:1], TINY, CPU).rows
    assert {row.subject for row in rows} == {*_ways.EVERY} - {_ways.REMAT}


def test_differences_are_found_bit_for_bit() -> None:
    subjects = _ways.make_subjects()

    def make() -> tuple[torch.nn.Module, Tensor]:
        return sections.ten_modules(CPU)

    assert _ways.differs_from_plain(subjects[_ways.OURS], make) == []
    assert _ways.differs_from_plain(subjects[_ways.TORCH], make) == ["buffers"]


def test_transformer_block_is_as_large_as_its_title_says() -> None:
    model, x = sections.transformer_block(CPU)
    saved: list[Tensor] = []
    with CountOps() as count, saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model(x)
    (section,) = (section for section in sections.SECTIONS if section.name == "transformer")
    assert f"{count.ops.total()} ops, {len(saved)} saved tensors" in section.title


@pytest.fixture(scope="module")
def results() -> overhead.Results:
    return overhead.measure(sections.SECTIONS, TINY, CPU)


@pytest.mark.slow
def test_every_section_runs(results: overhead.Results) -> None:
    quantities = {(section.name, quantity.name) for section in sections.SECTIONS for quantity in section.quantities}
    assert {(row.section, row.quantity) for row in results.rows} == quantities
    for row in results.rows:
        assert np.isfinite([row.figure.value, row.figure.low, row.figure.high]).all()
        assert (row.verdict is None) == (row.target is None)
        assert row.target is None or row.subject in _ways.ALL_OURS


@pytest.mark.slow
def test_results_are_named_for_device_and_torch_version(results: overhead.Results) -> None:
    assert results.name == f"overhead-cpu-torch{torch.__version__.partition('+')[0]}"
    read = json.loads(results.to_json())
    assert read["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(read["rows"]) == len(results.rows)
    assert set(read["methods"]) == {"warm batches", "single calls"}


@pytest.mark.slow
def test_markdown_has_every_figure(results: overhead.Results) -> None:
    page = overhead.to_markdown(results)
    for table in overhead.tables(results):
        assert f"### {table.title}\n" in page
        assert {len(row) for row in table.rows} == {len(table.header)}
    for row in results.rows:
        assert with_interval(row.figure) in page
        assert row.verdict is None or f"| {row.target:.2f} | {row.verdict} |" in page


def test_command_line_measures_one_section_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "QUICK", TINY)
    overhead.main(["--only", "no_grad", "--quick", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["section"] for row in rows} == {"no_grad"}
    assert {row["subject"] for row in rows} >= set(_ways.ALL_OURS)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit, match=r"needs rich: pip install '\.\[all\]' --group bench in a clone"):
        overhead.main(["--only", "fixed", "--quick"])


def test_results_for_the_docs_are_of_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overhead.main(["--only", "fixed", "--out", "anywhere"])
    assert "leave --only out" in capsys.readouterr().err


def test_installation_is_over() -> None:
    _ways.make_subjects()
    assert torch.utils.checkpoint.checkpoint.__globals__["__name__"] != "reactivate.dropin.torch"
    with reactivate.dropin.install():  # refused if one were active
        pass
