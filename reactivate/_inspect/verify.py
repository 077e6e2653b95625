"""`verify`: is the checkpointed model, bit for bit, the plain one?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reactivate._backends import backends
from reactivate._bits import elements_in_a_row
from reactivate._checkpoint import checkpoint
from reactivate._inspect.arguments import example_of
from reactivate._inspect.fake import has_no_memory, tensors_of
from reactivate._inspect.step import Change, Step
from reactivate._inspect.under import under
from reactivate._model.cache_watch import Caller, called
from reactivate._passes.observing import without_regions
from reactivate._region.accounts import in_words
from reactivate._region.due import uncounted
from reactivate._text.keywords import refuse_unknown
from reactivate._text.words import counted
from reactivate._types import Policy
from reactivate.errors import UsageError
from reactivate.policies._base import check_policy


@dataclass(frozen=True)
class Verdict:
    """The verdict of `verify`: true in a condition if the two runs are the same.

    Attributes:
        is_same: whether everything that was compared is bitwise equal.
        difference: the first difference, by name; None if there is none.
        is_deterministic: whether the plain model is bitwise equal to itself. If it is not, `is_same` is False, and
            `difference` is that of the plain model to itself.
        compared: how many tensors and random states were compared.
        regions: how many regions ran in the checkpointed forward pass.
        recomputations: how many recomputations ran in its backward.
        plain_bytes: what autograd kept of the plain forward pass, without parameters.
        kept_bytes: what it kept of the checkpointed one.
        is_whole: whether the model has no regions, and was checked as one.
    """

    is_same: bool
    difference: str | None
    is_deterministic: bool
    compared: int
    regions: int
    recomputations: int
    plain_bytes: int
    kept_bytes: int
    is_whole: bool = False

    def __bool__(self) -> bool:
        return self.is_same

    def __str__(self) -> str:
        if not self.is_deterministic:
            return f"The plain model differs between two runs of itself: {self.difference}"
        facts = (
            f"{counted(self.regions, 'region')}, {counted(self.recomputations, 'recomputation')}; autograd kept "
            f"{in_words(self.kept_bytes)} where the plain model keeps {in_words(self.plain_bytes)}"
        )
        whole = (
            " The model has no regions, so it was checked as one. To check a policy, pass policy=."
            if self.is_whole
            else ""
        )
        if self.is_same:
            return f"The same, bit for bit ({self.compared} tensors and random states; {facts}).{whole}"
        return f"Not the same: {self.difference} ({facts}).{whole}"


@refuse_unknown
def verify(
    model: Callable[..., Any], args: Any = (), kwargs: Mapping[str, Any] | None = None, *, policy: Policy | None = None
) -> Verdict:
    """Run `model` plain and checkpointed from the same state, and compare all results bit for bit.

    Compared are outputs, the gradients of parameters, of inputs and of closed-over tensors, buffers, and the state of
    every random number generator. A gradient that is missing on one side is a difference. The model, its gradients and
    the generators are then as they were, but for parameters that the forward itself writes to (a momentum encoder): the
    first run of such a model changes them, and a warning names them. On XLA every op runs for itself, since a compiler
    rounds a program with barriers otherwise.

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
        The verdict, with the first difference by name.

    Raises:
        UsageError: nothing that comes out requires a gradient; tensors have no values; or `policy` matches nothing.

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
        example = example_of("verify", model, args, kwargs)
        if any(map(has_no_memory, tensors_of(model, *example))):
            raise UsageError(
                "verify compares values, and some tensors of this model or its arguments have none: they are fake, or on the "
                "meta device. To see what a step keeps, call reactivate.explain(model, args, fake=True)."
            )
        call = Step(model, *example)
        with without_regions():
            plain = call.run(model)
            if call.has_changed:
                plain = call.run(model)
            ours = call.run(model)
        difference = _first_difference(plain.results, ours.results)
        is_deterministic, is_whole = difference is None, False
        if is_deterministic:
            with called(Caller("verify")):
                ours = call.run(model, change or nullcontext)
                if is_whole := change is None and not ours.regions:
                    ours = call.run(checkpoint(model))
            difference = _first_difference(plain.results, ours.results)
        return Verdict(
            is_same=difference is None,
            difference=difference,
            is_deterministic=is_deterministic,
            compared=len(plain.results),
            regions=ours.regions,
            recomputations=ours.recomputations,
            plain_bytes=plain.kept_bytes,
            kept_bytes=ours.kept_bytes,
            is_whole=is_whole,
        )


@contextmanager
def _op_by_op() -> Iterator[None]:
    """Let lazy devices run each op for itself: in a compiled program, a barrier changes how sums are rounded."""
    with ExitStack() as stack:
        for backend in backends():
            if backend.is_initialized():
                stack.enter_context(backend.op_by_op())
        yield


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first difference in words, None if there is none."""
    for name, first in one.items():
        if name not in other:
            return f"{name} is missing"
        second = other[name]
        if (first is None) != (second is None):
            return f"{name} is {'extra' if first is None else 'missing'}"
        if first is not None and not _is_same(first, second):
            return f"{name} is different{_by_how_much(first, second)}"
    extra = [name for name in other if name not in one]
    return f"{extra[0]} is extra" if extra else None


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return repr(one) == repr(other)  # a random state: nested tuples, dicts and arrays
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    # Of a NaN too the bits count; where there is no memory to look at, what `torch.equal` says.
    if one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if type(one) is not Tensor:
        return torch.equal(one, other)
    return torch.equal(*(elements_in_a_row(item).view(torch.uint8) for item in (one, other)))


def _by_how_much(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not one.is_floating_point() or one.shape != other.shape:
        return ""
    return f", by up to {(one.double() - other.double()).abs().max().item():.3g}"
