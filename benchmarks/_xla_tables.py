"""Results on XLA as tables of text, for the terminal and for the docs."""

from __future__ import annotations

from collections.abc import Iterator

from _tables import Table
from _xla_case import Case
from _xla_models import MODELS
from _xla_results import UNKEPT, Results
from _xla_ways import NONE, OURS

HEADER = (
    "way",
    "barriers",
    "dots",
    "compiled",
    "generators",
    "compiled",
    "outputs",
    "temp, MB",
    "of none's",
    "all buffers, MB",
)
"""What was traced, and what is left of it when it is compiled."""


def target_table(results: Results) -> Table:
    """Every target."""
    rows = [
        (MODELS[found.model].title, found.against, f"{found.ratio:.3f}", f"{found.target:.2f}", found.words)
        for found in results.verdicts()
    ]
    return Table(f"Targets: the temp with {OURS}", ("model", "as a part of that with", "ratio", "at most", ""), rows)


def model_tables(results: Results) -> Iterator[Table]:
    """All figures of each model."""
    for model, size in results.sizes.items():
        rows = [_row(results, case) for case in results.cases if case.model == model and case.keeps_barriers]
        yield Table(f"{MODELS[model].title}: {size}", HEADER, rows)


def early_table(results: Results) -> Table:
    """Tabulate what is left where XLA:CPU drops barriers before it schedules."""
    rows = []
    for model in results.sizes:
        found = [results.case(model, way, keeps_barriers=False) for way in UNKEPT]
        if all(found):
            rows.append((MODELS[model].title, *(cell for case in found if case for cell in _figures(case))))
    return Table("Without the flag", ("model", f"{NONE}: dots", "temp, MB", f"{OURS}: dots", "temp, MB"), rows)


def _row(results: Results, case: Case) -> tuple[str, ...]:
    traced, compiled = case.traced, case.compiled
    ratio = results.ratio(case)
    counts = (traced.barriers, traced.dots, compiled.dots, traced.draws, compiled.draws, compiled.outputs)
    return (
        case.way,
        *map(str, counts),
        _mb(compiled.temp_bytes),
        "" if ratio is None else f"{ratio:.2f}",
        _mb(compiled.total_bytes),
    )


def _figures(case: Case) -> tuple[str, str]:
    return str(case.compiled.dots), _mb(case.compiled.temp_bytes)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
