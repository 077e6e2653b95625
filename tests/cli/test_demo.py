"""The example that `make demo` runs: on a tiny model it shows what it promises, and it notices a broken engine."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function

import reactivate
from reactivate._passes.observing import observed_by

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import _runs
import byte_gpt

EXAMPLES = Path(byte_gpt.__file__).parent
STEPS, LAYERS = 3, 2
TINY = f"--budget 70% --steps {STEPS} --layers {LAYERS} --dim 32 --heads 2 --context 32 --batch 2".split()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A text that is quicker to read than the standard library."""
    text = torch.randint(256, (1000,), dtype=torch.uint8)
    monkeypatch.setattr(byte_gpt, "standard_library", lambda: text)
    return text


@pytest.fixture(scope="module", autouse=True)
def planned_once() -> Iterator[None]:
    """Plan once for each budget: in this process all tests train one model."""
    plans: dict[str, reactivate.Plan] = {}
    plan = reactivate.plan

    def planned(*args: Any, budget: str, **options: Any) -> reactivate.Plan:
        if budget not in plans:
            plans[budget] = plan(*args, budget=budget, **options)
        return plans[budget]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reactivate, "plan", planned)
        yield


def run(out: Path, *options: str) -> Any:
    """The results that a run in this process leaves behind, whether or not it exits."""
    try:
        byte_gpt.main([*TINY, "--out", str(out), *options])
    finally:
        results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return results


def assert_is_png(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_prints_json_alone_and_writes_the_same_and_a_plot(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "byte_gpt.py"), *TINY, "--json", "--out", str(tmp_path / "new" / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == json.loads((tmp_path / "new/demo/results.json").read_text(encoding="utf-8"))
    assert_is_png(tmp_path / "new/demo/byte_gpt.png")

    plain, ours = results["plain"], results["planned"]
    assert results["identical"] is True
    assert results["first_difference"] is None
    assert len(plain["losses"]) == STEPS + 1
    assert len(set(plain["losses"])) == STEPS + 1, "the model learns"
    assert plain["losses"] == ours["losses"]
    assert len(plain["step_seconds"]) == len(ours["step_seconds"]) == STEPS
    for name in ("peak_activation_bytes", "kept_after_forward_bytes"):
        assert 0 < ours[name] < plain[name]
        assert results["ratios"][name] == ours[name] / plain[name]


def test_the_planned_regions_are_recomputed_in_every_step(source: Tensor, tmp_path: Path) -> None:
    regions: list[int] = []
    apply = reactivate.apply

    def counted(model: nn.Module, policy: Any) -> object:
        handle = apply(model, policy)
        regions.append(len(handle.regions))
        ran.regions = ran.recomputations = 0  # those of planning are over
        return handle

    ran = oracle.Ran()
    with observed_by(ran), pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_gpt.reactivate, "apply", counted)
        results = run(tmp_path)
    assert results["identical"] and results["holds"]
    assert regions[0] > 0 and ran.regions == ran.recomputations == regions[0] * (STEPS + 1)
    assert results["planned"]["peak_activation_bytes"] <= results["plan"]["activation_budget_bytes"]
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert reactivate.Plan.load(tmp_path / "plan.json").budget == "70%"


def test_the_table_says_yes(source: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    assert "losses, gradients and RNG identical: yes" in capsys.readouterr().out


def test_a_recomputation_that_draws_other_numbers_is_noticed(
    source: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unguarded = partial(reactivate.apply, guards=reactivate.guards.DEFAULT.without("rng"))
    monkeypatch.setattr(byte_gpt.reactivate, "apply", unguarded)
    # The recomputation draws on, so that the second batch is another one.
    with pytest.raises(SystemExit, match=r"first difference: the loss of step 2\."):
        run(tmp_path)
    assert "losses, gradients and RNG identical: no" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["identical"] is False
    assert results["first_difference"] == "the loss of step 2"
    assert_is_png(tmp_path / "byte_gpt.png")


def test_a_step_above_its_budget_is_noticed(
    source: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(byte_gpt.reactivate, "apply", lambda model, plan: None)
    with pytest.raises(SystemExit, match="more memory than its budget"):
        run(tmp_path)
    assert "the budget holds: no" in capsys.readouterr().out


def test_python_numbers_drawn_in_one_run_alone_are_noticed(
    source: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = reactivate.apply

    def drawing(model: nn.Module, policy: Any) -> object:
        handle = apply(model, policy)
        model.register_forward_hook(lambda *_: random.random() and None)
        return handle

    monkeypatch.setattr(byte_gpt.reactivate, "apply", drawing)
    with pytest.raises(SystemExit, match="first difference: the state of Python's random numbers"):
        run(tmp_path, "--json")


@pytest.mark.slow
def test_an_exit_for_a_difference_is_a_failure_to_the_shell(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import byte_gpt, reactivate, functools, torch; "
        "byte_gpt.standard_library = lambda: torch.randint(256, (1000,), dtype=torch.uint8); "
        "guards = reactivate.guards.DEFAULT.without('rng'); "
        "reactivate.apply = functools.partial(reactivate.apply, guards=guards); byte_gpt.main()"
    )
    command = [sys.executable, "-c", program, *TINY, "--json", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout)["identical"] is False
    assert "The first difference: the loss of step 2." in done.stderr


def trained(settings: Any, source: Tensor, is_planned: bool) -> Any:
    def begin() -> Any:
        return byte_gpt.train(settings, source, byte_gpt.prepare(settings, is_planned), lambda *now: None)

    turns = byte_gpt.Turns(begin)
    while turns.run is None:
        turns.take()
    return turns.run


def test_the_two_runs_take_turns(source: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    take = byte_gpt.Turns.take

    def noted(turns: Any) -> None:
        order.append(id(turns))
        take(turns)

    monkeypatch.setattr(byte_gpt.Turns, "take", noted)
    assert run(tmp_path)["identical"]
    assert len(set(order[:2])) == 2 and order == order[:2] * (STEPS + 1)


def test_all_parameters_and_both_generators_are_compared(source: Tensor) -> None:
    settings = byte_gpt.Settings(budget="80%", steps=2, layers=2, dim=32, heads=2, context=32, batch=2)
    plain, ours = (trained(settings, source, is_planned) for is_planned in (False, True))
    assert _runs.first_difference(plain, ours) is None
    parameters = [name for name, _ in byte_gpt.GPT(settings).named_parameters()]
    assert plain.evidence.keys() == {
        *(f"the loss of step {step}" for step in (1, 2, 3)),
        *(f"the last gradient of {name}" for name in parameters),
        *(f"the parameter {name}" for name in parameters),
        "the state of torch's random numbers",
        "the state of Python's random numbers",
    }
    for name, bits in plain.evidence.items():
        ours.evidence[name] = bits[:-1] + bytes([bits[-1] ^ 1])
        assert _runs.first_difference(plain, ours) == name
        ours.evidence[name] = bits


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda loss, model: loss.neg_(), "the loss of step 1"),  # zero to minus zero: equal, of other bits
        (lambda loss, model: model.bias.grad[1].neg_(), "the last gradient of bias"),
        (lambda loss, model: model.weight[0, 2].neg_(), "the parameter weight"),
        (lambda loss, model: torch.rand(()), "the state of torch's random numbers"),
        (lambda loss, model: random.random(), "the state of Python's random numbers"),
    ],
)
def test_evidence_changes_with_one_bit_of_what_it_is_of(
    change: Callable[[Tensor, nn.Linear], object], name: str
) -> None:
    loss, model = torch.zeros(()), nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    before = _runs.evidence_of([loss], model)
    with torch.no_grad():
        change(loss, model)
    after = _runs.evidence_of([loss], model)
    assert [name for name in before if before[name] != after[name]] == [name]


def test_a_timeline_has_the_bytes_of_a_step() -> None:
    before = torch.ones(1000)

    def step() -> None:
        with record_function("forward"):
            kept = before.clone()
            dropped = torch.cat((kept, kept))
            del dropped
        more = torch.cat((kept, kept, kept))
        del kept, more

    timeline = _runs.watched(step)
    assert timeline.kept_bytes == 4000
    assert timeline.peak_bytes == 4000 + 12000
    assert timeline.allocated_bytes == [0, 4000, 12000, 4000, 16000, 12000, 0]
    assert timeline.seconds == sorted(timeline.seconds)


@pytest.mark.parametrize("extra", ["rich", "matplotlib"])
def test_a_missing_extra_is_named(extra: str) -> None:
    program = f"import sys; sys.modules[{extra!r}] = None; import runpy; runpy.run_path('byte_gpt.py')"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLES)
    assert done.returncode == 1
    assert extra in done.stderr
    assert "pip install '.[demo]' in a clone" in done.stderr
    assert "Traceback" not in done.stderr
