"""Budgets: the memory that a user allows a step; and what of it is left free, a reserve or a margin.

A budget is bytes in all, or a share of the plain step's activations. The default budget of an accelerator is its free
memory less a reserve, for what a simulation of its allocator does not see: other streams, the growth of the device's
context, shapes that change from step to step. A margin is for other batches, where sizes depend on the numbers in
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from reactivate._text.sizes import UNITS, split
from reactivate.errors import UsageError

RESERVED = "5%"
"""What a default budget leaves free, unless the user says otherwise."""
_PERCENT = ("percent", "pct")
_TAKES = (
    'A budget is a number of bytes (8589934592, 8e9), a text with a unit ("8GiB", "8 GB", "512MiB"), or a share ("50%") of '
    "the activation peak of the plain step: its peak without what is allocated all the time (parameters, gradients, "
    "optimizer state, inputs)."
)


@dataclass(frozen=True)
class Budget:
    """The memory that a step may take at its peak.

    Attributes:
        text: the budget as `parse` takes it.
        total_bytes: the peak in bytes, with parameters, gradients and optimizer state; None for a share.
        share: the part, up to 1, of the plain step's activation peak, which is its peak above parameters, gradients
            and optimizer state; None for bytes.
    """

    text: str
    total_bytes: int | None = None
    share: Fraction | None = None

    def total(self, fixed_bytes: int, plain_activation_bytes: int) -> int:
        """The peak that is allowed, in bytes.

        Args:
            fixed_bytes: parameters, gradients and optimizer state.
            plain_activation_bytes: the peak above these of the step without any checkpointing.

        Examples:
            >>> from reactivate.planner.budget import parse
            >>> parse("8KiB").total(1000, 600), parse("50%").total(1000, 600)
            (8192, 1300)
        """
        if self.total_bytes is not None:
            return self.total_bytes
        assert self.share is not None
        return fixed_bytes + int(self.share * plain_activation_bytes)


def parse(budget: float | str) -> Budget:
    """The budget that a user wrote.

    Units are those of IEC (KiB, MiB, GiB, TiB: powers of 1024) and SI (kB, MB, GB, TB: powers of 1000). A part of a byte
    is dropped.

    Args:
        budget: bytes as a whole number, or a text: an amount and its unit, or a percentage of the plain step's activation
            peak.

    Raises:
        UsageError: it is neither, or is nothing, or is more than 100 %.

    Examples:
        >>> from reactivate.planner.budget import parse
        >>> parse("1.5 GiB").total_bytes
        1610612736
        >>> parse("50%").share
        Fraction(1, 2)
    """
    if isinstance(budget, str):
        return _parse_text(budget)
    is_whole = isinstance(budget, float) and budget.is_integer() and budget != 1  # 1.0 may be a share
    if isinstance(budget, bool) or not (isinstance(budget, int) or is_whole):
        raise _refusal(budget, f"is a {type(budget).__name__}{_about_number(budget)}")
    return Budget(f"{int(budget)}B", total_bytes=_positive(budget, int(budget)))


def _parse_text(text: str) -> Budget:
    found = split(text)
    if found is None:
        is_negative = text.strip().startswith("-") and split(text.strip()[1:]) is not None
        raise _refusal(text, "is negative" if is_negative else "is not an amount and a unit")
    amount, unit = Fraction(found[0]), found[1]
    if unit == "%":
        return Budget(text.strip(), share=_share(text, amount))
    if unit not in UNITS:
        raise _refusal(text, _about_unit(found[0], unit))
    return Budget(text.strip(), total_bytes=_positive(text, int(amount * UNITS[unit])))


def _positive(budget: float | str, total_bytes: int) -> int:
    if total_bytes <= 0:
        raise _refusal(budget, "leaves no memory" if total_bytes == 0 else "is negative")
    return total_bytes


def _share(text: str, percent: Fraction) -> Fraction:
    if percent == 0:
        raise _refusal(text, "leaves no memory for activations")
    if percent > 100:
        raise _refusal(text, "is more than the plain step takes: 100% is its whole activation peak")
    return percent / 100


def _about_unit(amount: str, unit: str) -> str:
    if not unit:
        share = _percent(Fraction(amount)) if 0 < Fraction(amount) <= 1 else f"{amount}%"
        return f"has no unit; say {amount}GiB, {amount}MiB or {share}, or give an int of bytes"
    if unit.lower() in _PERCENT:
        return f"has the unit {unit!r}; say {amount}%"
    prefix = unit[0].upper()
    if prefix in "KMGT" and unit[1:].lower() in ("", "b", "ib"):
        return f"has the unit {unit!r}; say {amount}{prefix}iB or {amount}{prefix}B"
    return f"has the unit {unit!r}, which is none of {', '.join(UNITS)} and %"


def _about_number(budget: object) -> str:
    if not isinstance(budget, float) or not 0 < budget <= 1:
        return ""
    return f'; for that share say "{_percent(Fraction(str(budget)))}"'


def _percent(share: Fraction) -> str:
    return f"{float(100 * share):g}%"


def _refusal(budget: object, found: str) -> UsageError:
    return UsageError(f"budget={budget!r} {found}. {_TAKES}")


# -- what is left free ------------------------------------------------------------------------------------------------


MARGIN = "5%"
"""What is left free, unless the user says otherwise."""


def parse_margin(margin: str | int | None) -> Fraction:
    """Return the share that a user asked for.

    Args:
        margin: a share, "10%"; 0 for none; None for `MARGIN`.

    Raises:
        UsageError: it is none of these.

    Examples:
        >>> from reactivate.planner.budget import parse_margin
        >>> parse_margin("10%"), parse_margin(0)
        (Fraction(1, 10), Fraction(0, 1))
    """
    if (type(margin) is int and margin == 0) or (isinstance(margin, str) and margin.strip() in ("0", "0%")):
        return Fraction(0)
    try:
        share = parse(MARGIN if margin is None else margin).share
    except UsageError:
        share = None
    if share is None:
        raise UsageError(
            f'plan(margin={margin!r}): it takes a share of the memory whose size depends on data ("{MARGIN}", the default), '
            "or 0 for none."
        )
    return share


_NOTHING = Budget("0B", total_bytes=0)


def parse_reserve(reserve: int | str | None, budget: float | str | None) -> Budget:
    """Return the reserve that a user asked for.

    Args:
        reserve: bytes, "2GiB", a share "5%", or 0 for none; None for `RESERVED`.
        budget: what the user asked for; None for the default one, which alone has a reserve.

    Raises:
        UsageError: it is none of these, or there is a budget as well.

    Examples:
        >>> from reactivate.planner.budget import parse_reserve
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
