"""The errors of a region, in words: what was asked, what was found, where, what to do (Rules 15 to 18)."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from reactivate._passes.check import OUTPUTS
from reactivate._passes.places import line_of
from reactivate._region.naming import (
    metadata_text,
    name_of,
    registered_name,
    saved_at,
    site_now,
    site_text,
    tensor_text,
    written_input,
)
from reactivate._snapshot.module_walk import left_out
from reactivate._snapshot.moment import GRADIENT
from reactivate.errors import MutationError, RecomputeMismatchError

if TYPE_CHECKING:
    from reactivate._region.region import Region


_SAME = (
    "The function must do the same in both passes. Look for what decides otherwise between them: a global, a counter "
    'or a file that it changes, a random number from a source that no guard knows. `check="every"` names the '
    "first op that differs."
)


def written_before_recomputation(region: Region, reason: Exception) -> MutationError:
    """An input of the region was written to in place after the forward pass read it."""
    return MutationError(
        f"The region `{name_of(region)}` cannot be recomputed: {written_input(region)} has been modified by an inplace "
        f"operation since the forward pass read it, so the recomputation would compute other gradients. Do not write to it "
        f"between forward and backward, or give the region a `.clone()` of it.\n({reason})"
    )


def keeps_activations_under(transform: str) -> str:
    """The region is not one in this call."""
    return (
        f"A checkpointed region that is called under {transform} keeps its activations, since saved-tensor hooks do not work "
        "there. Put the checkpoint around the transformed function."
    )


def modified_input(region: Region, place: str, tensor: Tensor) -> MutationError:
    """The recomputation reads a tensor that was modified since the forward."""
    later = "" if tensor.requires_grad else " From its next call on the region has a copy of it."
    return MutationError(
        f"The region `{name_of(region)}` cannot be recomputed: it reads `{place}`, {tensor_text(tensor)}, which has been "
        "modified by an inplace operation since the forward read it, so the gradients would be wrong. Do not write to it "
        f"between forward and backward, or give the region a `.clone()` of it.{later}"
    )


_OF_GRADIENTS = (
    "From its next call on the region keeps copies of the gradients that it changes: set the gradients to what they were and "
    "run this step again, or change them outside of the region."
)
_OF_TENSORS = (
    "Use the out-of-place op (a module's `inplace=False`), clone the tensor inside the region first, or make it a buffer of "
    "a module. From its next call on the region keeps a copy of such a tensor if that requires no gradient or is a parameter."
)


def disproved(region: Region, places: Sequence[str]) -> MutationError:
    """The region wrote to what it reads, at these places, and no copy of it had been made."""
    advice = dict.fromkeys(_OF_GRADIENTS if place == GRADIENT else _OF_TENSORS for place in places)
    return MutationError(
        f"The forward of the region `{name_of(region)}` wrote in place to {', '.join(f'`{place}`' for place in places)}, of "
        f"which there is no copy, and computes other outputs from what it left there. {' '.join(advice)}"
    )


def written_before_saved(region: Region, index: int, tensor: Tensor) -> MutationError:
    """A tensor from outside that the region's ops save was written to."""
    return MutationError(
        f"The region `{name_of(region)}` cannot be recomputed: {registered_name(region, tensor)}, {tensor_text(tensor)}, has "
        f"been modified by an inplace operation since the forward pass read it at {line_of(saved_at(region, index))}. "
        "Do not write to it between forward and backward, or give the region a `.clone()` of it."
    )


def written_after_saved(region: Region, number: int) -> MutationError:
    """A tensor that an op of the region had saved was written to; autograd raises for that without a region too."""
    # Hooks around the region may keep a copy, or let autograd allow the write.
    plainly = "Without checkpointing autograd refuses this too. " if region.users_hooks is None else ""
    return MutationError(
        f"One of the variables needed for gradient computation has been modified by an inplace operation: what the region "
        f"`{name_of(region)}` had saved at {line_of(saved_at(region, number))} was written to afterwards. "
        f"{plainly}Use the out-of-place op, or write to a clone."
    )


def different_tensor(region: Region, index: int, tensor: Tensor, frame: FrameType) -> RecomputeMismatchError:
    """Save number `index` of the recomputation is another kind of tensor."""
    shape, dtype, device, _ = region.saved[index][0]
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(region)}` differs from its forward pass: save {index + 1} of "
        f"{len(region.saved)} has different metadata.\n"
        f"  forward:       {metadata_text(shape, dtype, device)}, saved at {site_text(region, saved_at(region, index))}\n"
        f"  recomputation: {metadata_text(tensor.shape, tensor.dtype, tensor.device)}, saved at {site_now(region, frame)}\n"
        f"{_SAME}",
        kind="metadata",
    )


def different_call(region: Region, call: Any, label: str | None = None) -> RecomputeMismatchError:
    """A saved call is not where it was, or another call is."""
    found = f"calls {label}" if label is not None else "gets there with other tensors saved, or with other arguments"
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(region)}` differs from its forward pass: the saved call of {call.label} "
        f"at {site_text(region, call.location)} comes after {call.start} saved tensors and takes {call.count} tensors; the "
        f"recomputation {found}.\n{_SAME}",
        kind="metadata",
    )


def fewer_tensors(region: Region, count: int, details: str = "") -> RecomputeMismatchError:
    """The recomputation came to its end too early."""
    metadata = region.saved[count][0]
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(region)}` differs from its forward pass: a different number of tensors "
        f"was saved, {len(region.saved)} in the forward pass and {count} in the recomputation. The first that is missing is "
        f"{metadata_text(*metadata[:3])}, saved by the forward pass at {site_text(region, saved_at(region, count))}.\n"
        f"{details or _SAME}",
        kind="fewer",
    )


def more_tensors(region: Region, tensor: Tensor, frame: FrameType) -> RecomputeMismatchError:
    """The recomputation goes on saving (seen only without early stop)."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(region)}` differs from its forward pass: it saves more than the "
        f"{len(region.saved)} tensors of the forward pass. The first one too many is "
        f"{metadata_text(tensor.shape, tensor.dtype, tensor.device)}, saved at {site_now(region, frame)}.\n{_SAME}",
        kind="more",
    )


def _unseen(region: Region) -> str:
    """Return what the recomputation may have read that no rule knows."""
    found = left_out(region.fn, region.args, region.kwargs)
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    named = f" The region reaches {', '.join(found[:_MOST_NAMED])}{more}, which it does not restore." if found else ""
    return (
        "It reads something that has changed since and that the library cannot see: a write through `.data` or NumPy, an "
        f"object with state in C, a file, the environment, a thread-local value.{named} Keep that state in a buffer or an "
        "attribute of a module, give the module `recompute_state()` and `load_recompute_state(state)`, or restore the state "
        "with a guard (docs/guards.md)."
    )


_MOST_NAMED = 5


def different_values(region: Region, details: str) -> RecomputeMismatchError:
    """An op of the recomputation has another name or other results (`check="every"`)."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(region)}` computes other values than its forward pass. {details}\n"
        f"{_unseen(region)}",
        kind="values",
    )


_CHANGED_BY_HOOKS = (
    "\nOr the saved-tensor hooks around the region changed its inputs: they must return the bits that they were given. Hooks "
    "that cast or quantize go around the model without regions, or inside of a region around single calls."
)


def missed_state(region: Region, number: int) -> RecomputeMismatchError:
    """The recomputation computes something else than the forward, for a reason that no rule knows."""
    hooks = "" if region.users_hooks is None else _CHANGED_BY_HOOKS
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(region)}` computes other values than its forward, first in "
        f'{_numbered(region, number)}. {_unseen(region)} `check="every"` names the first op that differs.{hooks}',
        kind="values",
    )


def left_behind(region: Region, what: str) -> RecomputeMismatchError:
    """A recomputation has changed state that it has to leave as it was."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(region)}` has changed {what} for good, and should have put it back. "
        "Please report this as a bug of reactivate, with the shortest program that shows it. "
        '`check="metadata"` turns this check off.',
        kind="values",
    )


def missed_state_before(region: Region, call: Any) -> RecomputeMismatchError:
    """A saved call gets other numbers in the recomputation, for a reason that no rule knows."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(region)}` gives other numbers to the saved call of {call.label} at "
        f"{site_text(region, call.location)} than its forward. {_unseen(region)}",
        kind="values",
    )


def differs(region: Region, number: int, is_deterministic: bool | None) -> str:
    """A warning: the values differ, and that need not be wrong."""
    reason = (
        "by no more than rounding, as where kernels are chosen anew"
        if is_deterministic
        else "and a second recomputation differs from the first: an op in it is nondeterministic on this device"
        if is_deterministic is False
        else "and in a distributed run the region is not recomputed again to find out why"
    )
    return (
        f"The recomputation of the region `{name_of(region)}` computes other values than its forward, first in "
        f'{_numbered(region, number)}, {reason}. `check="every"` names the op; `check="metadata"` turns '
        "this check off."
    )


def _numbered(region: Region, number: int) -> str:
    if number >= OUTPUTS:
        return f"its output {number - OUTPUTS}"
    shape, dtype, device, _ = region.saved[number][0]
    return f"the {metadata_text(shape, dtype, device)} that is saved at {site_text(region, saved_at(region, number))}"


# -- places ---------------------------------------------------------------------------------------------------------
