"""The fuzzer: fixed seeds, its vocabulary, its shrinker, and that it catches an engine without guards."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from several import each
from torch import nn, ones

import reactivate
from fuzz import __main__ as command, sittings
from fuzz.campaign import Limits, campaign, judge_seed
from fuzz.construct import fill
from fuzz.failures import Failures
from fuzz.generate import generate
from fuzz.judge import AS_HOOKED, BY_CHANCE, DISCARDED, REFUSED, RIGHT, SILENT, Verdict, judge, torchs_verdict, words_of
from fuzz.page import page
from fuzz.program import Between, Block, Call, Group, Program, Training, Use
from fuzz.report import Summary, failure_text
from fuzz.run import PLAIN, TORCH, checked, compiled, run
from fuzz.shrink import shrink, smaller_than
from fuzz.snapshot import Freezer
from fuzz.source import source_of
from fuzz.vocabulary import CONSTRUCTS
from fuzz.vocabulary.interludes import INTERLUDES

SEEDS = range(1, 41)
judged = functools.cache(judge_seed)
WITHOUT_RNG = checked(guards=reactivate.guards.DEFAULT.without("rng"), check="metadata")
WITHOUT_MODULES = checked(guards=reactivate.guards.DEFAULT.without("modules"), check="metadata")


def program_of(*names: str, **training: object) -> Program:
    uses = tuple(Use(name, (0,) * len(CONSTRUCTS[name].options), number) for number, name in enumerate(names))
    return Program(0, (Block(uses),), (Call(0),), training=replace(Training(), **training))


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_fixed_seeds(seed: int) -> None:
    verdict = judged(seed)
    assert not verdict.fails, failure_text(seed, verdict, generate(seed))


def test_fixed_seeds_test_something() -> None:
    summary = Summary()
    for seed in SEEDS:
        summary.add(seed, judged(seed))
    assert summary.with_regions >= 20 and summary.with_recomputations >= 20
    assert summary.regions >= 100 and summary.recomputations >= 100
    assert sum(summary.discarded.values()) <= 8


def test_one_construct_runs_and_is_recomputed() -> None:
    verdict = judge(program_of("dropout", "batch norm", steps=2), measure=True)
    assert (verdict.outcome, verdict.regions, verdict.recomputations) == (RIGHT, 2, 2)
    assert verdict.kept is not None and verdict.kept[1] < verdict.kept[0]


# -- it catches what is wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arm", "construct"), [(WITHOUT_RNG, "draw"), (WITHOUT_MODULES, "batch norm")])
def test_an_engine_without_a_guard_is_caught(arm, construct: str) -> None:
    program = program_of(construct)
    assert judge(program).outcome == RIGHT
    assert judge(program, arm).outcome == SILENT


@pytest.mark.slow
@pytest.mark.parametrize("arm", [WITHOUT_RNG, WITHOUT_MODULES])
def test_random_programs_catch_an_engine_without_a_guard(arm) -> None:
    found = [
        seed for seed in range(60) if judge_seed(seed, arm).outcome == SILENT and judge_seed(seed).outcome == RIGHT
    ]
    assert len(found) >= 2


@pytest.mark.slow
def test_a_failure_is_shrunk_to_its_construct_and_a_second_one_of_its_kind_left_out() -> None:
    program = program_of("calculate", "draw", "parameter", steps=3)
    verdict = judge(program, WITHOUT_RNG)
    smaller = shrink(program, lambda other: judge(other, WITHOUT_RNG).is_like(verdict))
    assert smaller.constructs() == ("draw",) and smaller.training.steps == 1
    failures = Failures(arm=WITHOUT_RNG)
    seeds = [seed for seed in range(60) if judge_seed(seed, WITHOUT_RNG).outcome == SILENT]
    shrunk = [failures.add(seed, judge_seed(seed, WITHOUT_RNG)) for seed in seeds[:6]]
    assert any(shrunk) and len({program for program in shrunk if program}) == len(list(filter(None, shrunk)))


def test_a_wrong_program_is_not_torchs_fault() -> None:
    program = program_of("counter")
    assert run(compiled(source_of(program)), TORCH, 0).error is None
    assert judge(program, TORCH).outcome == SILENT, "torch counts twice"
    assert judge(program_of("calculate"), TORCH).outcome == RIGHT


HALVED = """
def train(note):
    x, weight = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    def region(y):
        with torch.no_grad():
            weight.mul_(0.5)
        return y * weight * FACTOR
    checkpoint(region)(x).sum().backward()
    note("gradient", x.grad)
"""


@pytest.mark.parametrize(("factor", "verdict"), [("0.0", BY_CHANCE), ("2.0", "wrong")])
def test_torch_is_right_by_chance_where_it_computes_from_other_tensors(factor: str, verdict: str) -> None:
    """Torch halves the weight again; where that is multiplied by zero, nobody sees it."""
    code = compiled(HALVED.replace("FACTOR", factor))
    assert torchs_verdict(run(code, PLAIN, 0), code, 0) == verdict
    assert not Verdict(REFUSED, torch=verdict).fails


# -- vocabulary and source --------------------------------------------------------------------------------------------


def variants(name: str) -> Iterator[Program]:
    program = program_of(name, steps=2, late_optimizer=True)
    (use,) = program.blocks[0].uses
    yield program
    for place, texts in enumerate(CONSTRUCTS[name].options.values()):
        for choice in range(1, len(texts)):
            choices = (*use.choices[:place], choice, *use.choices[place + 1 :])
            yield replace(program, blocks=(Block((replace(use, choices=choices),)),))


DISCARDS = "modified by an inplace", "through the graph a second time"


@each("name", CONSTRUCTS)
def test_every_construct_runs_plain_with_every_option(name: str) -> None:
    for program in variants(name):
        source = source_of(program)
        error = run(compiled(source), PLAIN, 0).error
        assert error is None or any(words in str(error) for words in DISCARDS), f"{error!r}\n{source}"


@each("index", range(len(INTERLUDES)))
def test_every_interlude_runs_plain(index: int) -> None:
    program = replace(program_of("calculate"), between=(Between(0, -1, index, 0),))
    error = run(compiled(source_of(program)), PLAIN, 0).error
    assert error is None or "modified by an inplace" in str(error)


def test_a_text_of_several_lines_keeps_its_indentation() -> None:
    assert fill("if a:\n    $b", {"b": "$c\n    $c", "c": "d"}) == ["if a:", "    d", "        d"]


def test_a_seed_is_a_program() -> None:
    assert generate(5) == generate(5) != generate(6)


# -- the shrinker -----------------------------------------------------------------------------------------------------


def test_shrinking_leaves_the_least_that_fails() -> None:
    def fails(program: Program) -> bool:
        return "codebook" in program.constructs() and program.training.steps >= 2

    seed = next(seed for seed in range(1000) if fails(generate(seed)) and len(generate(seed).blocks) > 2)
    smallest = shrink(generate(seed), fails)
    assert smallest.constructs() == ("codebook",) and len(smallest.blocks) == 1
    assert smallest.training == Training(steps=2) and not smallest.items and not smallest.between


def test_everything_that_shrinking_tries_is_a_program() -> None:
    for seed in range(30):
        for smaller in smaller_than(generate(seed)):
            compiled(source_of(smaller))
            assert smaller != generate(seed)


def test_a_group_is_taken_apart() -> None:
    program = replace(program_of(), items=(Group((Call(0), Call(0))),))
    assert shrink(program, lambda smaller: len(list(smaller.calls())) == 2).items == (Call(0, "none"), Call(0, "none"))


# -- comparison and report --------------------------------------------------------------------------------------------


def frozen(*values: object) -> object:
    freezer = Freezer()
    return [freezer.freeze(value) for value in values]


def test_snapshots_see_bits_identity_and_aliases() -> None:
    assert frozen(ones(2)) == frozen(ones(2)) != frozen(ones(2) * 2)
    assert frozen(ones(1) * 0.0) != frozen(ones(1) * -0.0)
    same = ones(2)
    assert frozen(same, same) != frozen(ones(2), ones(2))
    assert frozen(same, same.view(2)) != frozen(ones(2), ones(2))
    assert frozen({"a": [1.0]}) != frozen({"a": [1]})
    assert frozen(nn.Linear(1, 1).eval()) != frozen(nn.Linear(1, 1))


def test_errors_are_grouped_by_their_first_words() -> None:
    one, other = RuntimeError("`a.b` has 3 of [1, 2]\nmore"), RuntimeError("`c` has 4 of [5]")
    assert words_of(one) == words_of(other) == "RuntimeError: ... has N of ..."


def test_a_refusal_fails_where_torch_is_right() -> None:
    summary = Summary()
    summary.add(1, Verdict("refused", "E: no", "no", "wrong"))
    assert not summary.failed
    summary.add(2, Verdict("refused", "E: no", "no", "right"))
    assert summary.failed and summary.refusals["E: no"].example == 2
    assert "seed 2: E: no" in summary.text()


def test_a_campaign_has_a_page() -> None:
    summary = Summary(seconds=7200)
    summary.add(5, Verdict(RIGHT, regions=3, recomputations=4))
    summary.add(6, Verdict("refused", "E: no", "no", "wrong"))
    text = page(summary, 5, 2)
    assert "2 programs, seeds 5 to 6" in text and "2.0 hours in 2 processes" in text
    assert "| right, bit for bit | 1 |" in text and "| 1 | 6 | wrong: 1 | E: no |" in text


def test_a_campaign_ends_at_its_count_or_time() -> None:
    assert [seed for seed, _ in campaign(7, Limits(count=3), judging=lambda seed: Verdict(RIGHT))] == [7, 8, 9]
    assert not list(campaign(7, Limits(count=3, seconds=0)))


@pytest.mark.slow
def test_a_campaign_goes_on_in_another_sitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LEG", 3)
    record, page_path = tmp_path / "record.json", tmp_path / "page.md"
    given = ["--record", str(record), "--shrink", "0", "--page", str(page_path)]
    command.main([*given, "--seed", "11", "--count", "4"])
    assert json.loads(record.read_text())["programs"] == 4
    command.main([*given, "--count", "9"])
    found = sittings.load(record, None)
    assert (found.first, found.summary.programs, found.next) == (11, 9, 20)
    once = Summary()
    for seed, verdict in campaign(11, Limits(count=9)):
        once.add(seed, verdict)
    once.seconds = found.summary.seconds
    assert once == found.summary and "seeds 11 to 19" in page_path.read_text()

    command.main([*given, "--seconds", "0"])
    assert sittings.load(record, None) == found, "no time, no program"
    monkeypatch.setattr(sittings, "digest_of_engine", lambda: "another")
    assert sittings.load(record, 5).next == 5, "what another engine did says nothing of this one"


def test_the_digest_of_the_engine_is_of_what_it_does() -> None:
    one = sittings._parts_of("def f(x):\n    return x\n")
    other = sittings._parts_of(
        '"""A file."""\nimport os\n\n\ndef f(x):\n    """Return x."""\n\n    # Why.\n    return x\n'
    )
    assert one == other != sittings._parts_of("def f(x):\n    return -x\n")


def test_the_command_prints_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    code = command.main(["--seed", "1", "--count", "5", "--shrink", "0", "--json", "--show"])
    shown = capsys.readouterr().out
    summary = json.loads(shown.splitlines()[-1])
    assert summary["programs"] == 5 and "class Model(nn.Module)" in shown
    assert code == bool(summary["outcomes"].get("silent") or summary["false_refusals"] or summary["crashed"])


@pytest.mark.slow
def test_workers_come_to_the_verdicts_of_one_process() -> None:
    seeds = Limits(count=4)
    assert dict(campaign(1, seeds, workers=2)) == dict(campaign(1, seeds))


def test_what_depends_on_unwritten_memory_is_no_test() -> None:
    """Two plain runs may find the same there by chance, and the checkpointed one something else."""
    assert judge_seed(10027611).outcome in DISCARDED


@pytest.mark.parametrize("seed", [10075173])
def test_what_hooks_change_by_themselves_is_told_apart(seed: int) -> None:
    """Torch unpacks a leaf as another object for each op where there are hooks, and autocast casts each (docs/limits.md)."""
    assert judge_seed(seed).outcome == AS_HOOKED
