"""The default budget of an accelerator: its free memory, less a reserve for what fragmentation takes.

A budget is compared with allocated bytes, and the allocator reserves more than it hands out. What it reserves for one step is
simulated (`cost.caching_allocator`), and has to fit as well. The reserve is for what that does not see: other streams, the
growth of the device's context, shapes that change from step to step.
"""

from __future__ import annotations

from collections.abc import Callable

from reactivate.errors import UsageError
from reactivate.planner.budget import Budget, parse
from reactivate.planner.place import RESERVED
from reactivate.planner.plan import Plan
from reactivate.planner.ranks import Ranks

_NOTHING = Budget("0B", total_bytes=0)


def parse_reserve(reserve: int | str | None, budget: int | str | None) -> Budget:
    """Return the reserve that a user asked for.

    Args:
        reserve: bytes, "2GiB", a share "5%", or 0 for none; None for `RESERVED`.
        budget: what the user asked for; None for the default one, which alone has a reserve.

    Raises:
        UsageError: it is none of these, or there is a budget as well.

    Examples:
        >>> from reactivate.planner.reserve import parse_reserve
        >>> parse_reserve("2GiB", None).total_bytes, parse_reserve(None, None).share
        (2147483648, Fraction(1, 20))
    """
    if reserve is None:
        return parse(RESERVED)
    if budget is not None:
        raise UsageError(
            f"plan(budget={budget!r}, reserve={reserve!r}): a reserve is left free by the default budget of an accelerator. "
            "Leave out budget=, or make it smaller by the reserve."
        )
    if (type(reserve) is int and reserve == 0) or (isinstance(reserve, str) and reserve.strip() in ("0", "0%", "0B")):
        return _NOTHING
    try:
        return parse(reserve)
    except UsageError:
        raise UsageError(
            f'plan(reserve={reserve!r}): it takes bytes (0 for none), a text with a unit ("2GiB"), or a share of the memory '
            f'that is there ("{RESERVED}", the default).'
        ) from None


def within_device(found: Plan, capacity_bytes: int, plan: Callable[[Budget], Plan], ranks: Ranks) -> Plan:
    """Return a plan for the default budget whose memory fits also as the allocator is predicted to reserve it.

    Args:
        found: the plan for that budget.
        capacity_bytes: what the allocator may reserve on the device, all included.
        plan: from a smaller budget to its plan.
        ranks: that plan together: what one of them lacks all leave free.

    Raises:
        PlanInfeasible: there is none.
    """
    while (over_bytes := max(ranks.gather((found.predicted.reserved_bytes or 0) - capacity_bytes))) > 0:
        found = plan(parse(found.budget_bytes - over_bytes))
    return found
