"""Saved tensors outside of any node: inputs of regions are kept in these.

So hooks around a region see them, and autograd checks their version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reactivate._torch.autograd import set_grad_enabled
from reactivate._torch.modes import dispatch_modes, replace_dispatch_modes
from reactivate._torch.ways import fastest


def _empty() -> torch.Tensor:
    """A tensor that no mode sees being made."""
    modes = dispatch_modes()
    replace_dispatch_modes(())
    try:
        with torch._C.DisableTorchFunction():
            return torch.empty(0, device="cpu")
    finally:
        replace_dispatch_modes(modes)


def _set_modes(grad: bool, forward_grad: bool) -> None:
    with torch._C.DisableTorchFunction():
        set_grad_enabled(grad)
        torch._C._set_fwd_grad_enabled(forward_grad)


with torch.inference_mode(False):
    _ANCHOR = torch.empty(0, device="cpu", requires_grad=True)  # so that there is a node


class _KeepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return _empty()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing differentiates through a kept input")


class SavedOnNode:
    """A saved tensor on a node of its own: the public way."""

    __slots__ = ("_nested", "_output")

    def __init__(self, tensor: torch.Tensor, is_output: bool) -> None:
        self._nested = (tensor, tensor._version) if tensor.is_nested else None  # which no custom function saves
        if self._nested is not None:
            return
        modes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        _set_modes(True, False)
        try:
            self._output = _KeepInput.apply(_ANCHOR, tensor)  # the node lives as long as this
        finally:
            _set_modes(*modes)

    def unpack(self) -> torch.Tensor:
        """The tensor, or autograd's own error if it was written to."""
        if self._nested is not None:
            tensor, version = self._nested
            if tensor._version != version:
                raise RuntimeError("a nested tensor that a region reads has been modified by an inplace operation")
            return tensor
        return self._output.grad_fn.saved_tensors[0]


def _keeps(kind: Any, save: Any) -> bool:
    x = torch.ones(1, device="cpu", requires_grad=True)
    saved = save(x, False)
    return isinstance(saved, kind) and saved.unpack() is not None


SavedTensor: Any
save_tensor: Callable[[torch.Tensor, bool], Any]
# Since torch 2.12. `save_tensor(tensor, False)`: not an op's output.
SavedTensor, save_tensor = fastest(
    "saving a tensor without an autograd node",
    "torch._C._autograd.SavedTensor",
    "torch._C._autograd._make_saved_tensor",
    probe=_keeps,
    public=(SavedOnNode, SavedOnNode),
)


def data_of(saved: Any) -> Any:
    """Return what is kept for a saved tensor: the tensor, or what hooks made of it. (A node can only run them.)"""
    return saved.data if hasattr(saved, "data") else saved.unpack()
