"""Paths of modules, as in `model.named_modules()`."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn import Module

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


def modules_below(root: Module, path: str) -> Iterator[tuple[str, Module]]:
    """Yield (path, module) of the modules inside of `root`, which has `path`, as `named_modules` does, unseen and faster."""
    seen = {id(root)}
    todo: list[tuple[str, Module]] = [(path, root)]
    while todo:
        path, module = todo.pop()
        if module is not root:
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield path, module
        children = module.__dict__["_modules"]
        if children:
            prefix = path + "." if path else ""
            todo += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
