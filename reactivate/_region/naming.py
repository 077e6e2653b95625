"""Names that messages give: of regions, of tensors, of modules, of lines of the user's code."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from reactivate._passes.places import CodeLocation, line_of, modules_around, user_frame, users_site
from reactivate._region.due import owner_of
from reactivate._snapshot.inputs import InputSpec, rebuild
from reactivate._snapshot.kinds import asked_for, behind_proxy, owner_of_method
from reactivate._snapshot.shadows import is_known_written

if TYPE_CHECKING:
    from reactivate._region.region import Region

"""A `Region`, which messages only read."""


def name_of(region: Region) -> str:
    """Return the name of the region in messages and traces."""
    return region.options.name if region.options.name is not None else name_of_region(region.fn)


def name_of_region(fn: Any) -> str:
    """Return the name of a region that was given none: of its function, or of its module's class."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = None if isinstance(fn, Module) else asked_for(fn, "__qualname__")
    return name if isinstance(name, str) else type(fn).__name__


def saved_at(region: Region, number: int) -> CodeLocation:
    """Return where the forward saved a tensor, in the user's code as far as that is known."""
    return users_site(owner_of(region.fn), number, region.saved[number][1:])


def place_of(region: Region, spec: Any) -> str:
    """Return where an argument or closed-over tensor entered the region.

    Its value is not asked for: to unpack it may recompute a region around this one.
    """
    return next((place for place, found in inputs_of(region) if found is spec), "an input")


def written_input(region: Region) -> str:
    """Return the place of an input that was modified in place."""
    for place, spec in inputs_of(region):
        try:
            rebuild(spec, {})
        except RuntimeError:  # autograd's own
            return f"`{place}`"
    return "an input"


def inputs_of(region: Region) -> Iterator[tuple[str, Any]]:
    """Return (place, spec) of every argument and every closed-over tensor."""
    for index, spec in enumerate(region.args):
        yield from _within(spec, f"args[{index}]")
    for name, spec in region.kwargs.items():
        yield from _within(spec, f"kwargs[{name!r}]")
    function = region.fn.__func__ if isinstance(region.fn, MethodType) else region.fn
    is_function = isinstance(function, FunctionType)
    names = dict(zip(map(id, function.__closure__ or ()), function.__code__.co_freevars)) if is_function else {}
    for holder in region.moment.holders:
        spec = getattr(holder, "spec", None)
        if spec is not None:
            yield f"the function (closed over as `{names.get(id(holder.target), '...')}`)", spec


def _within(spec: Any, place: str) -> Iterator[tuple[str, Any]]:
    yield place, spec
    if isinstance(spec, InputSpec):
        for suffix, child in spec.children():
            yield from _within(child, place + suffix)


def modules_of(region: Region) -> list[tuple[str, Module]]:
    """The modules that the region can reach, with their paths."""
    found: dict[int, tuple[str, Module]] = {}  # by id, since a module may have no hash
    for root in _roots(region):
        todo = [("", root)]
        while todo:
            path, module = todo.pop()
            if id(module) not in found:
                found[id(module)] = path or type(root).__name__, module
                parts = [(name, behind_proxy(part)) for name, part in reversed(module._modules.items())]
                todo += [(f"{path}.{name}" if path else name, part) for name, part in parts if part is not None]
    return list(found.values())


def _roots(region: Region) -> Iterator[Module]:
    function: Any = region.fn
    cells = (item for contents in region.moment.contents for item in contents)
    for value in (function, owner_of_method(function), *region.args, *region.kwargs.values(), *cells):
        if issubclass(type(value), Module):  # a mock of one only says that it is
            yield value


def tensors_without_a_copy(call: Any) -> Iterator[tuple[Tensor, str]]:
    """Return (tensor, place) of what a call reads where it is, without a copy: parameters and data."""
    for root in () if call.is_large else call.roots:
        for name, parameter in root.named_parameters():
            if not is_known_written(parameter):
                yield parameter, f"{type(root).__name__}.{name}"
    for item in call.inputs:
        if isinstance(item.tensor, Tensor) and item.tensor.is_leaf:
            yield item.tensor, item.place


def registered_name(region: Region, tensor: Tensor) -> str:
    """Return the name of a parameter or buffer."""
    for root in _roots(region):
        for name, value in (*root.named_parameters(), *root.named_buffers()):
            if value is tensor:
                return f"`{type(root).__name__}.{name}`"
    return "a tensor from outside of it"


def site_text(region: Region, site: CodeLocation) -> str:
    """The line, and the modules whose class has that line."""
    names = [path for path, module in modules_of(region) if _has_code(type(module), site)]
    if not names:
        return line_of(site)
    more = f" or {len(names) - 3} more" if len(names) > 3 else ""
    return f"{line_of(site)} (module {' or '.join(names[:3])}{more})"


def _has_code(kind: type, site: CodeLocation) -> bool:
    functions = (item for base in kind.__mro__ for item in vars(base).values())
    return any(getattr(item, "__code__", None) is site[0] for item in functions)


def site_now(region: Region, frame: FrameType) -> str:
    """The line that is running, and the module."""
    here = user_frame(frame)
    paths = {id(module): path for path, module in modules_of(region)}
    owner = getattr(region.fn, "__self__", None)  # whose `forward` is called inside of its hooks
    around = (*modules_around(frame), *([owner] if isinstance(owner, Module) else ()))
    path = next((paths[id(module)] for module in around if id(module) in paths), None)
    return line_of((here.f_code, here.f_lasti)) + ("" if path is None else f" (module {path})")


def tensor_text(tensor: Tensor) -> str:
    """Return a tensor's metadata as messages give them."""
    return f"a tensor of {metadata_text(tensor.shape, tensor.dtype, tensor.device)}"


def metadata_text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Return metadata as messages give them."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
