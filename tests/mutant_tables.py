"""Two tables in benchmarks/results: what became of the mutants, by room and by name, and what each file of tests costs.

python tests/mutant_tables.py      the table of the mutants once more, of what has run so far
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mutants

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "mutants.jsonl"
MUTANTS, COSTS = RESULTS.with_suffix(".md"), RESULTS.with_name("tests.md")
EQUIVALENT = HERE / "equivalent_mutants.json"
"""Mutants that no test can kill, by name, each with the reason."""

HEAD = """\
# Mutants of the core

`make mutants` changes one operator, condition, number, result or statement of the core at a time, and runs the tests that
run the changed code, those of the first tier first, until one fails. {count} mutants of {every} are the sample; of those that
no test can kill, since they do what the code does, the reason is below. Of the other {killable}, the first tier kills
{first} ({first_share:.1f} %), and {second}. Of {ended} that were killed the process
ended, or a test took ten times as long as without, which a busy machine may do as well.

| room | mutants | the first tier kills | the second tier kills | survive | equivalent |
|---|---|---|---|---|---|
"""


def results() -> list[dict[str, Any]]:
    """Read what became of mutants; of one that ran more than once, the last time counts."""
    rows = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()) if RESULTS.exists() else ()
    return list({row["name"]: row for row in rows}.values())


def mutants_page(rows: Iterable[Mapping[str, Any]], every: int) -> str:
    """Return the table of mutants, from the rows that `kill_mutants.py` has written."""
    reasons = json.loads(EQUIVALENT.read_text(encoding="utf-8")) if EQUIVALENT.exists() else {}
    made = [row for row in rows if row["outcome"] != "not made"]
    counts: dict[str, Counter[str]] = {}
    for row in made:
        counts.setdefault(row["name"].partition("/")[0], Counter())[_fate(row, reasons)] += 1
    total = sum(counts.values(), Counter())
    first, both = total["first"], total["first"] + total["second"]
    killable = len(made) - total["equivalent"]
    share = 100 * both / max(1, killable)
    page = HEAD.format(
        count=len(made),
        every=every,
        killable=killable,
        first=first,
        first_share=100 * first / max(1, killable),
        second=f"both tiers kill {both} ({share:.1f} %)"
        if both > first
        else "the second tier has killed none or has not run",
        ended=sum("or the test did not" in row.get("error", "") for row in made),
    )
    for room, found in [*sorted(counts.items()), ("all", total)]:
        cells = [found.total(), found["first"], found["second"], found["survives"], found["equivalent"]]
        page += f"| {room} | {' | '.join(map(str, cells))} |\n"
    alive = [row for row in made if _fate(row, reasons) == "survives"]
    page += "\n## Survivors\n\n" + ("\n".join(map(_line, alive)) or "None.") + "\n"
    same = [f"{_line(row)}: {reasons[row['name']]}" for row in made if _fate(row, reasons) == "equivalent"]
    return page + "\n## Equivalent\n\n" + ("\n".join(same) or "None.") + "\n"


def _fate(row: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    if row["outcome"] == "killed":
        return "first" if row["tier"] == 1 else "second"
    return "equivalent" if row["name"] in reasons else "survives"


def _line(row: Mapping[str, Any]) -> str:
    place, kind, text = row["name"].split(": ", 2)
    tests = f"{row['ran']} of {row['tests']} tests ran" if row["tests"] else "no test runs it"
    return f"- {place}, line {row['line']}, {kind}: `{text}` ({tests})"


def costs_page(costs: Mapping[Path, list[tuple[int, float]]]) -> str:
    """Return the table of the tests: of each file its cases and seconds, by tier, and its lines."""
    rows = []
    for path, tests in costs.items():
        seconds = [sum(each for tier, each in tests if tier == wanted) for wanted in (1, 2)]
        cases = [sum(tier == wanted for tier, _ in tests) for wanted in (1, 2)]
        rows.append([path.name, cases[0], seconds[0], cases[1], seconds[1], len(path.read_text("utf-8").splitlines())])
    rows.sort(key=lambda row: -row[2] - row[4])
    rows.append(["all", *(sum(column) for column in list(zip(*rows))[1:])])
    text = "# What the tests cost\n\nSeconds of one core, by `python tests/kill_mutants.py --record`; of torch's tables one "
    text += f"sample a row. Measured are {len(costs)} of {len(list(HERE.glob('*/test_*.py')))} files.\n\n"
    text += "| file | cases of the first tier | s | of the second tier | s | lines |\n|---|---|---|---|---|---|\n"
    return text + "".join(
        f"| {name} | {one} | {first:.1f} | {two} | {second:.1f} | {lines} |\n"
        for name, one, first, two, second, lines in rows
    )


if __name__ == "__main__":
    MUTANTS.write_text(mutants_page(results(), len(mutants.sample(10**9))), encoding="utf-8")
