"""The errors of a region, in words: what was asked, what was found, where, what to do (Rules 15 to 18)."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import Tensor

from reactivate._engine.inputs.module_walk import left_out
from reactivate._engine.mismatch.check import OUTPUTS
from reactivate._engine.mismatch.naming import (
    metadata_text,
    name_of,
    registered_name,
    saved_at,
    site_now,
    site_text,
    tensor_text,
    written_input,
)
from reactivate._engine.record import Record
from reactivate._engine.sites import line_of
from reactivate.errors import MutationError, RecomputeMismatchError

_SAME = (
    "The function must do the same in both passes. Look for what decides otherwise between them: a global, a counter "
    'or a file that it changes, a random number from a source that no guard knows. `determinism="values"` names the '
    "first op that differs."
)


def is_of_a_write(error: Exception) -> bool:
    """Return whether autograd, or one of the errors below, says that a tensor was written to in place."""
    return "modified by an inplace operation" in str(error)


def written_before_recomputation(record: Record, reason: Exception) -> MutationError:
    """An input of the region was written to in place after the forward pass read it."""
    return MutationError(
        f"The region `{name_of(record)}` cannot be recomputed: {written_input(record)} has been modified by an inplace "
        f"operation since the forward pass read it, so the recomputation would compute other gradients. Do not write to it "
        f"between forward and backward, or give the region a `.clone()` of it.\n({reason})"
    )


def keeps_activations_under(transform: str) -> str:
    """The region is not one in this call."""
    return (
        f"A checkpointed region that is called under {transform} keeps its activations, since saved-tensor hooks do not work "
        "there. Put the checkpoint around the transformed function."
    )


def modified_input(record: Record, place: str, tensor: Tensor) -> MutationError:
    """The recomputation reads a tensor that was modified since the forward."""
    return MutationError(
        f"The region `{name_of(record)}` cannot be recomputed: it reads `{place}`, {tensor_text(tensor)}, which has been "
        "modified by an inplace operation since the forward read it, so the gradients would be wrong. Do not write to it "
        "between forward and backward, or give the region a `.clone()` of it."
    )


def disproved(record: Record) -> MutationError:
    """The region wrote to what it reads, and no copy of it had been made."""
    return MutationError(
        f"The forward of the region `{name_of(record)}` wrote in place to {record.proof.places()}, of which there is no "
        f"copy, and computes other outputs from what it left there. Use the out-of-place op (a module's "
        "`inplace=False`), clone the tensor inside the region first, or make it a buffer of a module. From its next call on "
        "the region keeps "
        "a copy of such a tensor if that requires no gradient or is a parameter."
    )


def written_before_saved(record: Record, index: int, tensor: Tensor) -> MutationError:
    """A tensor from outside that the region's ops save was written to."""
    return MutationError(
        f"The region `{name_of(record)}` cannot be recomputed: {registered_name(record, tensor)}, {tensor_text(tensor)}, has "
        f"been modified by an inplace operation since the forward pass read it at {line_of(saved_at(record, index))}. "
        "Do not write to it between forward and backward, or give the region a `.clone()` of it."
    )


def written_after_saved(record: Record, slot: Any) -> MutationError:
    """The region wrote to a tensor that an op before it had saved; autograd raises for that without a region too."""
    index = next(i for i, entry in enumerate(record.saved) if entry[0]() is slot)
    return MutationError(
        f"One of the variables needed for gradient computation has been modified by an inplace operation: the region "
        f"`{name_of(record)}` wrote to a tensor that it had saved at {line_of(saved_at(record, index))}. Without "
        "checkpointing autograd refuses this too. Use the out-of-place op, or write to a clone."
    )


def different_tensor(record: Record, index: int, tensor: Tensor, frame: FrameType) -> RecomputeMismatchError:
    """Save number `index` of the recomputation is another kind of tensor."""
    shape, dtype, device, _ = record.saved[index][1]
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` differs from its forward pass: save {index + 1} of "
        f"{len(record.saved)} has different metadata.\n"
        f"  forward:       {metadata_text(shape, dtype, device)}, saved at {site_text(record, saved_at(record, index))}\n"
        f"  recomputation: {metadata_text(tensor.shape, tensor.dtype, tensor.device)}, saved at {site_now(record, frame)}\n"
        f"{_SAME}",
        kind="metadata",
    )


def different_site(record: Record, site: Any, label: str | None = None) -> RecomputeMismatchError:
    """A saved call is not where it was, or another call is."""
    found = f"calls {label}" if label is not None else "gets there with other tensors saved, or with other arguments"
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` differs from its forward pass: the saved call of {site.label} "
        f"at {site_text(record, site.place)} comes after {site.start} saved tensors and takes {site.count} tensors; the "
        f"recomputation {found}.\n{_SAME}",
        kind="metadata",
    )


def fewer_tensors(record: Record, count: int, details: str = "") -> RecomputeMismatchError:
    """The recomputation came to its end too early."""
    metadata = record.saved[count][1]
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` differs from its forward pass: a different number of tensors "
        f"was saved, {len(record.saved)} in the forward pass and {count} in the recomputation. The first that is missing is "
        f"{metadata_text(*metadata[:3])}, saved by the forward pass at {site_text(record, saved_at(record, count))}.\n"
        f"{details or _SAME}",
        kind="fewer",
    )


def more_tensors(record: Record, tensor: Tensor, frame: FrameType) -> RecomputeMismatchError:
    """The recomputation goes on saving (seen only without early stop)."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` differs from its forward pass: it saves more than the "
        f"{len(record.saved)} tensors of the forward pass. The first one too many is "
        f"{metadata_text(tensor.shape, tensor.dtype, tensor.device)}, saved at {site_now(record, frame)}.\n{_SAME}",
        kind="more",
    )


def _unseen(record: Record) -> str:
    """Return what the recomputation may have read that no rule knows."""
    found = left_out(record.fn, record.args, record.kwargs)
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    named = f" The region reaches {', '.join(found[:_MOST_NAMED])}{more}, which it does not restore." if found else ""
    return (
        "It reads something that has changed since and that the library cannot see: a write through `.data` or NumPy, an "
        f"object with state in C, a file, the environment, a thread-local value.{named} Keep that state in a buffer or an "
        "attribute of a module, give the module `recompute_state()` and `load_recompute_state(state)`, or restore the state "
        "with a guard (docs/guards.md)."
    )


_MOST_NAMED = 5


def different_values(record: Record, details: str) -> RecomputeMismatchError:
    """An op of the recomputation has another name or other results (`determinism="values"`)."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` computes other values than its forward pass. {details}\n"
        f"{_unseen(record)}",
        kind="values",
    )


_CHANGED_BY_HOOKS = (
    "\nOr the saved-tensor hooks around the region changed its inputs: they must return the bits that they were given. Hooks "
    "that cast or quantize go around the model without regions, or inside of a region around single calls."
)


def missed_state(record: Record, number: int) -> RecomputeMismatchError:
    """The recomputation computes something else than the forward, for a reason that no rule knows."""
    hooks = "" if record.users_hooks is None else _CHANGED_BY_HOOKS
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` computes other values than its forward, first in "
        f'{_numbered(record, number)}. {_unseen(record)} `determinism="values"` names the first op that differs.{hooks}',
        kind="values",
    )


def missed_state_before(record: Record, site: Any) -> RecomputeMismatchError:
    """A saved call gets other numbers in the recomputation, for a reason that no rule knows."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` gives other numbers to the saved call of {site.label} at "
        f"{site_text(record, site.place)} than its forward. {_unseen(record)}",
        kind="values",
    )


def differs(record: Record, number: int, is_deterministic: bool | None) -> str:
    """A warning: the values differ, and that need not be wrong."""
    reason = (
        "by no more than rounding, as where kernels are chosen anew"
        if is_deterministic
        else "and a second recomputation differs from the first: an op in it is nondeterministic on this device"
        if is_deterministic is False
        else "and in a distributed run the region is not recomputed again to find out why"
    )
    return (
        f"The recomputation of the region `{name_of(record)}` computes other values than its forward, first in "
        f'{_numbered(record, number)}, {reason}. `determinism="values"` names the op; `determinism="metadata"` turns '
        "this check off."
    )


def _numbered(record: Record, number: int) -> str:
    if number >= OUTPUTS:
        return f"its output {number - OUTPUTS}"
    shape, dtype, device, _ = record.saved[number][1]
    return f"the {metadata_text(shape, dtype, device)} that is saved at {site_text(record, saved_at(record, number))}"


# -- places ---------------------------------------------------------------------------------------------------------
