"""Sizes of memory as users write them: an int of bytes, or an amount and a unit."""

from __future__ import annotations

import re
from fractions import Fraction

from reactivate.errors import UsageError

_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS = _DECIMAL | _BINARY
# "gb" and "GIB", but not "Gb", which may be bits.
_WRITTEN = {written: unit for unit in reversed(UNITS) for written in (unit.lower(), unit.upper(), unit)}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(\S*)")
_POWER = re.compile(r"[0-9]+(?:\.[0-9]+)?[eE]\+?[0-9]{1,2}")  # "1e9": bytes, since no other amount is written so


def split(text: str) -> tuple[str, str] | None:
    """Return the amount and the unit that a text is made of; None if it is not. A unit is one of `UNITS`, if it is any.

    Examples:
        >>> from reactivate._text.sizes import split
        >>> split("1.5 gib"), split("1e9"), split("much")
        (('1.5', 'GiB'), ('1e9', 'B'), None)
    """
    text = text.strip()
    if _POWER.fullmatch(text):
        return text, "B"
    found = _AMOUNT.fullmatch(text)
    return None if found is None else (found[1], _WRITTEN.get(found[2], found[2]))


def size(value: int | str, asked: str) -> int:
    """Return the bytes that a user wrote: an int, or a text with a unit of IEC (KiB, MiB, GiB) or SI (kB, MB, GB).

    Args:
        value: what is written.
        asked: the argument, for messages: "Host(limit=...)".

    Raises:
        UsageError: it is neither, or negative.

    Examples:
        >>> from reactivate._text.sizes import size
        >>> size("1GiB", "Host(limit=...)"), size(4096, "Host(limit=...)")
        (1073741824, 4096)
    """
    if type(value) is int and value >= 0:
        return value
    found = split(value) if isinstance(value, str) else None
    if found is not None and found[1] in UNITS:
        return int(Fraction(found[0]) * UNITS[found[1]])
    raise UsageError(
        f'{asked} takes a size: an int of bytes (1073741824), or a text with a unit ("1GiB"); got {value!r}.'
    )


def count(value: int, asked: str) -> int:
    """Return a number of things that a user wrote.

    Raises:
        UsageError: it is no int, or negative.
    """
    if type(value) is not int or value < 0:
        raise UsageError(f"{asked} takes a number, 0 or more; got {value!r}.")
    return value
