"""`site`: a name for a call in model code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.compiler import is_compiling

from reactivate._passes.logs import current_log
from reactivate._text.words import described
from reactivate._torch.dynamo import named_in_graph
from reactivate.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def site(fn: Callable[P, R], *, name: str) -> Callable[P, R]:
    """`fn`, its calls named `name` for policies: `policies.save_names(name)` keeps what they compute.

    Outside of regions, and under policies that do not name it, it is `fn`.

    Args:
        fn: a function or a module.
        name: any text; calls may share it.

    Raises:
        UsageError: `fn` cannot be called, or `name` is no text.

    Examples:
        >>> import torch, reactivate
        >>> def attend(q, k, v):
        ...     return reactivate.site(torch.nn.functional.scaled_dot_product_attention, name="attention")(q, k, v)
        >>> policy = reactivate.policies.save_names("attention")
        >>> q = torch.randn(1, 2, 8, 4, requires_grad=True)
        >>> reactivate.checkpoint(attend, policy=policy)(q, q, q).sum().backward()
    """
    if not callable(fn):
        raise UsageError(
            f"site takes a function or a module and names its calls; got {described(fn)}. Write site(fn, name={name!r})(x)."
        )
    if not isinstance(name, str) or not name:
        raise UsageError(f"site takes a name, which policies know the call by; got {name!r}.")

    @functools.wraps(fn, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return named_in_graph(name, fn, args, kwargs)  # type: ignore[no-any-return]
        log = current_log()
        if log is None:
            return fn(*args, **kwargs)
        decision = log.choice.of_name(name, fn)
        if not decision.is_of_interest:
            return fn(*args, **kwargs)
        return log.call(decision, fn, args, kwargs)  # type: ignore[no-any-return]

    return named
