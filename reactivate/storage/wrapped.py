"""Tensors that are made of tensors: distributed, quantised and other wrappers. Their parts are moved, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Wrapped:
    """A tensor made of others, by torch's protocol for these.

    Attributes:
        kind: its class.
        parts: {attribute: the tensor, or the handle of one}; what else the class names, a device mesh say, is as it is.
        context: what the class needs beside these.
        size, stride: of the whole.
        attributes: what was set on the tensor in Python, beside the parts.
        is_jagged: whether it is a jagged nested tensor.
    """

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: Any
    stride: Any
    attributes: dict[str, Any]
    is_jagged: bool

    def each(self, function: Callable[[Any], Any]) -> Any:
        """Return it with `function` of each part that is a tensor.

        Not of the offsets of a jagged tensor: which object these are says which of its dimensions it shares with others.
        """

        def is_taken(part: Any) -> bool:
            return isinstance(part, Tensor) and (not self.is_jagged or part.is_floating_point() or part.is_complex())

        parts = {name: function(part) if is_taken(part) else part for name, part in self.parts.items()}
        return replace(self, parts=parts)

    def rebuilt(self, load: Callable[[Any], Tensor]) -> Tensor:
        """Return the tensor, of parts that are loaded."""
        parts = {name: load(part) for name, part in self.parts.items()}
        tensor: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        own = vars(tensor)
        own.update({name: value for name, value in self.attributes.items() if name not in own})
        return tensor


def parts_of(tensor: Tensor) -> Wrapped | None:
    """Return what `tensor` is made of, None if it has memory of its own."""
    kind: Any = type(tensor)
    if kind is Tensor or not hasattr(kind, "__tensor_flatten__"):
        return None
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:  # a functional collective's result, which may not have arrived
        wait()
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names}
    attributes = {name: value for name, value in vars(tensor).items() if name not in parts}
    return Wrapped(kind, parts, context, tensor.size(), tensor.stride(), attributes, tensor.is_nested)
