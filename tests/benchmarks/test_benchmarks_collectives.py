"""The benchmark of collectives, with two of its programs, and the tables of that of DeepSpeed's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import collectives
import deepspeed_tests

pytestmark = pytest.mark.slow


def test_collectives_and_calls_are_added_up_over_the_processes() -> None:
    rows = collectives.measure(["experts", "pipeline, 1F1B"])
    experts, pipeline = rows
    assert set(experts["collectives"]) == {"plain", "torch", "ours", "saving"} and not experts["calls"]
    counts = {way: found["all_to_all_single"] for way, found in experts["collectives"].items()}
    # Two processes, two steps, two layers: there and back, forward and backward; and once more each in a recomputation.
    assert counts["plain"] == counts["saving"] == 2 * 2 * 2 * 4 and counts["torch"] == counts["ours"] == 2 * 2 * 2 * 6
    assert pipeline["calls"] == {"plain": 32, "torch": 64, "ours": 64}
    text = collectives.to_markdown(rows)
    assert "| experts | 32 | 48 | 48 | 32 |" in text and "| pipeline, 1F1B | 32 | 64 | 64 |" in text


def test_a_program_that_is_none_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no such program"):
        collectives.measure(["no such program"], processes=1)


def test_the_outcomes_of_deepspeeds_tests_are_added_up_by_function(tmp_path: Path) -> None:
    rows = [
        ("a.py::one[1]", "passed", "passed"),
        ("a.py::one[2]", "failed", "passed"),
        ("a.py::two", "passed", "error"),
    ]
    text = deepspeed_tests.to_markdown(rows, "1.0")
    assert "| `a.py::one` | 1 passed, 1 failed | 2 passed |" in text and "| `a.py::two` | 1 passed | 1 error |" in text
    assert deepspeed_tests.OUTCOME.findall("PASSED unit/a.py::one[1]\nERROR a.py::two") == [
        ("PASSED", "a.py::one[1]"),
        ("ERROR", "a.py::two"),
    ]


def test_what_skips_deepspeeds_tests_on_a_cpu_is_taken_out(tmp_path: Path) -> None:
    source = (
        'def test():\n    if get_accelerator().device_name() == "cpu":\n'
        '        pytest.skip("CPU accelerator does not support this test yet")\n    assert True\n'
    )
    folder = tmp_path / "source" / "tests" / deepspeed_tests.FOLDER
    folder.mkdir(parents=True)
    for name in deepspeed_tests.FILES:
        (folder / name).write_text(source)
    deepspeed_tests.prepare(tmp_path / "source", tmp_path / "copy")
    for name in deepspeed_tests.FILES:
        assert (tmp_path / "copy" / deepspeed_tests.FOLDER / name).read_text() == "def test():\n    assert True\n"
