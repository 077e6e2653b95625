"""Custom autograd functions as saved calls.

`Function.apply` is bound early (`swish = Swish.apply`), so there is no place to stand in for it. It looks up `forward` on
the class at every call, though: there a wrapper stands, for as long as a policy names the class. What the function saves
is saved after its `forward` has returned, before `apply` does; the log of the forward pass waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from threading import RLock
from typing import Any

from torch import Tensor
from torch.autograd import Function

from reactivate._engine.choice import Choice, Decision
from reactivate._engine.saved_sites import ForwardLog, Pending
from reactivate._engine.site_log import current_log, unseen
from reactivate._engine.skipped_sites import RecomputationLog
from reactivate._torch.autograd import has_setup_context, next_node_number
from reactivate._torch.containers import flatten

_changing = RLock()
_wrapped: dict[type[Function], int] = {}  # how many policies name the class


def serve(choice: Choice) -> Choice:
    """Let the functions that a policy names be saved calls, for as long as its `choice` lives."""
    kinds = choice.interest.functions
    if kinds:
        intercept(kinds)
        weakref.finalize(choice, release, kinds)
    return choice


def intercept(kinds: Iterable[type[Function]]) -> None:
    """From here on, let calls of these functions inside of regions go to the region's log."""
    with _changing:
        for kind in kinds:
            if kind not in _wrapped:
                _wrap(kind)
            _wrapped[kind] = _wrapped.get(kind, 0) + 1


def release(kinds: Iterable[type[Function]]) -> None:
    """The end of what `intercept` began."""
    with _changing:
        for kind in kinds:
            _wrapped[kind] -= 1
            if not _wrapped[kind]:
                del _wrapped[kind]
                for name in ("forward", "setup_context"):
                    _restore(kind, name)


def _wrap(kind: Any) -> None:
    forward, setup = kind.forward, kind.setup_context
    is_split = has_setup_context(kind)

    def wrapped(*args: Any) -> Any:
        log = current_log()
        if log is None or kind not in log.choice.interest.functions:  # it may be another policy that names it
            return forward(*args)
        decision = log.choice.of_class(kind)
        if not decision.is_of_interest:
            return forward(*args)
        inputs = args if is_split else args[1:]

        def run(*_: Any) -> Any:
            result = forward(*args)
            log.is_setup_inside = is_split and log.is_inside
            return result

        if isinstance(log, ForwardLog):
            return _keep(log, decision, run, inputs)
        assert isinstance(log, RecomputationLog)
        skipped = len(log.skipped)
        result = log.call(decision, run, inputs, {})
        if len(log.skipped) > skipped and not is_split:
            _mark(args[0], result, log.skipped.pop())
        return result

    def wrapped_setup(context: Any, inputs: Any, output: Any) -> Any:
        log = current_log()
        if isinstance(log, RecomputationLog) and log.skipped:
            return _mark(context, output, log.skipped.pop())
        if log is not None and log.is_setup_inside:
            log.is_setup_inside = False
            return log.unlogged(log.run_again)(setup, (context, inputs, output), {})
        return setup(context, inputs, output)

    _put(kind, "forward", wrapped)
    if is_split:
        _put(kind, "setup_context", wrapped_setup)


def _keep(log: ForwardLog, decision: Decision, forward: Any, inputs: Any) -> Any:
    call = log.begin(decision, None, inputs, {})
    if call is None:
        return forward()
    result = log.unlogged(log.run)(call, forward, (), {})
    call.site.is_function = True
    log.pending = Pending(call, result, unseen(_versions_in, result), next_node_number())
    return result


def _versions_in(result: Any) -> dict[int, int]:
    leaves = (leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor))
    return {id(leaf): leaf._version for leaf in leaves if not leaf.is_inference()}


def _mark(context: Any, result: Any, site: Any) -> None:
    """What the function's own forward would have said of its results, as far as it matters to what follows."""
    tensors = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
    constant = [tensor for tensor, requires in zip(tensors, site.requires) if not requires]
    context.mark_non_differentiable(*constant)


def _put(kind: Any, name: str, function: Any) -> None:
    function.hidden = vars(kind).get(name)  # None: inherited
    setattr(kind, name, staticmethod(function))


def _restore(kind: Any, name: str) -> None:
    placed = vars(kind).get(name)
    hidden = getattr(getattr(placed, "__func__", None), "hidden", placed)
    if hidden is placed:
        return
    if hidden is None:
        delattr(kind, name)
    else:
        setattr(kind, name, hidden)
