"""Dropout calls that are kept: of what they drew one bit an element, and nothing of what they computed.

What dropout returns is its argument times noise, which is zero or one number. A recomputation has the argument anyway. So
where autograd's graph shows that a call returned just that, the product is computed again, without random numbers, and the
noise is kept as bits. The calls that are looked at here run code of torch's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter, functional

from reactivate._engine.kept_calls.bits import Bits, same_bits
from reactivate._engine.kept_calls.kept import Kept
from reactivate._engine.kept_calls.saved_call import SavedCall
from reactivate._engine.kept_calls.site_log import unseen
from reactivate._torch.autograd import is_forward_mode_active
from reactivate._torch.fake import FakeTensor

_PYTHON = {
    name: getattr(functional, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}
_OPS = ("dropout", "feature_dropout", "native_dropout", "alpha_dropout", "feature_alpha_dropout")
_FUNCTIONS = frozenset(
    {
        *_PYTHON.values(),
        *(getattr(torch, name) for name in _OPS),
        *(getattr(torch.ops.aten, name) for name in _OPS),
        *(getattr(torch.ops.aten, name).default for name in _OPS),
    }
)
_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_FORWARDS = frozenset(module.forward for module in _MODULES)
_PLAIN = (Tensor, Parameter, FakeTensor)


class Product:
    """A result that a recomputation computes from an argument and from what the call drew.

    Attributes:
        noise: what it drew.
        factor: of a mask, None where the noise is no mask.
    """

    __slots__ = ("factor", "noise")

    def __init__(self, noise: Kept, factor: float | None) -> None:
        self.noise = noise
        self.factor = factor

    def make(self, arguments: Sequence[Tensor]) -> Tensor:
        """Return the result, from the arguments of a recomputation."""
        found: Tensor = unseen(_product, arguments[0], self.noise.load(), self.factor)
        return found


class Drawn(NamedTuple):
    """The noise of a dropout call.

    Attributes:
        noise: the tensor that it saved.
        kept: as it is kept.
        product: the result, None if that is something else.
    """

    noise: Tensor
    kept: Kept
    product: Product | None

    def form_of(self, leaf: Tensor) -> Kept | Product | None:
        """Return what is kept of a tensor of the result; None for the tensor itself."""
        return self.kept if leaf is self.noise else self.product


def is_dropout(fn: Any) -> bool:
    """Return whether `fn` is one of torch's dropout functions, or the `forward` of one of its modules."""
    if getattr(fn, "__func__", None) in _FORWARDS:
        return all(getattr(functional, name) is function for name, function in _PYTHON.items())
    try:
        return fn in _FUNCTIONS
    except TypeError:
        return False


def call_without_graph(call: SavedCall, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a dropout function whose argument needs no gradient, and note the noise in `call.unsaved`.

    Autograd would save nothing; so it runs on an argument that needs one.
    """
    argument = args[0]
    stand_in = unseen(_stand_in, argument)
    noise: list[Tensor] = []
    with torch.enable_grad(), saved_tensors_hooks(noise.append, _never):
        result = fn(stand_in, *args[1:], **kwargs)
    if result is stand_in:
        return argument
    return unseen(_without_graph, call, result, stand_in, noise)


def _stand_in(argument: Tensor) -> Tensor:
    return argument.detach().requires_grad_()


def _without_graph(call: SavedCall, result: Any, stand_in: Tensor, noise: Sequence[Tensor]) -> Any:
    if isinstance(result, tuple):
        return tuple(item.detach() for item in result)
    if len(noise) == 1 and _is_product(result, stand_in):
        call.unsaved = noise[0]
    return result.detach()


def has_no_graph(call: SavedCall, args: Any, kwargs: Any) -> bool:
    """Return whether a dropout call is one for `call_without_graph`."""
    if len(call.sources.arguments) != 1 or not args or args[0] is not call.sources.arguments[0]:
        return False
    if is_forward_mode_active() or kwargs.get("inplace") or any(item is True for item in args[3:]):
        return False
    argument = args[0]
    needs_none = not (argument.requires_grad and torch.is_grad_enabled())
    is_inplace = getattr(call.decision.module, "inplace", False)
    return needs_none and not is_inplace and type(argument) in _PLAIN and argument.is_floating_point()


def drawn_by(call: SavedCall, result: Any) -> Drawn | None:
    """Return what a dropout call drew, None if that is not to be seen."""
    arguments = call.sources.arguments
    noise = call.unsaved if call.unsaved is not None else call.saved[0][1] if len(call.saved) == 1 else None
    if noise is None or len(arguments) != 1 or type(arguments[0]) not in _PLAIN:
        return None
    out = result[0] if isinstance(result, tuple) else result
    is_shown = isinstance(result, tuple) and any(item is noise for item in result)
    is_product = call.unsaved is not None or _is_product(out, arguments[0])
    factor = None if is_product else _factor(out, arguments[0], noise)
    kept: Kept | None = Bits.of(noise, call.storage, is_shown=is_shown)
    if kept is None and is_product:
        kept = Kept(noise.detach(), noise._version, call.storage)
    if kept is None:
        return None
    return Drawn(noise, kept, Product(kept, factor) if is_product or factor is not None else None)


def _is_product(out: Any, argument: Tensor) -> bool:
    """Return whether `out` is `argument` times the one tensor that was saved: the graph says so."""
    node = out.grad_fn if isinstance(out, Tensor) else None
    if node is None or node.name() != "MulBackward0" or out._version:
        return False
    (before, output), (other, _) = node.next_functions
    if other is not None or before is None:
        return False
    if argument.grad_fn is not None:
        return before is argument.grad_fn and output == argument.output_nr
    return getattr(before, "variable", None) is argument


def _factor(out: Any, argument: Tensor, mask: Tensor) -> float | None:
    """Return the factor of a `native_dropout`, if on the CPU it comes out with the same bits."""
    node: Any = out.grad_fn if isinstance(out, Tensor) else None
    if node is None or node.name() != "NativeDropoutBackward0" or type(out) is not Tensor or out.device.type != "cpu":
        return None
    kept = 1.0 - node._saved_p
    factor = 1.0 / kept if kept else 0.0
    again = unseen(_product, argument, mask, factor)
    return factor if again.stride() == out.stride() and same_bits(out, again) else None


def _product(argument: Tensor, noise: Tensor, factor: float | None) -> Tensor:
    with torch.no_grad():
        return argument.mul(noise if factor is None else noise.to(argument.dtype).mul_(factor))


def _never(tensor: Tensor) -> Tensor:
    raise AssertionError("no backward goes through this")
