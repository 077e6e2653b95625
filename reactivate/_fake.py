"""A model on fake tensors: they have a size and a device, and neither memory nor values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reactivate._compat import FakeTensor, FakeTensorMode, flatten, unflatten
from reactivate._engine.capture import Capture


def has_no_memory(tensor: Tensor) -> bool:
    """Whether `tensor` is fake, or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def tensors_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Arguments and parameters."""
    found = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    return found + [item for root in Capture(model, args, kwargs).roots for item in root.parameters()]


@contextmanager
def faked(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Fake tensors in the place of arguments, parameters and buffers. Yields the arguments."""
    tensors = tensors_of(model, args, kwargs)
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

    namespaces: list[dict[str, Any]] = [
        namespace
        for module in Capture(model, args, kwargs).modules
        for namespace in (module._parameters, module._buffers, module.__dict__)
    ]
    originals = [{name: item for name, item in namespace.items() if fake(item) is not item} for namespace in namespaces]
    leaves, structure = flatten((args, kwargs))
    faked = unflatten([fake(leaf) for leaf in leaves], structure)
    try:
        for namespace, before in zip(namespaces, originals):
            namespace.update({name: fake(item) for name, item in before.items()})
        with mode, _Draws():
            yield faked
    finally:
        for namespace, before in zip(namespaces, originals):
            namespace.update(before)


class _Draws(TorchDispatchMode):
    """Moves a generator on where a fake op would have drawn from it: guards keep the states of those that moved."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and _is_on_cpu(result):
            generator = (kwargs or {}).get("generator") or torch.default_generator
            generator.manual_seed((generator.initial_seed() + 1) % 2**63)
        return result


def _is_on_cpu(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in flatten(result)[0])
