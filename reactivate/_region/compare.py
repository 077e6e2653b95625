"""A recomputation compared with its forward: the self-check."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reactivate._passes.check import NOTHING, OUTPUTS, Check
from reactivate._passes.uninitialised import Filled
from reactivate._region import errors_text
from reactivate._region.accounts import is_shortage
from reactivate._saved_calls.saved_call import SETTLING_CODE
from reactivate._torch.modules import is_distributed_run
from reactivate.errors import ReactivateError

if TYPE_CHECKING:
    from reactivate._region.proof import WriteProof
    from reactivate._region.region import Region


def compare(region: Region, again: Callable[[], Any]) -> None:
    """Compare a recomputation with its forward; where they differ, recompute once more to see which of two it is."""
    forward, region.check = region.check, None
    if forward is None:
        return
    first, forward.recomputed = forward.recomputed, None
    if first is None:
        return
    number = forward.difference(first)
    is_read_the_same = (number is None or number >= OUTPUTS) and forward.proves(first, _refilled(region))
    if region.proof is not None:
        if not is_read_the_same and (number is not None or not first.has_same_results):
            raise disproved(region, region.proof)
        region.proof.is_settled = True
        return
    if forward.doubtful and not is_read_the_same:
        raise region.options.exception(forward.doubtful[0])
    of_storages = (number for number, (_, code, _) in enumerate(region.saved) if code is SETTLING_CODE)
    unsure = forward.unsure().difference(of_storages)
    if is_read_the_same or (number is None and not unsure & forward.differences(first, unsure)):
        return
    is_deterministic, unwritten, given = None, NOTHING, NOTHING
    if not is_distributed_run():  # other ranks would wait in the collectives of a second one
        filled = Filled(0)
        try:
            second = _again(region, forward, again, filled)
            # What an op or a custom function makes for itself may be memory that holds anything.
            given = unsure & filled.given
            if filled.is_used and second is not None:
                others = [_again(region, forward, again, Filled(value)) for value in (1, 1, 0)]
                unwritten = _unwritten(second, others, given)
        except Exception as error:
            # The function does something else where its ops are watched, or contexts of the user's are for one pass.
            if is_shortage(error) or (number is not None and isinstance(error, ReactivateError)):
                raise
            if number is None:
                return
            second = None
        number = forward.difference(first, unwritten, given)
        is_deterministic = second is not None and first.difference(second, unwritten, given) is None
    if number is None:
        return
    # An op that adds up in any order may choose another expert on an accelerator; on the CPU there is none.
    if (is_deterministic or forward.is_on_cpu()) and not forward.is_rounding(first, unwritten, given):
        raise region.options.exception(errors_text.missed_state(region, number))
    warnings.warn(errors_text.differs(region, number, is_deterministic), stacklevel=2)


def _unwritten(zero: Check, others: list[Check | None], given: frozenset[int]) -> frozenset[int]:
    """Return the numbers of the tensors that depend on memory without contents, and on nothing else that changes.

    Args:
        zero: of a recomputation with zeros in such memory.
        others: of the next three, with ones, ones, and zeros.
        given: as `also` in `Check.difference`.
    """
    one, one_again, zero_again = others
    if one is None or one_again is None or zero_again is None:
        return NOTHING
    return zero.differences(one, given) - one.differences(one_again, given) - zero.differences(zero_again, given)


def _again(region: Region, forward: Check, again: Callable[[], Any], filled: Filled) -> Check | None:
    """Recompute once more, and return the checksums. If that fails, the region has what it had before."""
    values = region.values
    region.check, region.filled = forward, filled
    try:
        again()
    except BaseException:
        region.values = values
        raise
    finally:
        found, forward.recomputed = forward.recomputed, None
        region.check, region.filled = None, None
    return found


def _refilled(region: Region) -> list[int]:
    """Return the numbers of the saved tensors that a graph still has, and that are recomputed."""
    return list(filter(region.is_recomputed, range(len(region.saved))))


def disproved(region: Region, proof: WriteProof) -> BaseException:
    """Return the error for a forward that wrote to what it reads; from the next call on there is a copy of it."""
    proof.ask_for_copies()
    return region.options.exception(errors_text.disproved(region, proof.places()))
