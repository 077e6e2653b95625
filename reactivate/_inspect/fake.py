"""A model on fake tensors: they have a size and a device, and neither memory nor values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from reactivate._inspect.collectives import is_collective, simulated_collective
from reactivate._inspect.known_results import KnownCalls, KnownResults
from reactivate._inspect.sharded import sharding_faked
from reactivate._snapshot.call import Call
from reactivate._torch.dynamo import DispatchMode
from reactivate._torch.modes import FakeTensor, FakeTensorMode, device_of, unset_fake_temporarily
from reactivate._torch.modules import are_made_of_tensors, layouts_unseen, sharded_in, without_reducing
from reactivate._torch.ops import DEVICE_QUERY, flatten, leaves_at_op, tensors_at_op, unflatten


def has_no_memory(tensor: Tensor) -> bool:
    """Return whether `tensor` is fake, or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def tensors_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Arguments and parameters."""
    return _tensors_in(Call(model, args, kwargs), args, kwargs)


def _tensors_in(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    return found + [item for root in call.roots for item in root.parameters()]


@contextmanager
def faked(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None = None,
    calls: KnownCalls | None = None,
    call: Call | None = None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Fake tensors in the place of arguments, parameters and buffers. Yields the arguments.

    What is computed from no such tensor (a mask, positions) is computed, so that a model that looks at the values takes
    the turns that it takes. So are arguments that are not numbers on a scale: token ids, masks.

    Args:
        model, args, kwargs: the call.
        device: where tensors on the meta device are to seem to be; None: there.
        calls: what is known of calls of ops in steps like this one.
        call: that of the call, if it was captured already.
    """
    call = call or Call(model, args, kwargs)
    tensors = _tensors_in(call, args, kwargs)
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownResults(mode, calls)
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # by the ids of tensors on the meta device: what is shared stays so

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if value.is_meta and device is not None:
            if id(value) not in moved:
                moved[id(value)] = value, _on(device, value, known)
            return moved[id(value)][1]
        return mode.from_tensor(value)

    def fake_argument(value: Any) -> Any:
        return value if isinstance(value, Tensor) and _has_values(value) else fake(value)

    modules = call.modules
    namespaces: list[dict[str, Any]] = [
        namespace for module in modules for namespace in (module._parameters, module._buffers, module.__dict__)
    ]
    originals = [{name: item for name, item in namespace.items() if fake(item) is not item} for namespace in namespaces]
    leaves, structure = flatten((args, kwargs))
    faked = unflatten([fake_argument(leaf) for leaf in leaves], structure)
    try:
        for namespace, before in zip(namespaces, originals):
            namespace.update({name: fake(item) for name, item in before.items()})
        with ExitStack() as stack:
            for module in modules:
                if isinstance(module, DistributedDataParallel):  # gradients of fake parameters never come to it
                    stack.enter_context(without_reducing(module))
            stack.enter_context(sharding_faked(modules, fake))
            stack.enter_context(layouts_unseen())
            stack.enter_context(mode)
            stack.enter_context(_Values(known, fake if device is not None else None, gathers=bool(sharded_in(modules))))
            yield faked
    finally:
        for namespace, before in zip(namespaces, originals):
            namespace.update(before)


def _on(device: torch.device, tensor: Tensor, known: KnownResults) -> Tensor:
    made = known.of(torch.ops.aten.empty_like.default, (tensor,), {"device": device})
    is_parameter = isinstance(tensor, Parameter)
    return Parameter(made, tensor.requires_grad) if is_parameter else made.requires_grad_(tensor.requires_grad)


def _has_values(tensor: Tensor) -> bool:
    is_scale = tensor.is_floating_point() or tensor.is_complex()
    return not (is_scale or has_no_memory(tensor)) and type(tensor) is Tensor


class _Values(DispatchMode):
    """Computes what depends on no fake tensor, unless it is large; moves generators on where an op would have drawn.

    Args:
        known: runs ops on fake tensors.
        fake: from a tensor on the meta device, which a function of the user's reaches, to its fake on a device; None where
            it stays there.
        gathers: whether parameters are sharded: empty tensors that are made outside of autograd are room to gather them into,
            and their values are unknown.
    """

    limit_bytes = 2**26

    def __init__(self, known: KnownResults, fake: Callable[[Any], Any] | None, *, gathers: bool = False) -> None:
        super().__init__()
        self._known = known
        self._fake = fake
        self._gathers = gathers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if are_made_of_tensors(types):
            return NotImplemented
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):
            return device_of(args[0])
        if self._fake is not None and any(map(_is_on_meta, leaves_at_op((args, kwargs)))):
            leaves, structure = flatten((args, kwargs))
            args, kwargs = unflatten([self._fake(leaf) if _is_on_meta(leaf) else leaf for leaf in leaves], structure)
        result = self._run(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs) and _is_on_cpu(result):
            generator = kwargs.get("generator") or torch.default_generator
            generator.manual_seed((generator.initial_seed() + 1) % 2**63)  # guards keep the states of those that moved
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if is_collective(func):
            return simulated_collective(func, args, kwargs)
        given = tensors_at_op((args, kwargs))
        if any(map(has_no_memory, given)):
            return self._known.of(func, args, kwargs)
        if self._gathers and func in _EMPTY and not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if not given:  # a new tensor: how large it is, and where, its fake tells
            made = func(*args, **kwargs)
            given = tensors_at_op(made)
            if not given or sum(leaf.nbytes for leaf in given) > self.limit_bytes or given[0].is_meta:
                return made
        elif sum(leaf.nbytes for leaf in given) > self.limit_bytes:
            return self._known.of(func, args, kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and not isinstance(value, FakeTensor)


_EMPTY = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default})


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an op that may draw random numbers does: attention does not without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args)) | kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def _is_on_cpu(result: Any) -> bool:
    return any(tensor.device.type == "cpu" for tensor in tensors_at_op(result))
