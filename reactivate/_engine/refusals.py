"""The errors of a region, in words: what was asked, what was found, where, what to do (Rules 15 to 18)."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._compat import SavedTensor
from reactivate._engine.forms import Form
from reactivate._engine.namespaces import Watched
from reactivate._engine.record import Record
from reactivate._engine.sites import Site, called_module, line_of, user_frame
from reactivate.errors import MutationError, ReplayMismatchError

_SAME = (
    "The function must do the same in both passes. Look for what decides otherwise between them: a global, a counter "
    'or a file that it changes, a random number from a source that no guard knows. `determinism="values"` names the '
    "first op that differs."
)


def name_of(record: Record) -> str:
    """What messages and traces call the region."""
    if record.options.name is not None:
        return record.options.name
    fn = record.fn
    if isinstance(fn, Module):
        return type(fn).__name__
    while isinstance(fn, Form) and hasattr(fn, "function"):
        fn = fn.function
    name = getattr(fn, "qualified_name", None) or getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) else type(fn).__name__


def is_of_a_write(error: Exception) -> bool:
    """Whether autograd, or one of the errors below, says that a tensor was written to in place."""
    return "modified by an inplace operation" in str(error)


def written_before_replay(record: Record, reason: Exception) -> MutationError:
    """An input of the region was written to in place after the forward pass read it."""
    return MutationError(
        f"The region `{name_of(record)}` cannot be replayed: {_written_input(record)} has been modified by an inplace "
        f"operation since the forward pass read it, so the replay would compute other gradients. Do not write to it "
        f"between forward and backward, or give the region a `.clone()` of it.\n({reason})"
    )


def written_in_forward(record: Record, form: Any, tensor: Tensor) -> MutationError:
    """The region itself wrote to one of its inputs."""
    return MutationError(
        f"The region `{name_of(record)}` wrote in place to {_place(record, form)}, {_describe(tensor)}, which its "
        "replay would have to read as it was before. Use the out-of-place op (a module's `inplace=False`), or clone "
        "the tensor inside the region first."
    )


def watched_changed(record: Record, watched: Watched, change: str) -> MutationError:
    """A tensor that the function reads by name is not what it was."""
    return MutationError(
        f"The region `{name_of(record)}` reads `{watched.name}`, {_describe(watched.tensor)}, which {change} since the "
        "forward pass read it, so a replay would compute other gradients. Do not change it between forward and "
        "backward, or pass it to the region as an argument and change a copy."
    )


def written_before_saved(record: Record, index: int, tensor: Tensor) -> MutationError:
    """A tensor from outside that the region's ops save was written to."""
    return MutationError(
        f"The region `{name_of(record)}` cannot be replayed: {_registered_name(record, tensor)}, {_describe(tensor)}, has "
        f"been modified by an inplace operation since the forward pass read it at {line_of(record.saved[index][2:])}. "
        "Do not write to it between forward and backward, or give the region a `.clone()` of it."
    )


def written_after_saved(record: Record, slot: Any) -> MutationError:
    """The region wrote to a tensor that an op before it had saved; autograd raises for that without a region too."""
    index = next(i for i, entry in enumerate(record.saved) if entry[0]() is slot)
    return MutationError(
        f"One of the variables needed for gradient computation has been modified by an inplace operation: the region "
        f"`{name_of(record)}` wrote to a tensor that it had saved at {line_of(record.saved[index][2:])}. Without "
        "checkpointing autograd refuses this too. Use the out-of-place op, or write to a clone."
    )


def different_tensor(record: Record, index: int, tensor: Tensor, frame: FrameType) -> ReplayMismatchError:
    """Save number `index` of the replay is another kind of tensor."""
    _, (shape, dtype, device, _), code, instruction = record.saved[index]
    return ReplayMismatchError(
        f"The replay of the region `{name_of(record)}` differs from its forward pass: save {index + 1} of "
        f"{len(record.saved)} has different metadata.\n"
        f"  forward: {_metadata(shape, dtype, device)}, saved at {_site(record, (code, instruction))}\n"
        f"  replay:  {_metadata(tensor.shape, tensor.dtype, tensor.device)}, saved at {_site_now(record, frame)}\n"
        f"{_SAME}",
        kind="metadata",
    )


def different_site(record: Record, site: Any, label: str | None = None) -> ReplayMismatchError:
    """A saved call is not where it was, or another call is."""
    found = f"calls {label}" if label is not None else "gets there with other tensors saved, or with other arguments"
    return ReplayMismatchError(
        f"The replay of the region `{name_of(record)}` differs from its forward pass: the saved call of {site.label} at "
        f"{_site(record, site.place)} comes after {site.start} saved tensors and takes {site.count} tensors; the replay "
        f"{found}.\n{_SAME}",
        kind="metadata",
    )


def fewer_tensors(record: Record, count: int, details: str = "") -> ReplayMismatchError:
    """The replay came to its end too early."""
    _, metadata, code, instruction = record.saved[count]
    return ReplayMismatchError(
        f"The replay of the region `{name_of(record)}` differs from its forward pass: a different number of tensors "
        f"was saved, {len(record.saved)} in the forward pass and {count} in the replay. The first that is missing is "
        f"{_metadata(*metadata[:3])}, saved by the forward pass at {_site(record, (code, instruction))}.\n"
        f"{details or _SAME}",
        kind="fewer",
    )


def more_tensors(record: Record, tensor: Tensor, frame: FrameType) -> ReplayMismatchError:
    """The replay goes on saving (seen only without early stop)."""
    return ReplayMismatchError(
        f"The replay of the region `{name_of(record)}` differs from its forward pass: it saves more than the "
        f"{len(record.saved)} tensors of the forward pass. The first one too many is "
        f"{_metadata(tensor.shape, tensor.dtype, tensor.device)}, saved at {_site_now(record, frame)}.\n{_SAME}",
        kind="more",
    )


def different_values(record: Record, details: str) -> ReplayMismatchError:
    """An op of the replay has another name or other results (`determinism="values"`)."""
    return ReplayMismatchError(
        f"The replay of the region `{name_of(record)}` computes other values than its forward pass. {details}",
        kind="values",
    )


# -- places ---------------------------------------------------------------------------------------------------------


def _place(record: Record, target: Any) -> str:
    return next((f"`{path}`" for path, form in _inputs(record) if form is target), "an input")


def _written_input(record: Record) -> str:
    for path, form in _inputs(record):
        if isinstance(form, SavedTensor):
            try:
                form.unpack()
            except RuntimeError:
                return f"`{path}`"
    return "an input"


def _inputs(record: Record) -> Iterator[tuple[str, Any]]:
    """Every form of the region's, with how it is reached."""
    seen: set[int] = set()
    yield from _within(record.fn, "the function", seen)
    for index, form in enumerate(record.args):
        yield from _within(form, f"args[{index}]", seen)
    for name, form in record.kwargs.items():
        yield from _within(form, f"kwargs[{name!r}]", seen)


def _within(form: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(form) not in seen:
        seen.add(id(form))
        yield path, form
        if isinstance(form, Form):
            for suffix, child in form.children():
                yield from _within(child, path + suffix, seen)


def _modules(record: Record) -> dict[Module, str]:
    """The modules that the region can reach, with their paths."""
    found: dict[Module, str] = {}
    for root in _roots(record):
        for path, module in root.named_modules():
            found.setdefault(module, path or type(root).__name__)
    return found


def _roots(record: Record) -> Iterator[Module]:
    for _, form in _inputs(record):
        for owner in (form, getattr(form, "__self__", None)):
            if isinstance(owner, Module):
                yield owner


def _registered_name(record: Record, tensor: Tensor) -> str:
    """What a parameter or buffer is called."""
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
