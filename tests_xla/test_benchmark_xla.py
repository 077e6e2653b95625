"""The benchmark on XLA: what it counts is what the compiler does, and the page has every row."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _xla_case as cases
import xla
from _presentation import Table, read, write
from _xla_case import NONE, OURS, TORCH

SIZE = cases.Size(6, 128, (256,))
MLP = cases.MODELS["mlp"]
PRODUCTS = SIZE.blocks * MLP.products * 3  # forward, and twice as many backward
RECOMPUTED = SIZE.blocks * MLP.recomputed


@pytest.fixture(scope="module")
def found() -> xla.Results:
    return xla.measure(["mlp"], [NONE, TORCH, OURS], {"mlp": SIZE})


def case_of(found: xla.Results, way: str) -> cases.Case:
    case = found.case("mlp", way)
    assert case is not None
    return case


def test_a_region_has_a_barrier_and_its_products_are_computed_again(found: xla.Results) -> None:
    plain, ours = case_of(found, NONE), case_of(found, OURS)
    assert (plain.traced.barriers, ours.traced.barriers) == (0, SIZE.blocks)
    assert (plain.traced.dots, plain.compiled.dots) == (PRODUCTS, PRODUCTS)
    assert (ours.traced.dots, ours.compiled.dots) == (PRODUCTS + RECOMPUTED, PRODUCTS + RECOMPUTED)
    assert ours.compiled.outputs == plain.compiled.outputs


def test_torchs_own_is_undone(found: xla.Results) -> None:
    """The negative control: without it, a count that never falls would say nothing."""
    plain, torchs = case_of(found, NONE), case_of(found, TORCH)
    assert torchs.traced.dots == PRODUCTS + RECOMPUTED
    assert torchs.compiled.dots == PRODUCTS
    assert torchs.compiled.temp_bytes >= plain.compiled.temp_bytes


def test_the_temp_is_below_the_target(found: xla.Results) -> None:
    ours = case_of(found, OURS)
    ratio = found.ratio(ours)
    assert ratio is not None
    assert 0 < ratio < MLP.target
    (verdict,) = found.verdicts()
    assert (verdict.against, verdict.words) == (NONE, "met")
    assert replace(verdict, ratio=MLP.target + 0.001).words == "missed"


def test_the_page_has_every_row(found: xla.Results) -> None:
    text = xla.to_markdown(found)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for case in found.cases:
        if case.keeps_barriers:
            (row,) = [row for row in rows if row.startswith(f"| {case.way} |")]
            assert f"| {case.compiled.temp_bytes / 1e6:.1f} |" in row
    assert len(rows) == sum(2 + len(table.rows) for table in (*xla.model_tables(found), *_others(found)))
    assert all(len(table.rows) == 1 for table in _others(found))
    for fact in ("torch", "torch_xla", "python", "cpu"):
        assert str(found.machine[fact]) in text
    assert "figures of XLA's CPU compiler" in text


def _others(found: xla.Results) -> list[Table]:
    return [xla.target_table(found), xla.early_table(found)]


def test_a_page_is_written_of_results_that_are_there(found: xla.Results, tmp_path: Path) -> None:
    write(tmp_path, found.name, json=found.to_json())
    assert read(xla.Results, tmp_path / f"{found.name}.json") == found
    xla.main(["--models", "", "--out", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == xla.to_markdown(found)


def test_a_case_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"mlp, nothing: (?s:.*)KeyError: 'nothing'"):
        cases.measured("mlp", "nothing", SIZE)


# -- without a compiler -----------------------------------------------------------------------------------------------

COMPILED = """\
%fused (p: f32[2,2]) -> f32[2,2] {
  %iota.1 = u64[4]{0} iota(), iota_dimension=0
  %iota.2 = f32[4]{0} iota(), iota_dimension=0
  ROOT %dot.1 = f32[2,2]{1,0} dot(%p, %p)
}

ENTRY %main (p: f32[2,2]) -> (f32[2,2], f32[2,2]) {
  %product = f32[2,2]{1,0} custom-call(%p, %p), custom_call_target="__onednn$matmul"
  ROOT %tuple.1 = (f32[2,2]{1,0}, f32[2,2]{1,0}) tuple(%product, %fusion)
}
"""
BUFFERS = """\
allocation 0: size 16, parameter 0, shape |f32[2,2]|:
allocation 1: size 48, preallocated-temp:
Total bytes used: 96 (96B)
"""


def test_a_dump_is_read(tmp_path: Path) -> None:
    (tmp_path / "module_1.cpu_after_optimizations.txt").write_text(COMPILED)
    (tmp_path / "module_1.cpu_after_optimizations-buffer-assignment.txt").write_text(BUFFERS)
    assert cases.read_dump(tmp_path) == cases.Compiled(dots=2, draws=1, outputs=2, temp_bytes=48, total_bytes=96)
    (tmp_path / "module_2.cpu_after_optimizations.txt").write_text(COMPILED)
    with pytest.raises(RuntimeError, match="one program"):
        cases.read_dump(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mlp,gpt"], "no model gpt"),
        (["--page", "x.md"], "give --out as well"),
        (["--models", "mlp", "--out", "x"], "leave --models out"),
    ],
)
def test_what_the_command_line_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        xla.parse(arguments)
    assert message in capsys.readouterr().err
