"""`verify`: is the checkpointed model, bit for bit, the plain one?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from reactivate._backends import backends
from reactivate._checkpoint import checkpoint
from reactivate._engine.accounts import in_words
from reactivate._engine.mismatch.calls import uncounted
from reactivate._engine.record import without_regions
from reactivate._inspect.arguments import example_of
from reactivate._inspect.differences import first_difference, largest_difference
from reactivate._inspect.step import Change, Outcome, Step
from reactivate._inspect.under import under
from reactivate._model.cache_watch import Caller, called
from reactivate._text.keywords import refuse_unknown
from reactivate._text.words import counted
from reactivate._types import Policy
from reactivate.policies._base import check_policy


@dataclass(frozen=True)
class Verdict:
    """The verdict of `verify`: true in a condition if the two runs are the same, and everything is kept with every bit.

    Attributes:
        is_same: whether everything that was compared is bitwise equal.
        difference: the first difference, by name; None if there is none. Where a storage is not exact and only gradients
            differ, the largest one.
        is_deterministic: whether the plain model is bitwise equal to itself. If it is not, `is_same` is False, and
            `difference` is that of the plain model to itself.
        compared: how many tensors and random states were compared.
        regions: how many regions ran in the checkpointed forward pass.
        recomputations: how many recomputations ran in its backward.
        plain_bytes: what autograd kept of the plain forward pass, without parameters.
        kept_bytes: what it kept of the checkpointed one.
        inexact: the sites of which a storage that is not exact kept something, in words.
        largest_difference: of an element of a gradient, if there are such sites; else 0.
    """

    is_same: bool
    difference: str | None
    is_deterministic: bool
    compared: int
    regions: int
    recomputations: int
    plain_bytes: int
    kept_bytes: int
    inexact: tuple[str, ...] = ()
    largest_difference: float = 0.0

    def __bool__(self) -> bool:
        return self.is_same and not self.inexact

    def __str__(self) -> str:
        if not self.is_deterministic:
            return f"The plain model differs between two runs of itself: {self.difference}"
        facts = (
            f"{counted(self.regions, 'region')}, {counted(self.recomputations, 'recomputation')}; autograd kept "
            f"{in_words(self.kept_bytes)} where the plain model keeps {in_words(self.plain_bytes)}"
        )
        if self.inexact and (self.is_same or self.largest_difference):
            return f"Not exact, as asked for: {self._inexactness()} ({facts})."
        if self.is_same:
            return f"The same, bit for bit ({self.compared} tensors and random states; {facts})."
        return f"Not the same: {self.difference} ({facts})."

    def _inexactness(self) -> str:
        first, count = self.inexact[0], len(self.inexact)
        sites = first if count == 1 else f"{first} and {counted(count - 1, 'more site')}"
        if self.is_same:
            return f"{sites}. In this step no gradient differs, in another one they may"
        return f"{sites}. The largest difference: {self.difference}. All but the gradients is the same, bit for bit"


@refuse_unknown
def verify(
    model: Callable[..., Any], args: Any = (), kwargs: Mapping[str, Any] | None = None, *, policy: Policy | None = None
) -> Verdict:
    """Run `model` plain and checkpointed from the same state, and compare all that comes out.

    Compared are outputs, the gradients of parameters, of inputs and of closed-over tensors, buffers, and the state of
    every random number generator. A gradient that is missing on one side is a difference. The model, its gradients and
    the generators are then as they were. On XLA every op runs for itself, since a compiler rounds a program with barriers
    otherwise.

    If the model has regions of its own (it calls `reactivate.checkpoint`, or torch's with the drop-in installed), these
    are what is verified, against the model with them turned off. Otherwise the whole model is made one region.

    Args:
        model: a module or a function.
        args: the arguments of one call, as a tuple or a list; a dict holds keyword arguments, a lone tensor is one
            argument.
        kwargs: keyword arguments.
        policy: what to recompute, in place of the above and of a policy that is applied: it is applied to `model`
            meanwhile, if that is a module; of a function it says what is kept inside.

    Returns:
        The verdict, with the first difference by name. Where a policy asks for a storage that is not exact, as
        `storage.Lossy`, the verdict is false, says which sites are concerned, and how far gradients are off at most.

    Raises:
        UsageError: nothing that comes out requires a gradient; or `policy` matches nothing.

    Examples:
        >>> import torch, reactivate
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        >>> bool(reactivate.verify(model, torch.randn(2, 4)))
        True
    """
    if policy is not None:
        check_policy(policy, "verify(policy=...)")
    return compare(model, args, kwargs, None if policy is None else functools.partial(under, policy))


@uncounted()
def compare(model: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None, change: Change | None) -> Verdict:
    """`verify`, for what any `change` makes of the model: model -> a context with the model that is to be the same."""
    with _op_by_op():
        call = Step(model, *example_of("verify", model, args, kwargs))
        with without_regions():
            plain, again = call.run(model), call.run(model)
        difference = first_difference(plain.results, again.results)
        if difference is not None:
            return _verdict(plain, again, difference, is_deterministic=False)
        with called(Caller("verify")):
            ours = call.run(model, change or nullcontext)
            if change is None and not ours.regions:
                ours = call.run(checkpoint(model))
        difference = first_difference(plain.results, ours.results)
        largest = largest_difference(plain.results, ours.results) if ours.inexact and difference is not None else None
        if largest is None:
            return _verdict(plain, ours, difference, is_deterministic=True)
        return replace(_verdict(plain, ours, largest[0], is_deterministic=True), largest_difference=largest[1])


@contextmanager
def _op_by_op() -> Iterator[None]:
    """Let lazy devices run each op for itself: in a compiled program, a barrier changes how sums are rounded."""
    with ExitStack() as stack:
        for backend in backends():
            if backend.is_initialized():
                stack.enter_context(backend.op_by_op())
        yield


def _verdict(plain: Outcome, ours: Outcome, difference: str | None, *, is_deterministic: bool) -> Verdict:
    return Verdict(
        is_same=difference is None,
        difference=difference,
        is_deterministic=is_deterministic,
        compared=len(plain.results),
        regions=ours.regions,
        recomputations=ours.recomputations,
        plain_bytes=plain.kept_bytes,
        kept_bytes=ours.kept_bytes,
        inexact=tuple(ours.inexact),
    )
