"""Several checks in one test, which says of all of them what is wrong and not only of the first."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import oracle


def check_each(checks: Mapping[str, Callable[[], Any]]) -> None:
    """Run each check from the same random state; fail with the names, lines and errors of those that raise."""
    wrong = []
    for name, check in checks.items():
        oracle.seed_everything()
        try:
            check()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{name}: {place.filename}:{place.lineno}: {type(error).__name__}: {error}\n    {place.line}")
    assert not wrong, f"{len(wrong)} of {len(checks)} are wrong:\n" + "\n".join(wrong)
    assert checks, "there is something to check"
