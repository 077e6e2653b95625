"""`explain`: what a step keeps for its backward, where, and what it recomputes; `compare`: how a policy changes that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from sys import _getframe
from types import CodeType
from typing import Any

import torch

from reactivate._inspect.arguments import example_of
from reactivate._inspect.comparison import Comparison
from reactivate._inspect.explained_step import ExplainedStep
from reactivate._inspect.explanation import Explanation
from reactivate._inspect.fake import faked, has_no_memory, tensors_of
from reactivate._inspect.places import codes_around
from reactivate._inspect.step import Step, leaves_of
from reactivate._inspect.under import under
from reactivate._model.cache_watch import Caller, called
from reactivate._passes.observing import without_regions
from reactivate._region.due import uncounted
from reactivate._text.keywords import refuse_unknown
from reactivate._text.words import in_one_line
from reactivate._torch.modes import lacks_values
from reactivate._types import Policy
from reactivate.errors import UnsupportedError
from reactivate.policies._base import check_policy


@refuse_unknown
@uncounted()
def explain(
    model: Callable[..., Any],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fake: bool | None = None,
) -> Explanation:
    """List what a step of `model` keeps for its backward, by site and source line, and what it recomputes.

    A forward and a backward run, on real tensors (twice, for the times) or on fake ones, which have sizes and no memory.
    Gradients, buffers, attributes and generators are then as they were.

    Args:
        model: a module or a function: with a policy applied, with regions of its own, or plain.
        args: the arguments of one call, as a tuple or a list; a dict holds keyword arguments, a lone tensor is one
            argument.
        kwargs: keyword arguments.
        fake: run on fake tensors; by default where arguments or parameters are fake or on the meta device.

    Returns:
        A tree of sites. `print` shows a table of it, `save("explanation.html")` writes a page.

    Raises:
        UsageError: nothing that comes out requires a gradient.
        UnsupportedError: the step cannot run on fake tensors.

    Examples:
        >>> import torch, reactivate
        >>> from reactivate import policies
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)))
        >>> handle = reactivate.apply(model, policies.first_match(policies.save_ops("linear"), policies.full()))
        >>> explanation = reactivate.explain(model, torch.randn(4, 8))
        >>> [(entry.path, entry.kind, entry.kept_bytes) for entry in explanation.regions[0].walk()][:2]
        [('0', 'region', 128), ('0.0', 'saved call', 128)]
    """
    args, kwargs = example_of("explain", model, args, kwargs)
    around = codes_around(_getframe(1))
    with called(Caller("explain")):
        return _explained("explain", model, args, kwargs, around, fake)


@refuse_unknown
@uncounted()
def compare(
    model: Callable[..., Any],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy,
    fake: bool | None = None,
) -> Comparison:
    """List, layer by layer, what a step of `model` keeps without regions and under a policy.

    The policy takes the place of one that is applied, for the time of the call. Otherwise as `explain`.

    Args:
        model: a module, or a function: of that the policy says what is kept inside.
        args: the arguments of one call, as for `explain`.
        kwargs: keyword arguments.
        policy: a policy or a plan.
        fake: run on fake tensors; by default where arguments or parameters are fake or on the meta device.

    Returns:
        Two explanations, side by side. `print` shows a table of them, `save("comparison.html")` writes a page.

    Raises:
        UsageError: nothing that comes out requires a gradient; or `policy` matches nothing.
        UnsupportedError: the step cannot run on fake tensors.

    Examples:
        >>> import torch, reactivate
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)))
        >>> compared = reactivate.compare(model, torch.randn(4, 8), policy=reactivate.policies.full(), fake=True)
        >>> compared.before.kept_bytes > compared.after.kept_bytes
        True
    """
    args, kwargs = example_of("compare", model, args, kwargs)
    around = codes_around(_getframe(1))
    with called(Caller("compare")):
        check_policy(policy, "compare(policy=...)")
        with without_regions():
            before = _explained("compare", model, args, kwargs, around, fake)
        with under(policy, model) as changed:
            return Comparison(before, _explained("compare", changed, args, kwargs, around, fake))


def _explained(asked: str, model: Any, args: Any, kwargs: Any, around: set[CodeType], fake: bool | None) -> Explanation:
    is_fake = any(map(has_no_memory, tensors_of(model, args, kwargs))) if fake is None else fake
    with ExitStack() as stack:
        if is_fake:
            args, kwargs = stack.enter_context(faked(model, args, kwargs, _device_of(args, kwargs)))
        else:
            Step(model, args, kwargs).run(model)  # the first run of anything is slow, and times are wanted
            torch.clear_autocast_cache()  # a step of its own casts its weights itself
        trace = ExplainedStep(model, args, kwargs, around, is_fake)
        try:
            trace.run(model)
        except Exception as error:
            if not (is_fake and lacks_values(error)):
                raise
            raise UnsupportedError(
                f"{asked}: the step cannot run on fake tensors ({in_one_line(error)}). If that is a mistake "
                "of the step's, as shapes that do not fit are, mend it. If the step needs the values of tensors, as the "
                f"counts of a router are, call {asked} with tensors that have values, and without fake=True."
            ) from error
    return trace.explanation()


def _device_of(args: Any, kwargs: Any) -> torch.device | None:
    """Return the device of the arguments: a model without memory counts as there, too. None if they have no memory either."""
    return next((leaf.device for leaf in leaves_of("args", (args, kwargs)).values() if not leaf.is_meta), None)
