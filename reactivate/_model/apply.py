"""`apply`: a policy for a whole model, in place, without renaming anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from reactivate._model.applied import Applied
from reactivate._model.handle import AppliedForward, Handle, forward_of, forwards_of
from reactivate._model.per_call import AppliedPerCall, CalledForward
from reactivate._model.selection import Selection
from reactivate._options import CheckMode, make_options
from reactivate._region.options import Options
from reactivate._text.keywords import refuse_unknown
from reactivate._text.words import described
from reactivate._types import Guard, Policy
from reactivate.errors import UsageError
from reactivate.guards import DEFAULT
from reactivate.policies._base import PerCall, ReadyMade, check_policy
from reactivate.policies._unmatched import Unmatched


@refuse_unknown
def apply(
    model: Module,
    policy: Policy,
    *,
    guards: Iterable[Guard] = DEFAULT,
    early_stop: bool = True,
    check: CheckMode | None = None,
    replace: bool = False,
) -> Handle:
    """Let the modules of `model` save or recompute their activations as `policy` says.

    No parameter, buffer, submodule or state_dict key is renamed. Copies (`copy.deepcopy`, `pickle`, `torch.save`) have
    the policy applied as well, with state of their own.

    If `apply` is called again with an equal policy and the same options, it returns the handle that the model has and
    changes nothing. So it may stand in a hook that a trainer calls more than once, as Lightning calls `configure_model`.
    A policy that selects nothing of the model, such as `none()`, is not found there again: each call returns a new handle.

    Args:
        model: changed in place, until `Handle.remove`.
        policy: see `reactivate.policies`. It says which modules are regions, and which calls inside of these are kept.
        guards: as for `checkpoint`.
        early_stop: as for `checkpoint`.
        check: as for `checkpoint`. By default the regions of a plan are not compared with their forwards
            ("metadata"): a plan's prediction does not include checksums.
        replace: replace a policy that is applied to the model already. If the new one is refused, the old one stays.

    Returns:
        A handle. `print` it to see the regions, and the layers beside them that are kept. `Handle.remove` undoes it, as
        does the end of `with apply(...):`.

    Raises:
        UsageError: another policy is applied to the model already, and `replace` is not set; or a part of this one matches
            no module. (A part that selects ops or names is looked at when every region has run: then there is a warning.)

    Examples:
        >>> import torch, reactivate
        >>> from reactivate import policies
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4)
        >>> handle = reactivate.apply(model, policies.first_match(policies.save_ops("linear"), policies.full()))
        >>> handle.regions
        ('layers.0', 'layers.1', 'layers.2', 'layers.3')
        >>> handle.remove()
        >>> print(reactivate.apply(model, policies.recompute_every(2)))
        recompute_every(2): 2 regions, recomputed in backward.
          TransformerEncoderLayer: layers.0, layers.2
        Beside the regions, not recomputed:
          layers.1, layers.3: the policy does not select them
    """
    _check(model, policy)
    default = policy._default_check() if isinstance(policy, ReadyMade) else "first"
    options = make_options(guards, early_stop, check or default, None)
    if not replace:
        found = forward_of(model)
        return _applied(model, policy, options) if found is None else _repeated(model, found, policy, options)
    taken = _take(model)
    try:
        old = {id(forward.applied): forward.applied.handle for _, forward in taken}.values()
        _refuse_part_of_larger(model, old)
        handle = _applied(model, policy, options)
    except BaseException:
        _give_back(taken)
        raise
    for replaced in old:
        replaced.remove()
    return handle


def _applied(model: Module, policy: Policy, options: Options) -> Handle:
    applied = (AppliedPerCall if isinstance(policy, PerCall) else Applied)(policy, options)
    undo = policy._applied_to(model) if isinstance(policy, ReadyMade) else None
    try:
        applied.attach(model)
    except BaseException:
        if undo is not None:
            undo()
        raise
    applied.handle._undo_policy = undo
    return applied.handle


@contextmanager
def paused(model: Module) -> Iterator[None]:
    """Make the model what it is without a policy, inside of the context."""
    taken = _take(model)
    try:
        yield
    finally:
        _give_back(taken)


def _take(model: Module) -> list[tuple[Module, AppliedForward]]:
    taken = list(forwards_of(model))
    for module, forward in taken:
        forward.uncover(module)
    return taken


def _give_back(taken: list[tuple[Module, AppliedForward]]) -> None:
    for _, forward in reversed(taken):  # the outermost of several in one module last
        forward.place()


def _check(model: Any, policy: Any) -> None:
    if isinstance(model, ReadyMade):
        raise UsageError(f"apply takes the model first, then the policy: apply(model, policy); got {described(model)}.")
    if isinstance(model, (list, tuple)):
        raise UsageError(
            f"apply takes one torch.nn.Module; got {described(model)}. Call apply(...) for each of several models."
        )
    if isinstance(model, type) and issubclass(model, Module):
        raise UsageError(
            f"apply takes a model, and {model.__name__} is its class: write apply({model.__name__}(...), policy)."
        )
    if not isinstance(model, Module):
        raise UsageError(f"apply takes a torch.nn.Module; got {described(model)}. For a function use checkpoint().")
    if isinstance(policy, (Tensor, Mapping)) or type(policy).__name__ == "DataLoader":
        raise UsageError(
            f"apply takes no example arguments; got {described(policy)} for its policy. Write apply(model, "
            "policies.full()); the functions that run the model are explain(model, x), verify(model, x) and plan(model, x)."
        )
    check_policy(policy, "apply")


def _refuse_part_of_larger(model: Module, handles: Iterable[Handle]) -> None:
    inside = set(map(id, model.modules()))
    for handle in handles:
        modules = [module for reference in handle._undo if (module := reference()) is not None]
        if not all(id(module) in inside for module in modules):
            raise UsageError(
                f"apply(replace=True): {handle!r} is applied to a larger model, of which this {type(model).__name__} is a "
                "part. Replace it there, or remove that handle first."
            )


def _repeated(model: Module, found: AppliedForward, policy: Policy, options: Options) -> Handle:
    """Return the handle that `model` has, if to apply the policy again would change nothing."""
    applied = found.applied
    if applied.policy != policy or applied.options != options:
        difference = "The one that is given now is another, or has other options"
    elif _placed_on(model, applied) != _chosen_on(model, policy):
        difference = "The one that is given now is equal to it, but selects other modules, or modules by other paths"
    else:
        applied.handle._uses += 1
        return applied.handle
    raise UsageError(
        f"apply: a policy is applied to this model already, {applied.handle!r} (at `{found.path}`). {difference}. Write "
        "apply(model, policy, replace=True); with policies.none() that removes it. To have both, apply one policy made of "
        "both."
    )


def _placed_on(model: Module, applied: Applied) -> set[tuple[int, type, str]]:
    return {
        (id(module), kind, forward.path if forward.applied is applied else f"{forward.path} of another policy")
        for module, forward in forwards_of(model)
        if (kind := forward.stands_for) is not None
    }


def _chosen_on(model: Module, policy: Policy) -> set[tuple[int, type, str]]:
    if isinstance(policy, PerCall):  # what is below the model's own call depends on the calls that there were
        return {(id(model), CalledForward, "")}
    chosen = Selection(model, policy, Unmatched(policy, "apply"))
    return {(id(module), kind, path) for kind, path, module, _ in chosen.forwards}
