"""The errors of a region, in words: what was asked, what was found, where, what to do (Rules 15 to 18)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._engine.inputs.specs import InputSpec, rebuild
from reactivate._engine.mismatch.check import OUTPUTS, owner_of
from reactivate._engine.mismatch.places import users_site
from reactivate._engine.record import Record
from reactivate._engine.sites import Site, called_module, line_of, user_frame
from reactivate._torch.saved import SavedTensor
from reactivate.errors import MutationError, RecomputeMismatchError

_SAME = (
    "The function must do the same in both passes. Look for what decides otherwise between them: a global, a counter "
    'or a file that it changes, a random number from a source that no guard knows. `determinism="values"` names the '
    "first op that differs."
)


def name_of(record: Record) -> str:
    """Return the name of the region in messages and traces."""
    if record.options.name is not None:
        return record.options.name
    fn = record.fn
    if isinstance(fn, Module):
        return type(fn).__name__
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) else type(fn).__name__


def is_of_a_write(error: Exception) -> bool:
    """Return whether autograd, or one of the errors below, says that a tensor was written to in place."""
    return "modified by an inplace operation" in str(error)


def written_before_recomputation(record: Record, reason: Exception) -> MutationError:
    """An input of the region was written to in place after the forward pass read it."""
    return MutationError(
        f"The region `{name_of(record)}` cannot be recomputed: {_written_input(record)} has been modified by an inplace "
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
        f"The region `{name_of(record)}` cannot be recomputed: it reads `{place}`, {_describe(tensor)}, which has been "
        "modified by an inplace operation since the forward read it, so the gradients would be wrong. Do not write to it "
        "between forward and backward, or give the region a `.clone()` of it."
    )


def disproved(record: Record) -> MutationError:
    """The region wrote to what it reads, and no copy of it had been made."""
    return MutationError(
        f"The forward of the region `{name_of(record)}` wrote in place to {record.proof.places()}, of which there is no "
        "copy, and computes other outputs from what it left there. Use the out-of-place op (a module's `inplace=False`), "
        "clone the tensor inside the region first, or make it a buffer of a module. From its next call on the region keeps "
        "a copy of such a tensor if that requires no gradient or is a parameter."
    )


def written_before_saved(record: Record, index: int, tensor: Tensor) -> MutationError:
    """A tensor from outside that the region's ops save was written to."""
    return MutationError(
        f"The region `{name_of(record)}` cannot be recomputed: {_registered_name(record, tensor)}, {_describe(tensor)}, has "
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
        f"  forward:       {_metadata(shape, dtype, device)}, saved at {_site(record, saved_at(record, index))}\n"
        f"  recomputation: {_metadata(tensor.shape, tensor.dtype, tensor.device)}, saved at {_site_now(record, frame)}\n"
        f"{_SAME}",
        kind="metadata",
    )


def different_site(record: Record, site: Any, label: str | None = None) -> RecomputeMismatchError:
    """A saved call is not where it was, or another call is."""
    found = f"calls {label}" if label is not None else "gets there with other tensors saved, or with other arguments"
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` differs from its forward pass: the saved call of {site.label} "
        f"at {_site(record, site.place)} comes after {site.start} saved tensors and takes {site.count} tensors; the "
        f"recomputation {found}.\n{_SAME}",
        kind="metadata",
    )


def fewer_tensors(record: Record, count: int, details: str = "") -> RecomputeMismatchError:
    """The recomputation came to its end too early."""
    metadata = record.saved[count][1]
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` differs from its forward pass: a different number of tensors "
        f"was saved, {len(record.saved)} in the forward pass and {count} in the recomputation. The first that is missing is "
        f"{_metadata(*metadata[:3])}, saved by the forward pass at {_site(record, saved_at(record, count))}.\n"
        f"{details or _SAME}",
        kind="fewer",
    )


def more_tensors(record: Record, tensor: Tensor, frame: FrameType) -> RecomputeMismatchError:
    """The recomputation goes on saving (seen only without early stop)."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` differs from its forward pass: it saves more than the "
        f"{len(record.saved)} tensors of the forward pass. The first one too many is "
        f"{_metadata(tensor.shape, tensor.dtype, tensor.device)}, saved at {_site_now(record, frame)}.\n{_SAME}",
        kind="more",
    )


def different_values(record: Record, details: str) -> RecomputeMismatchError:
    """An op of the recomputation has another name or other results (`determinism="values"`)."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` computes other values than its forward pass. {details}",
        kind="values",
    )


_LOSSY = (
    "\nOr the saved-tensor hooks around the region changed its inputs: they must return the bits that they were given. Hooks "
    "that cast or quantize go around the model without regions, or inside of a region around single calls."
)


def missed_state(record: Record, number: int) -> RecomputeMismatchError:
    """The recomputation computes something else than the forward, for a reason that no rule knows."""
    return RecomputeMismatchError(
        f"The recomputation of the region `{name_of(record)}` computes other values than its forward, first in "
        f"{_numbered(record, number)}. It reads something that has changed since and that the library cannot see: a write "
        "through `.data` or NumPy, an object with state in C, a file. Keep that state in a buffer or an attribute of a "
        'module, or give the module `recompute_state()` and `load_recompute_state(state)`. `determinism="values"` names the '
        f"first op that differs.{_LOSSY if record.users_hooks is not None else ''}",
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
    return f"the {_metadata(shape, dtype, device)} that is saved at {_site(record, saved_at(record, number))}"


# -- places ---------------------------------------------------------------------------------------------------------


def saved_at(record: Record, number: int) -> Site:
    """Return where the forward saved a tensor, in the user's code as far as that is known."""
    return users_site(owner_of(record.fn), number, record.saved[number][2:])


def place_of(record: Record, spec: Any) -> str:
    """Return where an argument or closed-over tensor entered the region.

    Its value is not asked for: to unpack it may recompute a region around this one.
    """
    return next((place for place, found in inputs_of(record) if found is spec), "an input")


def _written_input(record: Record) -> str:
    for place, spec in inputs_of(record):
        try:
            value_of(spec)
        except RuntimeError:
            return f"`{place}`"
    return "an input"


def value_of(spec: Any) -> Any:
    """Return the tensor of a spec.

    Raises:
        RuntimeError: autograd's own, where it was modified in place since.
    """
    return rebuild(spec, {}) if isinstance(spec, (SavedTensor, InputSpec)) else spec


def inputs_of(record: Record) -> Iterator[tuple[str, Any]]:
    """Return (place, spec) of every argument and every closed-over tensor."""
    for index, spec in enumerate(record.args):
        yield from _within(spec, f"args[{index}]")
    for name, spec in record.kwargs.items():
        yield from _within(spec, f"kwargs[{name!r}]")
    function: Any = getattr(record.fn, "__func__", record.fn)
    names = {id(cell): name for cell, name in zip(closure_of(function), function_names(function))}
    for note in record.notes:
        spec = getattr(note, "spec", None)
        if spec is not None:
            yield f"the function (closed over as `{names.get(id(note.target), '...')}`)", spec


def closure_of(function: Any) -> Any:
    """Return the cells of a function."""
    return getattr(function, "__closure__", None) or ()


def function_names(function: Any) -> Any:
    """Return the names of its cells."""
    return function.__code__.co_freevars if hasattr(function, "__code__") else ()


def _within(spec: Any, place: str) -> Iterator[tuple[str, Any]]:
    yield place, spec
    if isinstance(spec, InputSpec):
        for suffix, child in spec.children():
            yield from _within(child, place + suffix)


def _modules(record: Record) -> dict[Module, str]:
    """The modules that the region can reach, with their paths."""
    found: dict[Module, str] = {}
    for root in _roots(record):
        for path, module in root.named_modules():
            found.setdefault(module, path or type(root).__name__)
    return found


def _roots(record: Record) -> Iterator[Module]:
    function: Any = record.fn
    cells = (note.noted for note in record.notes if hasattr(note, "noted"))
    for value in (function, getattr(function, "__self__", None), *record.args, *record.kwargs.values(), *cells):
        if isinstance(value, Module):
            yield value


def _registered_name(record: Record, tensor: Tensor) -> str:
    """Return the name of a parameter or buffer."""
    for root in _roots(record):
        for name, value in (*root.named_parameters(), *root.named_buffers()):
            if value is tensor:
                return f"`{type(root).__name__}.{name}`"
    return "a tensor from outside of it"


def _site(record: Record, site: Site) -> str:
    """The line, and the modules whose class has that line."""
    names = [path for module, path in _modules(record).items() if _has_code(type(module), site)]
    if not names:
        return line_of(site)
    more = f" or {len(names) - 3} more" if len(names) > 3 else ""
    return f"{line_of(site)} (module {' or '.join(names[:3])}{more})"


def _has_code(kind: type, site: Site) -> bool:
    functions = (item for base in kind.__mro__ for item in vars(base).values())
    return any(getattr(item, "__code__", None) is site[0] for item in functions)


def _site_now(record: Record, frame: FrameType) -> str:
    """The line that is running, and the module."""
    here = user_frame(frame)
    module = called_module(frame)  # it may be one of torch's
    path = None if module is None else _modules(record).get(module)
    return line_of((here.f_code, here.f_lasti)) + ("" if path is None else f" (module {path})")


def _describe(tensor: Tensor) -> str:
    return f"a tensor of {_metadata(tensor.shape, tensor.dtype, tensor.device)}"


def _metadata(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
