"""Several checks in one test, which says of all of them what is wrong and not only of the first."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import oracle
import pytest

FAILED = pytest.fail.Exception  # of `pytest.raises` where nothing is raised: no `Exception`


def check_each(checks: Mapping[str, Callable[[], Any]]) -> None:
    """Run each check from the same random state; fail with the names, lines and errors of those that raise."""
    wrong, skipped = [], []
    for name, check in checks.items():
        oracle.seed_everything()
        try:
            check()
        except pytest.skip.Exception as reason:
            skipped.append(reason)
        except (Exception, FAILED) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{name}: {place.filename}:{place.lineno}: {type(error).__name__}: {error}\n    {place.line}")
    assert not wrong, f"{len(wrong)} of {len(checks)} are wrong:\n" + "\n".join(wrong)
    assert checks, "there is something to check"
    if len(skipped) == len(checks):
        raise skipped[0]


def each(names: str | Iterable[str], rows: Iterable[Any], ids: Any = None) -> Callable[[Any], Any]:
    """Make one test of all rows of a table, which are given as `pytest.mark.parametrize` takes them.

    For tables of small cases of one statement, such as what is refused: a case takes less than the start of a test.
    """
    columns = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    rows, labels = list(rows), None if ids is None or callable(ids) else list(ids)

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            checks = {}
            for number, row in enumerate(rows):
                values = dict(zip(columns, row if len(columns) > 1 else (row,), strict=True))
                name = labels[number] if labels else ", ".join(map(_short, values.values()))
                checks[f"{number}: {name}"] = functools.partial(test, **given, **values)
            check_each(checks)

        others = [item for name, item in inspect.signature(test).parameters.items() if name not in columns]
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
