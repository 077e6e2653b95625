"""Exits: what a region returns leaves it through a node of autograd's graph, on devices with a fence.

The backward comes there first: with the gradient that the recomputation has to wait for, before anything in the region is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from reactivate._torch.autograd import base_of, is_forward_mode_active, view_again
from reactivate._torch.modes import copy_unseen, function_modes, without_function_modes
from reactivate._torch.ops import flatten, tensors_in, unflatten
from reactivate._xla.aliases import Aliases
from reactivate._xla.fence import fences
from reactivate._xla.recomputation import tensors_of, unwritten
from reactivate.errors import UnsupportedError


class Exit(torch.autograd.Function):
    """Hands an output of a region out, and its gradient in.

    Each output has one of its own: a node for all of them would make one graph of what are several, and a backward
    through one of them would free the others.
    """

    @staticmethod
    def forward(ctx: Any, region: Any, output: Tensor) -> Tensor:
        # Weakly: autograd lets go of what it saved when a backward is done, and of a node only with the loss.
        ctx.region = ref(region)
        ctx.set_materialize_grads(False)
        return copy_unseen(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        region = ctx.region()
        if region is None or gradient is None:
            return None, gradient
        fenced = region.recompute_behind(gradient)
        # A backward that is differentiated itself sums up along its own graph, which has to be that of the plain one.
        return None, gradient if torch.is_grad_enabled() else fenced


def through_exit(region: Any, result: Any, call: Any) -> Any:
    """`result`, with what the region computed handed out by its exit if it is on a device with a fence.

    Not what the caller has already, an argument or a view of one, and not what another output was computed from: it is a
    place inside of the region, where a backward may begin or end. Takes down what a recomputation behind the fence needs.
    """
    found = (*call.given, *tensors_in(call.args, call.kwargs))
    given = list({id(tensor): tensor for tensor in found}.values())
    known = fences()
    kinds = (item.device.type for item in chain(given, tensors_of(call.modules), tensors_in((result,), {})))
    kind = next((kind for kind in kinds if kind in known), None)
    if kind is None:
        return result
    if is_forward_mode_active():
        raise UnsupportedError(
            f"A checkpointed region was called under torch.autograd.forward_ad on {kind}. There its recomputation reads "
            "its arguments through aliases, which have no tangents. Call the function without checkpointing there."
        )
    region.fence = kind, known[kind]
    region.entries = list(map(call.spec_of, given))
    region.named = unwritten(region.named, kind)
    modes = [mode for mode in function_modes() if isinstance(mode, Aliases)]
    with without_function_modes():
        handed = _handed_out(region, result, given)
    for mode in modes:  # the recomputation of a checkpoint of torch's around this region
        mode.own(tensors_in((handed,), {}))
    return handed


def _handed_out(region: Any, result: Any, given: list[Tensor]) -> Any:
    bases, known = {id(base_of(tensor)) for tensor in given}, fences()
    leaves, structure = flatten(result)
    computed = {
        id(leaf): leaf
        for leaf in leaves
        if isinstance(leaf, Tensor)
        and leaf.grad_fn is not None
        and leaf.device.type in known
        and id(base_of(leaf)) not in bases
        and not base_of(leaf).is_leaf
    }
    source_of = _sources(computed.values())
    sources = {id(source): source for source in source_of.values()}
    last = _last(sources, given) if len(sources) > 1 else sources
    handed = {key: Exit.apply(region, source) for key, source in last.items()}
    new: dict[int, Tensor] = {}
    for key, leaf in computed.items():
        source = source_of[key]
        if id(source) in handed:
            new[key] = handed[key] if source is leaf else view_again(leaf, handed[id(source)])
    return unflatten([new.get(id(leaf), leaf) for leaf in leaves], structure) if new else result


def _last(sources: dict[int, Tensor], given: list[Tensor]) -> dict[int, Tensor]:
    """Return the tensors that none of the others was computed from."""
    todo = [node for tensor in sources.values() for node, _ in tensor.grad_fn.next_functions]  # type: ignore[union-attr]
    seen: set[Any] = {tensor.grad_fn for tensor in given}  # what is before the region is not looked at
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return {key: tensor for key, tensor in sources.items() if tensor.grad_fn not in seen}


def _sources(outputs: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return {id of an output: what goes through the exit for it}: the output, or the memory that several are views of."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in outputs:
        groups.setdefault(id(base_of(tensor)), []).append(tensor)
    sources: dict[int, Tensor] = {}
    for group in groups.values():
        # Parts that one op cut (`chunk`) may not be written to, so that whether they share memory cannot be told.
        is_alone = len(group) == 1 or len({tensor.grad_fn for tensor in group}) < len(group)
        sources |= {id(tensor): tensor if is_alone else base_of(tensor) for tensor in group}
    return sources
