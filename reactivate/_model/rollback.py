"""The state that a training step changes, to be put back where the step fails on the way.

Noted before the step: random number streams; buffers; attributes of modules, and of objects that the step can reach;
learning rates, schedulers and gradient scalers; and the gradients that there are, with copies of them in the memory of the
host. Noted when an optimizer steps: its state, and whether anything has been written to since.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from reactivate._bits import checksum_of
from reactivate._modules.standin import NAME, cover_in
from reactivate._snapshot.call import Call
from reactivate._torch.ops import flatten
from reactivate.guards.rng import all_sources

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_COMPANIONS = (LRScheduler, GradScaler)


class Rollback:
    """The state that a step can change, as it is before the step.

    Args:
        step, args, kwargs: the step.
        copies_optimizer: whether to copy parameters and the optimizer's state before an optimizer steps.

    Attributes:
        modules: those that the step can reach.
    """

    def __init__(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, copies_optimizer: bool
    ) -> None:
        reach = Call(step, args, kwargs)
        self.modules: list[Module] = list(reach.modules)
        self._copies_optimizer = copies_optimizer
        self._streams = [(source, source.read()) for source in all_sources(reach)]
        trees = () if reach.tree is None else zip(reach.tree.holders, reach.tree.contents)
        self._objects = [*((holder, holder.record()) for holder in reach.holders), *trees]
        self._namespaces = [(space, dict(space)) for module in self.modules for space in _namespaces_of(module)]
        stateful: list[Any] = [item for item in self.modules if hasattr(type(item), "recompute_state")]
        self._states = [(item, item.recompute_state()) for item in stateful]
        leaves: dict[int, Tensor] = {}
        for module in self.modules:
            leaves |= {id(item): item for item in module.parameters(recurse=False)}
        leaves |= {id(item): item for item in reach.reached() if item.is_leaf and item.requires_grad}
        self._leaves = [(leaf, leaf._version) for leaf in leaves.values()]
        self._gradients = [(leaf, leaf.grad, _on_host(leaf.grad)) for leaf in leaves.values()]
        buffers = {id(item): item for module in self.modules for item in module.buffers(recurse=False)}
        self._buffers = [(item, item.detach().clone()) for item in buffers.values()]
        self._others = [
            (item, item._version) for item in reach.reached() if not item.is_inference() and id(item) not in buffers
        ]
        unseen = {id(item): item for item, _ in self._others} if reach.may_write_unseen() else {}
        watched = (leaves | unseen).values()
        self._sums = [(item, checksum_of(_here(item.detach()))) for item in watched if _has_sum(item)]
        self._optimizers: dict[int, _OptimizerState] = {}
        self._companions = _Companions([item for item in reach.seen.values() if isinstance(item, _COMPANIONS)])
        own = (item for item in reach.seen.values() if isinstance(item, Optimizer))
        optimizers = {id(item): item for item in (*own, *self._companions.optimizers)}
        self._groups = list(map(_Groups, optimizers.values()))

    @contextmanager
    def watching(self, begins: Callable[[], None] | None = None) -> Iterator[None]:
        """Take note of each optimizer before its first step inside of the context; `begins` is called before that."""

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if begins is not None:
                begins()
            if id(optimizer) not in self._optimizers:
                self._optimizers[id(optimizer)] = _OptimizerState(optimizer, copies=self._copies_optimizer)

        def finish(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._optimizers[id(optimizer)].is_done = True

        handles = register_optimizer_step_pre_hook(note), register_optimizer_step_post_hook(finish)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cannot_undo(self) -> str:
        """Say what was written to of which there is no copy; empty if all can be put back."""
        optimizers = self._optimizers.values()
        if not self._copies_optimizer and any(map(_OptimizerState.may_have_written, optimizers)):
            return "an optimizer had begun to update parameters or its state"
        copied = {id(item) for state in optimizers for item in state.copied}
        versions = (*self._leaves, *self._others)
        if any(item._version != version and id(item) not in copied for item, version in versions):
            return "tensors that the step reads had been written to"
        return ""

    def not_put_back(self) -> str:
        """Say what has other bits than before the step, once all was put back: `.data` is written to without a trace."""
        if all(torch.equal(checksum_of(_here(item.detach())), known) for item, known in self._sums):
            return ""
        return "the step had changed tensors in a way that leaves no trace (`.data`, NumPy)"

    @torch.no_grad()
    def put_back(self) -> None:
        """Let all be as it was before the step."""
        for state in self._optimizers.values():
            state.put_back()
        for groups in self._groups:
            groups.put_back()
        self._companions.put_back()
        for space, before in self._namespaces:
            if cover_in(placed := space.get(NAME)) is not None:  # put there by a policy, for good
                before[NAME] = placed
            if space.keys() != before.keys() or not all(map(is_, space.values(), map(before.get, space))):
                space.clear()
                space.update(before)
        for holder, contents in self._objects:
            if not holder.is_at(contents):
                holder.put(contents)
        for module, known in self._states:
            module.load_recompute_state(known)
        for tensor, content in self._buffers:
            tensor.copy_(content)
        for leaf, gradient, content in self._gradients:
            leaf.grad = gradient
            if gradient is not None:
                _here(gradient).copy_(content)
        for source, value in self._streams:
            source.write(value)


class _OptimizerState:
    """An optimizer before its step.

    Attributes:
        copied: the tensors of which there is a copy.
        is_done: whether a step of it has ended.
    """

    def __init__(self, optimizer: Optimizer, *, copies: bool) -> None:
        self.is_done = False
        self._optimizer = optimizer
        self._groups = _Groups(optimizer)
        self._state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        found = [*parameters, *flatten(list(self._state.values()))[0]]
        tensors = {id(item): item for item in found if isinstance(item, Tensor)}
        self._versions = [(item, item._version) for item in tensors.values()]
        self.copied = [item for item in tensors.values() if copies]
        self._copies = list(map(_on_host, self.copied))

    def may_have_written(self) -> bool:
        """Return whether a tensor was written to, or that is unknown: fused kernels leave versions as they are."""
        if self.is_done or any(group.get("fused") for group in self._optimizer.param_groups):
            return True
        return any(item._version != version for item, version in self._versions)

    def put_back(self) -> None:
        """Let the optimizer, its state and its parameters be as they were."""
        for tensor, content in zip(self.copied, self._copies):
            _here(tensor).copy_(content)
        self._groups.put_back()
        self._optimizer.state.clear()
        self._optimizer.state.update({parameter: dict(entries) for parameter, entries in self._state.items()})


class _Companions:
    """The state of schedulers of learning rates and gradient scalers: what belongs to them alone, counts, rates and scales.

    Args:
        found: schedulers and scalers. Those that a scheduler consists of are found in it.

    Attributes:
        optimizers: those that schedulers write learning rates to.

    Raises:
        TypeError: one of them has an attribute that cannot be copied.
    """

    def __init__(self, found: Iterable[Any]) -> None:
        items = {id(item): item for each in found for item in _with_parts(each)}
        self.optimizers = [vars(item)["optimizer"] for item in items.values() if "optimizer" in vars(item)]
        self._shared = {id(item): item for item in (*items.values(), *self.optimizers)}
        self._content = [(item, self._copied(vars(item))) for item in items.values()]

    def put_back(self) -> None:
        """Let them be as they were."""
        for item, content in self._content:
            vars(item).clear()
            vars(item).update(self._copied(content))

    def _copied(self, content: dict[str, Any]) -> dict[str, Any]:
        return copy.deepcopy(content, dict(self._shared))


def _with_parts(item: Any) -> Iterator[Any]:
    yield item
    for part in vars(item).get("_schedulers", ()):  # of `SequentialLR` and `ChainedScheduler`
        yield from _with_parts(part)


class _Groups:
    """The options of an optimizer's groups of parameters: a scheduler writes learning rates there."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._noted = [(group, dict(group)) for group in optimizer.param_groups]
        options = [value for group, _ in self._noted for value in group.values() if isinstance(value, Tensor)]
        self._copies = [(value, value.detach().clone()) for value in options]

    def put_back(self) -> None:
        """Let them be as they were."""
        for group, before in self._noted:
            group.clear()
            group.update(before)
        for value, content in self._copies:
            value.copy_(content)


def _here(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this rank has, of others the tensor itself: the same memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _has_sum(tensor: Tensor) -> bool:
    here = _here(tensor.detach())
    return (
        type(here) in (Tensor, Parameter) and here.layout is torch.strided and not (here.is_meta or here.is_quantized)
    )


def _namespaces_of(module: Module) -> Iterator[dict[str, Any]]:
    yield module.__dict__
    for name in _REGISTRIES:
        yield module.__dict__[name]


def _on_host(tensor: Tensor | None) -> Any:
    return None if tensor is None else _here(tensor.detach()).to("cpu", copy=True)
