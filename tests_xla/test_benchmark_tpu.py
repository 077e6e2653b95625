"""Regions compiled for a TPU, ahead of time: what the benchmark counts, and its page."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _tpu_case as cases
import tpu
from _presentation import read, write
from _xla_case import MODELS, NONE, OURS, TORCH, TORCH_XLA, Size

SIZE = Size(4, 128, (16384,))
V5E = "v5e:1x1"
MLP = MODELS["mlp"]
PRODUCTS = SIZE.blocks * MLP.products * 3  # forward, and twice as many backward
RECOMPUTED = SIZE.blocks * MLP.recomputed

has_compiler = pytest.mark.skipif(cases.compiler() is None, reason=f"{cases.VARIABLE} names no Python with libtpu")


@pytest.fixture(scope="module")
def found() -> tpu.Results:
    results = tpu.new_results({"mlp": SIZE})
    for way in (NONE, TORCH, OURS):
        for case, versions in cases.measured("mlp", way, [V5E], size=asdict(SIZE)):
            results = replace(results, machine=results.machine | versions, cases=[*results.cases, case])
    return results


def case_of(found: tpu.Results, way: str) -> cases.Case:
    case = found.case("mlp", way, V5E)
    assert case is not None
    return case


@has_compiler
def test_no_flag_is_needed_for_a_recomputation_to_stay(found: tpu.Results) -> None:
    assert not cases.without_flags().keys() & {"XLA_FLAGS", "LIBTPU_INIT_ARGS"}
    plain, ours = case_of(found, NONE), case_of(found, OURS)
    assert (plain.traced.barriers, ours.traced.barriers) == (0, SIZE.blocks)
    assert (plain.traced.dots, plain.dots) == (PRODUCTS, PRODUCTS)
    assert (ours.traced.dots, ours.dots) == (PRODUCTS + RECOMPUTED, PRODUCTS + RECOMPUTED)


@has_compiler
def test_torchs_own_is_undone(found: tpu.Results) -> None:
    """The negative control."""
    plain, torchs = case_of(found, NONE), case_of(found, TORCH)
    assert (torchs.traced.dots, torchs.dots) == (PRODUCTS + RECOMPUTED, PRODUCTS)
    assert torchs.temp_bytes >= plain.temp_bytes


@has_compiler
def test_the_memory_falls(found: tpu.Results) -> None:
    plain, ours = case_of(found, NONE), case_of(found, OURS)
    assert 2 * ours.temp_bytes < plain.temp_bytes
    assert ours.peak_bytes < plain.peak_bytes


# -- without a compiler -----------------------------------------------------------------------------------------------


def results_of(**temps: int) -> tpu.Results:
    """Return results with a case for each way, of this temp."""
    program = cases.Program(0, 42, 0)
    made = [cases.Case("mlp", way, V5E, program, 42, temp, 2 * temp, 1.0) for way, temp in temps.items()]
    empty = tpu.new_results({"mlp": SIZE})
    return replace(empty, machine=empty.machine | {"torch": "2.9.0", "libtpu": "0", V5E: "TPU v5 lite"}, cases=made)


def test_every_row_says_whether_it_is_within_5_per_cent() -> None:
    (table,) = tpu.tables(results_of(**{NONE: 400, TORCH_XLA: 100, OURS: 105, TORCH: 106}))
    assert {row[0]: row[6:8] for row in table.rows} == {
        NONE: ("4.000", "missed"),
        TORCH: ("1.060", "missed"),
        TORCH_XLA: ("1.000", "met"),
        OURS: ("1.050", "met"),
    }


def test_a_model_without_a_temp_has_no_ratio() -> None:
    (table,) = tpu.tables(results_of(**{NONE: 0, TORCH_XLA: 0, OURS: 0}))
    assert {row[5:8] for row in table.rows} == {("", "", "")}


def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    results = results_of(**dict.fromkeys(tpu.WAYS, 100))
    assert [*results.missing([V5E])] == []
    assert [*replace(results, cases=results.cases[1:]).missing([V5E])] == [("mlp", NONE, V5E)]
    write(tmp_path, tpu.Results.benchmark, json=results.to_json())
    assert read(tpu.Results, tmp_path / f"{tpu.Results.benchmark}.json") == results
    tpu.main(["--topologies", "", "--out", str(tmp_path), "--page", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert text == tpu.to_markdown(results)
    assert "No step ran on a TPU" in text


def test_the_page_of_the_docs_is_that_of_the_committed_results() -> None:
    root = Path(__file__).parents[1]
    results = read(tpu.Results, root / "benchmarks" / "results" / f"{tpu.Results.benchmark}.json")
    assert (root / "docs" / "tpu-measured.md").read_text(encoding="utf-8") == tpu.to_markdown(results)


def test_other_versions_are_not_mixed() -> None:
    with pytest.raises(RuntimeError, match=r"libtpu is 1, .* measured with 0"):
        tpu.merged({"libtpu": "0"}, {"libtpu": "1"})


def test_without_a_compiler_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cases.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=r"make bench-xla"):
        next(cases.measured("mlp", NONE, [V5E], size=asdict(SIZE)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topologies", "v3:1"], "no topology v3:1"),
        (["--page", "x.md"], "give --out as well"),
        (["--models", "mlp", "--out", "x"], "leave --models out"),
    ],
)
def test_what_the_command_line_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tpu.parse(arguments)
    assert message in capsys.readouterr().err
