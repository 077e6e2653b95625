"""Policies made of policies."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from reactivate._text.keywords import refuse_unknown
from reactivate._types import Action, Policy, Recompute, Save, Site
from reactivate.errors import UsageError
from reactivate.policies._base import (
    Interest,
    ReadyMade,
    answer_of,
    check_every,
    check_policy,
    interest_of,
    parts_of,
    written,
)


@dataclass(frozen=True, repr=False)
class _Several(ReadyMade):
    function: ClassVar[str]
    policies: tuple[Policy, ...]

    def __repr__(self) -> str:
        return written(self.function, *self.policies)

    def _interest(self) -> Interest:
        interest = Interest()
        for policy in self.policies:
            interest |= interest_of(policy)
        return interest

    def _spans(self) -> tuple[str, ...]:
        return tuple(span for policy in self.policies if isinstance(policy, ReadyMade) for span in policy._spans())

    def _parts(self) -> tuple[Policy, ...]:
        return self.policies

    def _kept_in(self, path: str) -> Hashable:
        return frozenset(_each_kept_in(path, self.policies)) - {None} or None


def _each_kept_in(path: str, policies: Iterable[Policy]) -> tuple[Hashable, ...]:
    return tuple(policy._kept_in(path) if isinstance(policy, ReadyMade) else None for policy in policies)


@dataclass(frozen=True, repr=False)
class _FirstMatch(_Several):
    function = "first_match"

    def __call__(self, site: Site) -> Action | None:
        answers = (answer_of(policy, site) for policy in self.policies)
        return next((action for action in answers if action is not None), None)


def first_match(*policies: Policy) -> ReadyMade:
    """The answer of the first policy that has one.

    Raises:
        UsageError: one of `policies` cannot be called, or there is none.

    Examples:
        >>> from reactivate import policies
        >>> policy = policies.first_match(policies.save_ops("linear"), policies.full())
    """
    _check(policies, "first_match")
    return _FirstMatch(policies)


@dataclass(frozen=True, repr=False)
class _Union(_Several):
    function = "union"

    def __call__(self, site: Site) -> Action | None:
        actions = [action for action in (answer_of(policy, site) for policy in self.policies) if action is not None]
        saves = [action for action in actions if isinstance(action, Save)]
        return next(iter(saves or actions), None)


def union(*policies: Policy) -> ReadyMade:
    """Save a call if any of `policies` saves it; otherwise recompute it if any of them recomputes it.

    Every policy is asked about every site, so that a policy that counts (`every_nth`) counts all calls that it selects.

    Raises:
        UsageError: one of `policies` cannot be called, or there is none.

    Examples:
        >>> from reactivate import policies
        >>> policy = policies.union(policies.every_nth(2, policies.save_ops("linear")), policies.save_ops("matmul"))
    """
    _check(policies, "union")
    return _Union(policies)


@dataclass(frozen=True, repr=False)
class _Exclude(_Several):
    function = "exclude"

    def __call__(self, site: Site) -> Action | None:
        policy, *exceptions = self.policies
        answers = [answer_of(exception, site) for exception in exceptions]  # of all: some count
        return answer_of(policy, site) if all(answer is None for answer in answers) else None

    def _kept_in(self, path: str) -> Hashable:
        kept = _each_kept_in(path, self.policies)  # the exceptions come last
        return None if set(kept) == {None} else kept

    def _parts(self) -> tuple[Policy, ...]:
        policy, *exceptions = self.policies
        leaves = (leaf for exception in exceptions for leaf in parts_of(exception))
        return (policy, *(_Exception(leaf, policy) if isinstance(leaf, ReadyMade) else leaf for leaf in leaves))


@dataclass(frozen=True, repr=False)
class _Exception(ReadyMade):
    """An exception, where it takes an answer of the policy away: an exception should do that somewhere."""

    exception: ReadyMade
    policy: Policy

    def __repr__(self) -> str:
        return f"{self.exception!r} as an exception to {self.policy!r}"

    def __call__(self, site: Site) -> Action | None:
        if self.exception(site) is None:
            return None
        # The parts, since the whole may count. Any action says that there is something to take away.
        is_taken = any(part(site) is not None for part in parts_of(self.policy))
        return Recompute() if is_taken else None

    def _patterns(self) -> tuple[str, ...]:
        return self.exception._patterns()

    def _interest(self) -> Interest:
        return self.exception._interest()

    @property
    def _may_match_nothing(self) -> bool:
        return self.exception._may_match_nothing

    def _check_blocks(self, blocks: Sequence[str]) -> None:
        self.exception._check_blocks(blocks)


def exclude(policy: Policy, *exceptions: Policy) -> ReadyMade:
    """Take the answers of `policy`, except for sites that one of `exceptions` has an action for.

    Raises:
        UsageError: one of them cannot be called, or there is no exception. From `apply` or the forward: an exception takes
            no answer of `policy` away.

    Examples:
        >>> import torch, reactivate
        >>> from reactivate import policies
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 3)
        >>> policy = policies.exclude(policies.full(), policies.recompute_modules("layers.0"))
        >>> reactivate.apply(model, policy).regions
        ('layers.1', 'layers.2')
    """
    _check((policy, *exceptions), "exclude")
    if not exceptions:
        raise UsageError("exclude takes a policy and at least one exception to it.")
    return _Exclude((policy, *exceptions))


@dataclass(frozen=True, repr=False)
class _EveryNth(_Several):
    n: int
    offset: int

    def __repr__(self) -> str:
        return written("every_nth", self.n, *self.policies, offset=self.offset or None)

    def __call__(self, site: Site) -> Action | None:
        action = answer_of(self.policies[0], site)
        if action is None:
            return None
        count = site.counts.get(id(self), 0)
        site.counts[id(self)] = count + 1
        return action if count % self.n == self.offset else None

    def _kept_in(self, path: str) -> Hashable:
        kept = super()._kept_in(path)
        return None if kept is None else (id(self), kept)  # each counts for itself

    def _interest(self) -> Interest:
        return super()._interest() | Interest(calls=True)


@refuse_unknown
def every_nth(n: int, policy: Policy, offset: int = 0) -> ReadyMade:
    """Apply the action of `policy` to every n-th of the calls that it selects, beginning with number `offset` (from 0).

    The count begins anew in each call of a region. The calls in between inherit the action of the call that contains them.

    Raises:
        UsageError: `n` or `offset` is out of range, or `policy` cannot be called.

    Examples:
        >>> from reactivate import policies
        >>> policy = policies.every_nth(2, policies.save_ops("matmul", "linear"))
    """
    check_every(n, offset, "every_nth", ", ...")
    _check((policy,), "every_nth")
    return _EveryNth((policy,), n, offset)


def _check(policies: tuple[Policy, ...], asked_by: str) -> None:
    if not policies:
        raise UsageError(f"{asked_by} takes at least one policy.")
    for policy in policies:
        check_policy(policy, asked_by)
