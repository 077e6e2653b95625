"""Keyword arguments that a function does not take, refused with the one that may have been meant (Rule 17)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from reactivate._text.words import did_you_mean
from reactivate.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_ELSEWHERE = {
    ("explain", "policy"): " Apply the policy first, or call reactivate.compare(model, args, policy=policy).",
}
"""What to do about an argument of a function that another one takes."""


def refuse_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to say which keyword arguments it takes, if it is given another one.

    It has the signature that it had. The other mistakes in a call stay errors of Python's.

    Examples:
        >>> from reactivate._text.keywords import refuse_unknown
        >>> @refuse_unknown
        ... def fit(model, *, budget=None):
        ...     return budget
        >>> fit(None, budgte=3)
        Traceback (most recent call last):
        reactivate.errors.UsageError: fit does not take budgte=. Did you mean 'budget'? It takes model, budget.
    """
    names = [
        name
        for name, item in inspect.signature(function).parameters.items()
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    ]
    known = frozenset(names)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not known.issuperset(kwargs):
            unknown = next(name for name in kwargs if name not in known)
            remedy = _ELSEWHERE.get((function.__name__, unknown), "")
            raise UsageError(
                f"{function.__name__} does not take {unknown}=.{did_you_mean(unknown, names)} It takes {', '.join(names)}."
                f"{remedy}"
            )
        return function(*args, **kwargs)

    return call
