"""Paths of modules, as in `model.named_modules()`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from reactivate._modules.standin import own_forward_of
from reactivate._torch.dynamo import compiled_call_of, is_compiled_function, is_wrapped_by_compiler

THE_MODEL = "the model itself"
"""The path of a model in words: in `named_modules()` it is empty."""


def is_below(path: str, above: str) -> bool:
    """Return whether a module is, or is inside of, another.

    Examples:
        >>> from reactivate._modules.paths import is_below
        >>> is_below("layers.1.mlp", "layers.1"), is_below("layers.10", "layers.1"), is_below("head", "")
        (True, False, True)
    """
    return not above or path == above or path.startswith(f"{above}.")


def modules_below(root: Module, path: str, *, is_compiled: bool) -> Iterator[tuple[str, Module, bool]]:
    """Yield the modules inside of a module, as `named_modules` does, unseen and faster.

    Args:
        root: the module.
        path: its path.
        is_compiled: whether compiled code calls what is inside of it.

    Yields:
        The path of a module, the module, and whether compiled code calls it.
    """
    seen = {id(root)}
    todo: list[tuple[str, Module, bool]] = [(path, root, is_compiled)]
    while todo:
        path, module, is_compiled = todo.pop()
        if module is not root:
            if id(module) in seen:
                continue
            seen.add(id(module))
            is_compiled = is_compiled or compiled_call_of(module) is not None
            yield path, module, is_compiled
        children = module.__dict__["_modules"]
        if children:
            prefix = path + "." if path else ""
            is_compiled = is_compiled or _compiles_inside(module)
            below = reversed(children.items())
            todo += [(prefix + name, child, is_compiled) for name, child in below if child is not None]


def is_compiled_module(module: Module) -> bool:
    """Return whether torch.compile compiles a module: in place, in a wrapper around it, or as its `forward`."""
    return compiled_call_of(module) is not None or _compiles_inside(module)


def compiled_functions_of(module: Module) -> list[Any]:
    """Return the functions that torch compiled of which a call of the module calls at least one, if it is compiled."""
    return [fn for fn in (compiled_call_of(module), _forward_of(module)) if is_compiled_function(fn)]


def _compiles_inside(module: Module) -> bool:
    return is_wrapped_by_compiler(module) or is_compiled_function(_forward_of(module))


def _forward_of(module: Module) -> Any:
    forward = own_forward_of(module)
    return type(module).forward if forward is None else forward
