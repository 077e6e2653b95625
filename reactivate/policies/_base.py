"""The base class of ready-made policies, which tell more than a function from sites to actions."""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, NamedTuple, get_args

from torch.nn import Module

from reactivate._text.words import described, nearest
from reactivate._types import DEVICE, Action, Policy, Save, Site
from reactivate.errors import UsageError


class Interest(NamedTuple):
    """The calls that a policy has to be asked about, so that others cost nothing.

    Attributes:
        ops: names of ops; None for all there are.
        functions: classes of custom `torch.autograd.Function`s.
        names: whether functions that `reactivate.site` named are of interest.
        modules: whether calls of modules are, inside of regions.
        paths: whether the answer depends on the module in which a function is called.
        calls: whether it depends on which call it is: the first, the second.
        arguments: whether it depends on the arguments, of copies between devices and of attention.
    """

    ops: frozenset[str] | None = frozenset()
    functions: frozenset[Any] = frozenset()
    names: bool = False
    modules: bool = False
    paths: bool = False
    calls: bool = False
    arguments: bool = False

    def __or__(self, other: Interest) -> Interest:
        ops = None if self.ops is None or other.ops is None else self.ops | other.ops
        return Interest(ops, *map(operator.or_, self[1:], other[1:]))

    @property
    def any_function(self) -> bool:
        """Return whether functions of torch are of interest: then a region has to see each of them."""
        return self.ops is None or bool(self.ops) or self.arguments


_ACTIONS = get_args(Action)

# What has to be assumed of a user's own function.
ALL = Interest(None, frozenset(), True, True, True, True, True)


@dataclass(frozen=True, repr=False)
class ReadyMade:
    """A policy of ours: frozen, comparable, and it says what it can speak of."""

    def __call__(self, site: Site) -> Action | None:
        """The action for `site`, or None: that of the call around it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """As it is written."""
        raise NotImplementedError

    def _default_check(self) -> Literal["first", "metadata"]:
        """Return how far recomputations are compared with their forwards where `check=` does not say."""
        return "first"

    def _interest(self) -> Interest:
        """Return the calls that the policy has to be asked about."""
        return Interest()

    def _patterns(self) -> tuple[str, ...]:
        """Return the patterns of the paths of modules by which it selects, those that are text."""
        return ()

    def _spans(self) -> tuple[str, ...]:
        """Return the spans of a `Sequential` that it names: of all that there are, it is asked about these."""
        return ()

    def _parts(self) -> tuple[Policy, ...]:
        """The policies that it is made of, each of which should match something; itself if it is made of none."""
        return (self,)

    def _inside(self, path: str) -> Policy:
        """Return the policy for the calls inside of the region at `path`: where that is less, less has to be looked at."""
        return self

    def _kept_in(self, path: str) -> Hashable:
        """Return what is kept of functions that are called in the module at `path`; None if the path decides nothing."""
        return None

    def _check_blocks(self, blocks: Sequence[str]) -> None:
        """See to it that the policy is for a model with these blocks.

        Raises:
            UsageError: it is not.
        """

    def _applied_to(self, model: Module) -> Callable[[], None] | None:
        """Take note of being applied to `model`.

        Returns:
            What undoes what it did about that; None if it did nothing.

        Raises:
            UsageError: it is not for this model.
        """
        return None

    @property
    def _may_match_nothing(self) -> bool:
        """Return whether the policy may match no site without a warning: it lists more than any one model has."""
        return False

    @property
    def _is_found(self) -> bool:
        """Return whether `Handle.of` finds the policy although it selects no module: a plan can still be made tighter."""
        return False


class PerCall(ReadyMade):
    """A policy that is another one for each call of the model."""

    def of_call(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy | None:
        """Return the policy for a call of `model`, the same object whenever it is the same; None for no policy at all."""
        raise NotImplementedError


def check_policy(policy: Any, asked_by: str) -> None:
    """See to it that `policy` is one.

    Raises:
        UsageError: it is something else; the message says what to write.
    """
    if callable(policy) and not isinstance(policy, (type, Module)) and not _is_factory(policy):
        return
    raise UsageError(
        f"{asked_by} takes a policy, a function of a site such as policies.full(); got {_found(policy)}"
        f"{_remedy_for(policy, asked_by)}"
    )


def answer_of(policy: Policy, site: Site) -> Action | None:
    """Ask a policy about a site.

    Raises:
        UsageError: it returns something else than an action or None, or an action with a storage that is none.
    """
    action = policy(site)
    if action is None or isinstance(action, _ACTIONS):
        storage = action.storage if isinstance(action, Save) else getattr(action, "inputs", DEVICE)
        if storage is not DEVICE:
            check_storage(storage, f"The action {action!r} that {_name_of(policy)} returned")
        return action
    is_asked = callable(action) and not isinstance(action, type)
    remedy = " To answer as another policy does, return policy(site)." if is_asked else ""
    raise UsageError(
        f"A policy returns Recompute(), Save() or None; {_name_of(policy)} returned {action!r} for "
        f"{_described_site(site)}.{remedy}"
    )


def _name_of(policy: Any) -> str:
    return getattr(policy, "__qualname__", None) or repr(policy)


def _described_site(site: Site) -> str:
    place = f"the module {site.path!r}" if site.path else "the model itself"
    call = site.name or site.op
    return place if call is None else f"a call of {call!r} in {place}"


def check_storage(storage: Any, asked_by: str) -> None:
    """See to it that `storage` is one.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(storage, type) or not all(callable(getattr(storage, name, None)) for name in ("save", "load")):
        raise UsageError(
            f"{asked_by} takes a storage, an object with `save` and `load` such as reactivate.storage.Host(); got "
            f"{described(storage)}."
        )


def _found(policy: Any) -> str:
    return f"the function {policy.__name__}" if _is_factory(policy) else described(policy)


def _is_factory(value: Any) -> bool:
    """Return whether `value` is a function that makes policies."""
    return isinstance(value, FunctionType) and value.__module__.startswith(__package__ + ".")


def _remedy_for(policy: Any, asked_by: str) -> str:
    if isinstance(policy, (str, os.PathLike)) and os.fspath(policy).endswith(".json"):
        return f". To read a plan from a file, write reactivate.Plan.load({os.fspath(policy)!r})."
    names = sys.modules[__package__].__dict__
    factories = [name for name, value in names.items() if _is_factory(value)]
    if isinstance(policy, str):
        close = [policy] if policy in factories else nearest(policy, factories)
        return f": write {_call_of(names[close[0]])}." if close else "."
    if _is_factory(policy):
        return f", which makes one: write {_call_of(policy)}."
    if isinstance(policy, type) and issubclass(policy, Module):
        return f". For the modules of this class write policies.recompute_modules({policy.__name__})."
    if isinstance(policy, (list, tuple)) and policy and all(map(callable, policy)):
        return ". Make one of several: policies.first_match(a, b)."
    return "."


def _call_of(factory: Any) -> str:
    required = [item for item in inspect.signature(factory).parameters.values() if item.default is item.empty]
    return f"policies.{factory.__name__}({'...' if required else ''})"


def written(function: str, *arguments: object, **options: object) -> str:
    """A call as users write it, without options that are None or the default storage."""
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None and value != DEVICE]
    return f"{function}({', '.join([*(getattr(item, '__name__', None) or repr(item) for item in arguments), *given])})"


def shortened(names: Iterable[str], limit: int = 20) -> str:
    """Return the first of many names, and how many more there are."""
    found = list(names)
    return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")


def check_every(n: int, offset: int, function: str, rest: str = "") -> None:
    """See to it that "every n-th, beginning with `offset`" means something.

    Args:
        function, rest: the function that was asked, and how its other arguments are written.

    Raises:
        UsageError: `n` or `offset` is out of range.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UsageError(f"{function} takes a whole number of at least 1; got {n!r}.")
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset < n:
        raise UsageError(f"{function}({n}{rest}) takes an offset from 0 to {n - 1}; got {offset!r}.")


def interest_of(policy: Policy) -> Interest:
    """Return the calls that `policy` has to be asked about."""
    return policy._interest() if isinstance(policy, ReadyMade) else ALL


def parts_of(policy: Policy) -> tuple[Policy, ...]:
    """The smallest policies that `policy` is made of."""
    if not isinstance(policy, ReadyMade):
        return (policy,)
    parts = policy._parts()
    return parts if parts == (policy,) else tuple(leaf for part in parts for leaf in parts_of(part))
