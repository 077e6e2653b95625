"""The time of an op on a device, from what it computes and what it moves.

The roofline model (Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore
architectures", 2009). Arithmetic is that of matrix products, convolutions, attention and recurrent layers, by torch's
formulas where it has one. Everything else is bound by its traffic: each input read once, each output written once.

It does not see caches, kernels that read twice, sizes that leave a device half idle, or masks that let an attention kernel
skip half of its work. Ops that an earlier one could have been fused with cost their own traffic, as they do in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from reactivate._torch.ops import tensors_at_op, written_arguments
from reactivate.planner.cost.devices import DeviceSpec

__all__ = ["bytes_of", "flops_of", "seconds_of"]


def seconds_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, device: DeviceSpec) -> float:
    """Return the seconds of this call on `device`; 0 for one that only looks at its inputs in another way.

    Args:
        op, args, kwargs, out: a call as `__torch_dispatch__` sees it, and its result, on real tensors or fake ones.

    Examples:
        >>> import torch
        >>> from reactivate.planner.cost.devices import find
        >>> from reactivate.planner.cost.roofline import seconds_of
        >>> x = torch.ones(64, 64, device="meta")
        >>> round(seconds_of(torch.ops.aten.mm.default, (x, x), {}, x @ x, find("A100-80GB")) * 1e6, 2)
        5.04
        >>> seconds_of(torch.ops.aten.t.default, (x,), {}, x.t(), find("A100-80GB"))
        0.0
    """
    moved_bytes = bytes_of(op, args, kwargs, out)
    if not moved_bytes:
        return 0.0
    return device.seconds(flops_of(op, args, kwargs, out), moved_bytes, _format_of(op, args, kwargs))


# -- arithmetic -------------------------------------------------------------------------------------------------------


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of this call, as `torch.utils.flop_counter` counts them: a multiplication and an addition are two."""
    packet = _packet_of(op)
    if packet in _FORMULAS:
        return _FORMULAS[packet](*args)
    # Not at the top of this file: it imports triton where that is installed.
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    """Scores, and values weighted by them. Keys and values may have fewer heads than queries, each shared by several."""
    return 2 * _count_scores(query, key) * (query.shape[-1] + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    """The scores once more, and for each of the two products that of either of its inputs."""
    return 2 * _count_scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _count_scores(query: Tensor, key: Tensor) -> int:
    return prod(query.shape[:-1]) * key.shape[-2]


def _grouped_product(one: Tensor, other: Tensor, *rest: Any) -> int:
    """Of two matrices, one or both in groups along any of the three sizes."""
    groups = one.shape[0] if one.ndim == other.ndim == 3 else 1
    return 2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1]


def _recurrent(input_: Tensor, *rest: Any) -> int:
    """Every weight meets every position once. What stands before the hidden state are the weights and biases."""
    weights = [tensor for tensor in tensors_at_op(rest[:4]) if tensor.ndim == 2]
    return 2 * prod(input_.shape[:-1]) * sum(weight.numel() for weight in weights)


def _recurrent_backward(*args: Any) -> int:
    return 2 * _recurrent(*args)


# What torch has no formula for; and attention, where that of older releases refuses heads that are shared.
_NAMED: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "_grouped_mm": _grouped_product,
    "_scaled_grouped_mm": _grouped_product,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "miopen_rnn": _recurrent,
    "miopen_rnn_backward": _recurrent_backward,
}
# Not every torch has all of these.
_FORMULAS: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, name): formula for name, formula in _NAMED.items() if hasattr(torch.ops.aten, name)
}


def _format_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Which of the device's rates this call runs at (`devices.FORMATS`)."""
    dtype = next((given.dtype for given in tensors_at_op((args, kwargs)) if given.is_floating_point()), torch.float32)
    if dtype.itemsize == 1:
        return "float8"
    if dtype is torch.float32 and _fp32_precision(_name_of(op)) == "tf32":
        return "tfloat32"
    return str(dtype).removeprefix("torch.")


def _fp32_precision(name: str) -> str:
    backends: Any = torch.backends
    if "conv" in name:
        return str(backends.cudnn.conv.fp32_precision)
    return str(backends.cudnn.rnn.fp32_precision if "rnn" in name else backends.cuda.matmul.fp32_precision)


# -- traffic ----------------------------------------------------------------------------------------------------------


def bytes_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes that this call reads and writes: 0 for views, metadata, allocations and empty tensors.

    What is neither in memory that an input has nor written to by the op's schema is an output. An op without outputs that
    writes to nothing moves nothing.
    """
    given = tensors_at_op((args, kwargs))
    memories = set(map(_memory_of, given))
    changed, unread = _changed(op, args, kwargs)
    made = [] if _allocates(op) else [tensor for tensor in tensors_at_op(out) if _memory_of(tensor) not in memories]
    written_bytes = _sum_bytes(changed + made)
    if not written_bytes and not _is_tagged(op, torch.Tag.data_dependent_output):
        return 0
    return _read_bytes(_name_of(op), given, unread, _sum_bytes(made)) + written_bytes


def _changed(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs that the call writes to, and those among them whose old content it does not need."""
    changed, unread = [], []
    is_overwriting = _name_of(op) in _OVERWRITING or _is_tagged(op, torch.Tag.nondeterministic_seeded)
    for position, name, is_out in () if _allocates(op) else written_arguments(op):
        value = kwargs.get(name) if name in kwargs else args[position] if position < len(args) else None
        changed += tensors_at_op(value)
        unread += tensors_at_op(value) if is_out or is_overwriting else []
    return changed, unread


def _read_bytes(name: str, given: list[Tensor], unread: list[Tensor], made_bytes: int) -> int:
    if name.endswith("_like") or name.startswith("new_"):
        return 0  # they ask their input for its shape
    skipped = set(map(id, unread))
    read = [tensor for tensor in given if id(tensor) not in skipped]
    if name in _GATHERING and read:
        source, *rest = read
        return min(_sum_bytes([source]), made_bytes) + _sum_bytes(rest)
    return _sum_bytes(read)


_OVERWRITING = frozenset({"copy_", "fill_", "zero_"})
# They read of their first input no more than they write.
_GATHERING = frozenset(
    {"embedding", "gather", "index", "index_select", "nll_loss_forward", "nll_loss2d_forward", "take"}
)


def _allocates(op: Any) -> bool:
    """Return whether the op hands out or gives back memory without touching it."""
    name = _name_of(op)
    return "empty" in name or name in ("resize_", "set_")


def _sum_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors: each once, an expanded dimension once, a sparse tensor as if it were dense."""
    return sum(map(_size_bytes, {id(tensor): tensor for tensor in tensors}.values()))


def _size_bytes(tensor: Tensor) -> int:
    if not tensor.numel() or tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    distinct = prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
    return distinct * tensor.element_size()


def _memory_of(tensor: Tensor) -> int:
    """A number that tensors on the same memory share."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass that wraps others
        return id(tensor)


# -- calls ------------------------------------------------------------------------------------------------------------


def _is_tagged(op: Any, tag: torch.Tag) -> bool:
    return tag in getattr(op, "tags", ())  # operators of higher order have none


def _packet_of(op: Any) -> Any:
    return getattr(op, "overloadpacket", op)


def _name_of(op: Any) -> str:
    return str(_packet_of(op).__name__)
