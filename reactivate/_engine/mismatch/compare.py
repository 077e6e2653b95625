"""A recomputation compared with its forward: the self-check."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from reactivate._engine.mismatch import refusals
from reactivate._engine.mismatch.check import OUTPUTS, Check
from reactivate._engine.record import Record
from reactivate._torch.modules import is_distributed_run


def compare(record: Record, again: Callable[[], Any]) -> None:
    """Compare a recomputation with its forward; where they differ, recompute once more to see which of two it is."""
    forward: Check = record.check
    record.check = None
    first, forward.recomputed = forward.recomputed, None
    if first is None:
        return
    number = forward.difference(first)
    is_read_the_same = (number is None or number >= OUTPUTS) and forward.proves(first, _refilled(record))
    if record.proof is not None:
        if not is_read_the_same and (number is not None or not first.has_same_results):
            raise disproved(record)
        record.proof.is_settled = True
        return
    if number is None or is_read_the_same:
        return
    is_deterministic = None
    if not is_distributed_run():  # other ranks would wait in the collectives of a second one
        record.check = forward
        again()
        second, record.check = forward.recomputed, None
        is_deterministic = second is not None and first.difference(second) is None
    # An op that adds up in any order may choose another expert on an accelerator; on the CPU there is none.
    if (is_deterministic or forward.is_on_cpu()) and not forward.is_rounding(first):
        raise record.options.exception(refusals.missed_state(record, number))
    warnings.warn(refusals.differs(record, number, is_deterministic), stacklevel=2)


def _refilled(record: Record) -> list[int]:
    """Return the numbers of the saved tensors that a recomputation has filled."""
    slots = [reference() for reference, *_ in record.saved]
    return [index for index, slot in enumerate(slots) if slot is not None and getattr(slot, "kept", None) is None]


def disproved(record: Record) -> BaseException:
    """Return the error for a forward that wrote to what it reads; from the next call on there is a copy of it."""
    record.proof.ask_for_copies()
    return record.options.exception(refusals.disproved(record))
