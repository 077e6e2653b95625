"""Custom autograd functions as saved calls.

`Function.apply` is bound early (`swish = Swish.apply`), so there is no place to stand in for it. It looks up `forward` on
the class at every call, though: there a wrapper stands, for as long as a policy names the class. What the function saves
is saved after its `forward` has returned, before `apply` does; the log of the forward pass waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from threading import RLock
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from reactivate._torch.autograd import has_setup_context
from reactivate._torch.ops import arrived, flatten
from reactivate._torch.private_api import Replaced

_changing = RLock()
_wrapped: dict[type[Function], Replaced] = {}  # of the classes that any policy names


def intercept(kinds: Iterable[type[Function]], current_log: Callable[[], Any]) -> None:
    """Let calls of these functions go to the log at work on the thread that calls them, until `release`."""
    with _changing:
        for kind in kinds:
            if kind not in _wrapped:
                _wrapped[kind] = Replaced(functools.partial(_wrappers, kind, current_log))
            _wrapped[kind].begin()


def release(kinds: Iterable[type[Function]]) -> None:
    """End what `intercept` began."""
    with _changing:
        for kind in kinds:
            if _wrapped[kind].end():
                del _wrapped[kind]


def versions_in(result: Any) -> dict[int, int]:
    """Return {id: version} of the tensors in what a function returned."""
    leaves = arrived([leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)])
    return {id(leaf): leaf._version for leaf in leaves if not leaf.is_inference()}


def mark(context: Any, result: Any, call: Any) -> None:
    """Mark the results of a skipped function as its own `forward` would, as far as it matters to what follows."""
    tensors = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
    constant = [tensor for tensor, requires in zip(tensors, call.requires) if not requires]
    context.mark_non_differentiable(*constant)


def _wrappers(kind: Any, current_log: Callable[[], Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what stands in for the functions of a class while it is intercepted."""
    forward, setup = _beneath(kind.forward), _beneath(kind.setup_context)
    is_split = has_setup_context(kind)
    inherited = [base for base in kind.__mro__ if _beneath(getattr(base, "forward", None)) is forward]

    def wrapped(*args: Any) -> Any:
        log = None if is_compiling() else current_log()
        if log is None:
            return forward(*args)
        named = next((base for base in inherited if base in log.choice.interest.functions), None)
        if named is None:  # it is another policy that names it
            return forward(*args)
        decision = log.choice.of_class(named)
        return log.call_function(decision, forward, args, is_split) if decision.is_of_interest else forward(*args)

    def wrapped_setup(context: Any, inputs: Any, output: Any) -> Any:
        log = None if is_compiling() else current_log()
        if log is None:
            return setup(context, inputs, output)
        return log.set_up_function(setup, context, inputs, output)

    yield kind, "forward", _over(forward, wrapped)
    if is_split:
        yield kind, "setup_context", _over(setup, wrapped_setup)


def _beneath(function: Any) -> Any:
    """Return the class's own function: a base class may be wrapped now, and not when the wrapper of `function` is asked."""
    return getattr(function, "beneath", function)


def _over(beneath: Any, function: Any) -> Any:
    function.beneath = beneath
    return staticmethod(function)
