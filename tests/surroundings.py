"""Surroundings that may be left changed, and functions that fail at a given moment."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
import torch.nn.functional as F
from oracle import assert_bitwise, flatten, random_states, seed_everything
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import reactivate
from reactivate._torch.flags import FLAGS
from reactivate._torch.modes import dispatch_modes, function_modes

setting: contextvars.ContextVar[float] = contextvars.ContextVar("setting", default=1.0)


class Failure(Exception):
    """The error that the tests' functions raise."""


class Trap:
    """Raises when it is armed: so many times, and then no more. No recomputation disarms it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._shots: SimpleQueue[BaseException] = SimpleQueue()

    def arm(self, error: BaseException, times: int = 1) -> None:
        self.error = error
        for _ in range(times):
            self._shots.put(error)

    def __call__(self) -> None:
        if not self._shots.empty():
            raise self._shots.get()


class SinIsCos(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func in (torch.sin, Tensor.sin) else func)(*args, **(kwargs or {}))


class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Kept(saved_tensors_hooks):
    """A context that adds up the bytes of what autograd saves in it, parameters left out."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        super().__init__(self._count, lambda tensor: tensor)

    def __enter__(self) -> Kept:
        super().__enter__()
        return self

    def _count(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            self.kept_bytes += tensor.nbytes
        return tensor


class Everything(nn.Module):
    """Touches all that a recomputation sets back: random numbers, statistics, flags, attributes, context variables."""

    def __init__(self, trap: Callable[[], None]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("count", torch.zeros(()))
        self.losses: list[float] = []
        self.trap = trap

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.losses.append(float(self.count))
        h = F.dropout(self.norm(self.up(x)).sin(), 0.3) * setting.get()
        self.norm.eval()
        self.norm.weight.register_hook(lambda grad: None)
        with SinIsCos(), torch.autocast("cpu", torch.bfloat16):
            self.trap()
            h = self.spectral(self.down(h)).sin()
        self.norm.train()
        return h.float().exp().tanh()


@contextmanager
def around_the_forward() -> Iterator[None]:
    """Other settings than those of the backward."""
    token, dtype = setting.set(3.0), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with SinIsCos(), Counted(), torch.autocast("cpu", torch.bfloat16), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)
        setting.reset(token)


def identity(value: Any) -> Any:
    """Numbers and strings are their values; everything else is itself."""
    return value if isinstance(value, (bool, int, float, str)) else id(value)


def surroundings(*modules: nn.Module) -> dict[str, Any]:
    """Return everything that a region or a recomputation might leave changed."""
    state: dict[str, Any] = random_states()
    state |= {f"flag {flag.name}": flag.read() for flag in FLAGS}
    state["autocast"] = (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    state["modes"] = [id(mode) for mode in (*function_modes(), *dispatch_modes())]
    state["saved-tensor hooks"] = torch._C._autograd._top_saved_tensors_default_hooks(True)
    state["grad mode"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    state["context variable"] = setting.get()
    state["recomputing"] = reactivate.is_recomputing()
    for index, root in enumerate(modules):
        for name, module in root.named_modules():
            state |= {f"{index}.{name}.{key} is": identity(value) for key, value in vars(module).items()}
            for kind in (
                "_parameters",
                "_buffers",
                "_modules",
                "_forward_hooks",
                "_forward_pre_hooks",
                "_backward_hooks",
            ):
                state[f"{index}.{name}.{kind}"] = [(key, id(value)) for key, value in getattr(module, kind).items()]
            state |= {f"{index}.{name}.{key}": list(item) for key, item in vars(module).items() if type(item) is list}
        state |= {f"buffer {index}.{name}": buffer.clone() for name, buffer in root.named_buffers()}
    return state


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        for one, other in zip(flatten(value), flatten(after[name]), strict=True):
            assert_bitwise(one, other, name)


def prepared(trap: Trap) -> tuple[Everything, Tensor]:
    seed_everything()
    return Everything(trap), torch.randn(4, 8, requires_grad=True)


def gradients(out: Tensor, module: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    leaves = [x, *module.parameters()]
    return list(torch.autograd.grad(out, leaves, torch.ones_like(out), **options))


def assert_same_gradients(plain: list[Tensor], ours: list[Tensor]) -> None:
    assert len(plain) == len(ours)
    for index, (one, other) in enumerate(zip(plain, ours)):
        assert_bitwise(one, other, f"gradient {index}")


@contextmanager
def set_to(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Any:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


default_dtype = functools.partial(set_to, torch.get_default_dtype, torch.set_default_dtype)
autocast_dtype = functools.partial(
    set_to, lambda: torch.get_autocast_dtype("cpu"), functools.partial(torch.set_autocast_dtype, "cpu")
)
float32_matmul = functools.partial(set_to, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
