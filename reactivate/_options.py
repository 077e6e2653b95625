"""The options of a region, checked, and the same for torch.compile."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, get_args

from reactivate._compilers.graph import contexts_for
from reactivate._region.options import Options
from reactivate._saved_calls.choice import Choice
from reactivate._saved_calls.log import serve
from reactivate._snapshot.kinds import module_of_method
from reactivate._text.words import described
from reactivate._torch.dynamo import runs_while_traced
from reactivate._types import DEVICE, Guard, Policy, Storage
from reactivate.errors import UnsupportedError, UsageError
from reactivate.guards import DEFAULT, ContextPair
from reactivate.policies._base import check_policy, check_storage
from reactivate.policies._unmatched import Unmatched

CheckMode = Literal["first", "every", "metadata", "none"]

DEFAULT_OPTIONS = Options(tuple(DEFAULT))


def make_options(
    guards: Iterable[Guard],
    early_stop: bool,
    check: CheckMode,
    name: str | None,
    inputs: Storage = DEVICE,
) -> Options:
    """Checked options.

    Raises:
        UsageError: an option has a value that it cannot have.
    """
    if guards is DEFAULT and early_stop is True and check == "first" and name is None and inputs is DEVICE:
        return DEFAULT_OPTIONS
    if check not in get_args(CheckMode):
        allowed = ", ".join(map(repr, get_args(CheckMode)))
        raise UsageError(f"check={check!r} is not a check. There are: {allowed}.")
    check_storage(inputs, "checkpoint(inputs=...)")
    return Options(checked(guards), bool(early_stop), check, name, inputs=inputs)


def checked(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Return the guards, each of which can restore something.

    Raises:
        UsageError: one is no guard, or would never be asked to restore what it can restore.
    """
    members = tuple(guards) if isinstance(guards, Iterable) and not isinstance(guards, str) else None
    for guard in (guards,) if members is None else members:
        if members is None or not isinstance(guard, Guard):
            raise UsageError(
                f"guards= takes a list of `Guard` objects; got {described(guard)}. To leave guards out, write "
                'guards.DEFAULT.without("rng"); to add one, guards.DEFAULT.adding(guard), whose class derives from '
                "reactivate.guards.Guard."
            )
        if getattr(guard.before, "__func__", None) is Guard.before and type(guard).recompute is not Guard.recompute:
            raise UsageError(
                f"the guard {type(guard).__name__} has a `recompute` that is never called: it has no `before`, and that of "
                "Guard returns None, which says that there is no state. Write before(self, call), which returns the state."
            )
    return members or ()


def with_policy(options: Options, fn: Any, policy: Policy) -> Options:
    """`options` with a policy for what is inside of the region.

    Raises:
        UsageError: `policy` is no policy.
    """
    check_policy(policy, "checkpoint(policy=...)")
    module = module_of_method(fn)
    root = None if module is None else weakref.ref(module)
    unmatched = Unmatched(policy, "checkpoint", has_modules=module is not None)
    choice = serve(Choice(policy, unmatched, root, "", is_applied=False))
    list(choice.find_modules())  # which crosses off what matches a module
    return options.of(options.name, choice, contexts_for(policy, root, ""))


@runs_while_traced
def _refuse_inputs() -> NoReturn:
    """Raise the error itself: an error that dynamo traces only ends its graph, and the region runs in eager."""
    raise UnsupportedError(
        "A region has inputs=..., a storage for what it is called with; under torch.compile that stays on the device. Leave "
        "out inputs=, or run the region in eager: torch.compiler.disable(region)."
    )


def contexts_in_graph(options: Options) -> Any:
    """Return the contexts of a traced region with these options, for torch.compile.

    Raises:
        UnsupportedError: a compiler cannot do what they say.
    """
    if options is DEFAULT_OPTIONS:
        return None
    if options.inputs != DEVICE:
        _refuse_inputs()
    if options.in_graph is not None:
        return options.in_graph
    if options.check == "every":
        raise UnsupportedError('check="every" cannot be used under torch.compile: run the function without it.')
    pairs = [guard for guard in options.guards if isinstance(guard, ContextPair)]
    others = [guard for guard in options.guards if guard not in DEFAULT.members and guard not in pairs]
    if others or len(pairs) > 1:
        names = ", ".join(type(guard).__name__ for guard in others or pairs)
        raise UnsupportedError(
            f"These guards cannot be used under torch.compile: {names}. What runs in a compiled graph is recomputed by "
            "the compiler, which knows the random numbers and one pair of dispatch modes."
        )
    return pairs[0].make if pairs else None
