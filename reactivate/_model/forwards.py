"""The kinds of `forward` that a policy gives to modules: regions, spans of them, saved calls, losses by rows, budgets."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Module, Sequential

from reactivate._loss.logits import call_by_rows
from reactivate._model.handle import AppliedForward, Handle
from reactivate._modules.spans import SequentialSpan, SpanPlace, kind_of_span, members_of
from reactivate._passes.logs import current_log
from reactivate._region.options import Options
from reactivate._region.run import run
from reactivate._run import run_region, run_untraced
from reactivate._torch.dynamo import budget_in_graph, has_budgets_in_graphs
from reactivate.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from reactivate._model.applied import Applied


class RegionForward(AppliedForward):
    """The module is a region."""

    def __init__(self, applied: Applied, module: Module, path: str, hidden: Any = None) -> None:
        super().__init__(applied, module, path, hidden)
        self.options = applied.options_of(path, path, self._module)

    def note(self, handle: Handle) -> None:
        super().note(handle)
        handle.add_region(type(self.module()).__name__, self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return run_region(run, self.options, self.in_graph, *args, **kwargs)
        return _run_watched(self.applied, self.path, self.options, self.original(), args, kwargs)


def _run_watched(
    applied: Applied, path: str, options: Options, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    watch = applied.cache_watch
    runner = run if watch.is_done else functools.partial(watch.run, path)
    return run_untraced(runner, options, fn, args, kwargs)


class SpansForward(AppliedForward):
    """The module is a `Sequential`, and spans of its members are regions."""

    def __init__(
        self, applied: Applied, module: Module, path: str, hidden: Any = None, places: tuple[SpanPlace, ...] = ()
    ) -> None:
        self._places = places
        super().__init__(applied, module, path, hidden)
        self._spans = [SpanRegion(applied, place, self._module) for place in places]

    def note(self, handle: Handle) -> None:
        super().note(handle)
        for place in self._places:
            handle.add_region(kind_of_span(place.stop - place.start), str(place))

    def __call__(self, input: Any) -> Any:  # noqa: A002 - torch's name
        sequential, value, done = self.module(), input, 0
        for span in self._spans:
            value = span(_called(sequential, done, span.place.start, value))
            done = span.place.stop
        return _called(sequential, done, None, value)

    def __reduce__(self) -> tuple[Callable[..., AppliedForward], tuple[Any, ...]]:
        return type(self), (self.applied, self.module(), self.path, self.hidden, self._places)


class SpanRegion:
    """A span of the members of a `Sequential`, which is a region.

    Args:
        sequential: a reference to the `Sequential`, whose members may be replaced from call to call.
    """

    def __init__(self, applied: Applied, place: SpanPlace, sequential: weakref.ref[Module]) -> None:
        self.place = place
        self._applied = applied
        self._sequential = sequential
        self._options = applied.options_of(str(place), place.path, sequential)
        self._span = SequentialSpan()

    def __call__(self, value: Any) -> Any:
        if is_compiling():
            return run_region(run, self._options, self._in_graph, value)
        fn = MethodType(Sequential.forward, self._span_of_members())
        return _run_watched(self._applied, str(self.place), self._options, fn, (value,), {})

    def _in_graph(self, value: Any) -> Any:
        return _called(self._sequential(), self.place.start, self.place.stop, value)

    def _span_of_members(self) -> SequentialSpan:
        """Return the members as they are now: the same module as before, if they are."""
        span = self._span
        sequential = self._sequential()
        assert sequential is not None
        members = members_of(sequential)[self.place.start : self.place.stop]
        if list(map(id, members_of(span))) != list(map(id, members)):  # a module may have an `==` of its own
            span = self._span = SequentialSpan(*members)
        return span


def _called(sequential: Any, start: int, stop: int | None, value: Any) -> Any:
    for member in list(sequential)[start:stop]:
        value = member(value)
    return value


class SavedForward(AppliedForward):
    """The module is kept, where it is called inside of a region."""

    def note(self, handle: Handle) -> None:
        super().note(handle)
        handle.saved = (*handle.saved, self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return self.in_graph(*args, **kwargs)
        log = current_log()
        if log is not None:
            decision = log.choice.of_module(self.module(), self.path)
            if decision.is_of_interest:
                return log.call(decision, self.original(), args, kwargs)
        return self.original()(*args, **kwargs)


class FoundForward(AppliedForward):
    """Nothing of the model is selected: the policy is here to be found."""

    @property
    def stands_for(self) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_graph(*args, **kwargs) if is_compiling() else self.original()(*args, **kwargs)


class HeadForward(AppliedForward):
    """The module returns logits whose loss is computed by rows."""

    def note(self, handle: Handle) -> None:
        super().note(handle)
        handle.heads = (*handle.heads, self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_by_rows(self.original, self.path, args, kwargs)


class BudgetForward(AppliedForward):
    """The module is compiled, and the compiler keeps a share of what it would keep for the backward.

    Nothing recomputes where it is not compiled after all: then the memory that was planned does not hold, so it raises.
    """

    def __init__(self, applied: Applied, module: Module, path: str, hidden: Any = None, share: float = 1.0) -> None:
        if not has_budgets_in_graphs:
            raise UnsupportedError(
                f"apply: the policy lets torch's compiler keep {share:.0%} of {path!r}, which torch does since 2.13; this is "
                f"torch {torch.__version__}. Plan again with this torch: it has other candidates."
            )
        super().__init__(applied, module, path, hidden)
        self._share = str(share)  # a number that differs from block to block is none in a graph, but a variable

    def note(self, handle: Handle) -> None:
        super().note(handle)
        handle.budgets = (*handle.budgets, self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            with budget_in_graph(float(self._share)):
                return self.in_graph(*args, **kwargs)
        if is_grad_enabled():
            raise UsageError(
                f"The policy lets torch's compiler keep {float(self._share):.0%} of {self.path!r}, and that runs uncompiled: "
                "nothing would be recomputed. Compile each block after apply (block.compile()). If it is compiled, the "
                "compiler has given up on it: TORCH_LOGS=recompiles,graph_breaks says why."
            )
        return self.original()(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., AppliedForward], tuple[Any, ...]]:
        return type(self), (self.applied, self.module(), self.path, self.hidden, float(self._share))
