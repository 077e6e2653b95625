"""A model of transformers under the drop-in, with its own gradient checkpointing, and the page about four of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _xla_models_case as cases
import xla_models
from _presentation import read
from _tpu_case import compiler
from _xla_case import NONE, OURS

ROOT = Path(__file__).parents[1]
SMALLEST, LAYERS = "gpt2", 2


def test_three_steps_op_by_op_are_bitwise() -> None:
    """Dropout and AdamW: losses, gradients, parameters and the seed afterwards."""
    found = cases.compared(SMALLEST, cases.KINDS[SMALLEST].small, is_op_by_op=True)
    assert found.recomputations == cases.STEPS * LAYERS
    assert found.compared == found.equal > 50
    assert set(found.largest) == {0.0}
    assert found.is_same_seed


@pytest.mark.skipif(compiler() is None, reason="TPU_PYTHON names no Python with libtpu")
def test_a_step_compiled_for_a_tpu_keeps_its_recomputation() -> None:
    size = replace(cases.KINDS[SMALLEST].large, layers=1)
    found = {
        way: case for way in (NONE, OURS) for case, _ in cases.compiled(SMALLEST, way, size, [xla_models.TOPOLOGY])
    }
    plain, ours = found[NONE], found[OURS]
    assert (plain.traced.barriers, ours.traced.barriers) == (0, 1)
    assert plain.traced.dots < ours.traced.dots
    assert (plain.dots, ours.dots) == (plain.traced.dots, ours.traced.dots), "no product is merged"


def test_the_page_of_the_docs_is_that_of_the_committed_results() -> None:
    results = read(xla_models.Results, ROOT / "benchmarks" / "results" / f"{xla_models.Results.benchmark}.json")
    assert (ROOT / "docs" / "xla-models.md").read_text(encoding="utf-8") == xla_models.to_markdown(results)
    for found in results.found:
        assert found.is_same_seed and found.recomputations > 0
        assert not found.is_op_by_op or found.equal == found.compared
    for case in results.cases:
        plain = results.case(case.model, NONE)
        assert plain is not None and (case.way != OURS or case.temp_bytes < plain.temp_bytes)
