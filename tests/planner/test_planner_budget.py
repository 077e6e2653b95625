"""Budgets: their spellings and what they come to."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st
from several import each

from reactivate.errors import UsageError
from reactivate.planner.budget import Budget, parse


@each(
    ("budget", "total_bytes"),
    [
        (1, 1),
        (8_589_934_592, 8 * 2**30),
        ("8GiB", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        (" 512MiB ", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (".5KiB", 512),
        ("100kB", 100_000),
        ("100KB", 100_000),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("77B", 77),
        ("1e9", 10**9),
        (8e9, 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8 gib", 8 * 2**30),
        ("8KIB", 8 * 2**10),
        ("8kb", 8000),
        ("1.5E+9", 1_500_000_000),
        ("1.0009 kB", 1000),  # a part of a byte is dropped
        ("0.1GiB", 2**30 // 10),  # exactly, not as a float
    ],
)
def test_bytes(budget: float | str, total_bytes: int) -> None:
    parsed = parse(budget)
    assert parsed.total_bytes == total_bytes and parsed.share is None
    assert parsed.total(fixed_bytes=5, plain_activation_bytes=7) == total_bytes
    assert parse(parsed.text) == parsed


@each(
    ("budget", "share"),
    [("50%", Fraction(1, 2)), ("100 %", Fraction(1)), ("33.3%", Fraction(333, 1000)), ("0.01%", Fraction(1, 10_000))],
)
def test_a_share_of_the_plain_steps_activations(budget: str, share: Fraction) -> None:
    parsed = parse(budget)
    assert parsed == Budget(budget, share=share)
    assert parsed.total(fixed_bytes=1000, plain_activation_bytes=10**15) == 1000 + 10**15 * share
    assert parse(parsed.text) == parsed


def test_a_share_of_bytes_is_rounded_down() -> None:
    assert parse("50%").total(fixed_bytes=10, plain_activation_bytes=5) == 12
    assert parse("29%").total(fixed_bytes=0, plain_activation_bytes=100) == 29, "exactly: 0.29 * 100 is less than 29"


@each(
    ("budget", "found"),
    [
        (True, "is a bool"),
        (1.0, 'is a float; for that share say "100%"'),
        (8.5, "is a float"),
        (-8.0, "is negative"),
        (None, "is a NoneType"),
        (0, "leaves no memory"),
        (-1, "is negative"),
        ("0GiB", "leaves no memory"),
        ("0.1B", "leaves no memory"),
        ("-8GiB", "is negative"),
        ("-5%", "is negative"),
        ("1e9B", "has the unit 'e9B', which is none of B, kB, "),
        ("", "is not an amount and a unit"),
        ("all", "is not an amount and a unit"),
        ("8 GiB free", "is not an amount and a unit"),
        ("8", "has no unit; say 8GiB, 8MiB or 8%"),
        ("0.4", "has no unit; say 0.4GiB, 0.4MiB or 40%"),
        (0.4, 'is a float; for that share say "40%"'),
        ("40 percent", "has the unit 'percent'; say 40%"),
        ("8G", "say 8GiB or 8GB"),
        ("8g", "say 8GiB or 8GB"),
        ("8Gb", "say 8GiB or 8GB"),  # gigabits?
        ("512 m", "say 512MiB or 512MB"),
        ("8PiB", "which is none of B, kB, "),
        ("0%", "leaves no memory for activations"),
        ("100.1%", "is more than the plain step takes: 100% is its whole activation peak"),
        ("\u0665GiB", "is not an amount and a unit"),  # a digit, but not one of ours
    ],
)
def test_refused_with_what_was_found(budget: object, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(budget)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"budget={budget!r} ") and found in message
    assert '"8GiB"' in message and '"50%"' in message, "examples"
    assert "of the activation peak of the plain step: its peak without what is allocated all the time" in message


@given(st.integers(min_value=1, max_value=2**60))
def test_an_int_is_what_it_says(total_bytes: int) -> None:
    assert parse(total_bytes).total(0, 0) == parse(f"{total_bytes}B").total(0, 0) == total_bytes
