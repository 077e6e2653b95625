"""Rule 11: a recomputation runs under the settings that were around its forward pass."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from journal import Journal
from oracle import Watched, assert_bitwise, leaf
from several import each
from surroundings import autocast_dtype, default_dtype, float32_matmul
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

import reactivate
from reactivate._backends.base import Backend
from reactivate._passes.observing import observed_by
from reactivate._torch import flags as flags_room
from reactivate._torch.flags import FLAGS
from reactivate._torch.modes import dispatch_modes, function_modes
from reactivate.guards import DEFAULT


class SinIsCos(TorchFunctionMode):
    """Turns sin into cos."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func in (torch.sin, Tensor.sin) else func)(*args, **(kwargs or {}))


class AllDoubled(TorchFunctionMode):
    """Doubles whatever floating-point tensor any function gives back, `detach` included."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if isinstance(out, Tensor) and out.is_floating_point() else out


class ExpIsSquare(TorchDispatchMode):
    """A dispatch mode of the user's that changes an op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sin.default:
            func = torch.ops.aten.cos.default
        return func(*args, **(kwargs or {}))


setting: contextvars.ContextVar[float] = contextvars.ContextVar("setting", default=1.0)


@contextmanager
def context_variable(value: float) -> Any:
    token = setting.set(value)
    try:
        yield
    finally:
        setting.reset(token)


def elementwise(x: Tensor) -> Tensor:
    return (x.sin().exp().sin() * torch.full((1,), 3.0)).tanh()


def matmuls(x: Tensor) -> Tensor:
    return ((x @ x.t()).sin() @ x).exp().tanh()


def attention(x: Tensor) -> Tensor:
    q = x.view(1, 1, *x.shape)
    return F.scaled_dot_product_attention(q.sin(), q.cos(), q.sin() * 2).exp()


def reads_a_context_variable(x: Tensor) -> Tensor:
    return (x.sin() * setting.get()).exp()


def makes_tensors(x: Tensor) -> Tensor:
    return (x.sin() * torch.arange(float(x.shape[-1]))).exp().tanh()


def mixed_inside(x: Tensor) -> Tensor:
    """With the dtype of the context around it, though that is disabled."""
    with torch.autocast("cpu"):
        return matmuls(x).float()


class Doubled(Tensor):
    """A class of tensors whose sine is doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is Tensor.sin else result


def of_a_subclass(x: Tensor) -> Tensor:
    return x.as_subclass(Doubled).sin().as_subclass(Tensor).exp().tanh()


def asks_for_the_dtype(x: Tensor) -> Tensor:
    return matmuls(x * torch.finfo(torch.get_autocast_dtype("cpu")).max ** 0.01)


def asks_for_the_precision(x: Tensor) -> Tensor:
    return matmuls(x * (2 if torch.get_float32_matmul_precision() == "high" else 1))


SETTINGS: list[tuple[str, Callable[[], AbstractContextManager[Any]], Callable[[Tensor], Tensor]]] = [
    ("autocast", lambda: torch.autocast("cpu", torch.bfloat16), matmuls),
    ("autocast float16", lambda: torch.autocast("cpu", torch.float16), matmuls),
    ("autocast disabled", lambda: torch.autocast("cpu", torch.float16, enabled=False), mixed_inside),
    ("autocast disabled, asked", lambda: torch.autocast("cpu", torch.float16, enabled=False), asks_for_the_dtype),
    ("autocast dtype", lambda: autocast_dtype(torch.float16), mixed_inside),
    ("float32 matmul", lambda: float32_matmul("high"), asks_for_the_precision),
    ("default dtype", lambda: default_dtype(torch.float64), elementwise),
    ("functions of subclasses", torch._C.DisableTorchFunctionSubclass, of_a_subclass),
    ("function mode", SinIsCos, elementwise),
    ("function mode that doubles everything", AllDoubled, elementwise),
    ("dispatch mode", ExpIsSquare, elementwise),
    ("default device", lambda: torch.device("cpu"), makes_tensors),
    ("sdpa math", lambda: sdpa_kernel(SDPBackend.MATH), attention),
    ("sdpa flash", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), attention),
    ("context variable", lambda: context_variable(3.0), reads_a_context_variable),
]


CASES = [(*setting, where) for setting in SETTINGS for where in ("forward", "backward", "both")]


@each(("name", "context", "fn", "where"), CASES, ids=[f"{case[0]}, {case[-1]}" for case in CASES])
def test_setting(name: str, context: Callable[[], Any], fn: Callable[[Tensor], Tensor], where: str) -> None:
    """Active around the forward, around the backward, around both: as without checkpointing."""

    def once(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        x = leaf(8, 16)
        with context() if where != "backward" else nullcontext():
            out = wrap(fn)(x)
        with context() if where == "backward" else nullcontext():
            # The engine's own ops in the backward would see a mode too, so the cotangent is made outside.
            pass
        cotangent = torch.ones_like(out)
        with context() if where != "forward" else nullcontext():
            torch.autograd.backward(out, cotangent)
        return [out.detach(), x.grad]

    plain, ours = once(lambda fn: fn), once(reactivate.checkpoint)
    for one, other in zip(plain, ours):
        assert_bitwise(one, other, name)


# On a CPU nothing differs without the guard for these; context variables are the engine's.
THE_SAME_ON_A_CPU = ("default device", "sdpa flash", "context variable")


@pytest.mark.parametrize(
    "fn_setting", [setting for setting in SETTINGS if setting[0] not in THE_SAME_ON_A_CPU], ids=lambda value: value[0]
)
def test_the_guard_is_what_makes_it_right(fn_setting: Any) -> None:
    """Without it the settings that matter on this machine give other gradients, or another number of tensors."""
    name, context, fn = fn_setting
    x = leaf(8, 16)
    with context():
        out = reactivate.checkpoint(fn, guards=DEFAULT.without("ambient"))(x)
        expected = torch.autograd.grad(fn(x).double().sum(), x)[0] if "doubles" not in name else None
    try:
        (grad,) = torch.autograd.grad(out.double().sum(), x)
    except reactivate.errors.ReactivateError:
        return
    assert expected is None or not torch.equal(grad, expected)


def test_autocast_with_a_weight_that_two_regions_share() -> None:
    """The second region's forward pass finds the cast weight in autocast's cache; its recomputation must not."""

    def once(wrap: Callable[..., Any], backward_inside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        linear, x = nn.Linear(16, 16), leaf(8, 16)
        first, second = wrap(lambda x: linear(x).tanh()), wrap(lambda x: linear(x.sin()).exp() @ linear.weight)
        with torch.autocast("cpu", torch.bfloat16):
            out = second(first(x))
            if backward_inside:
                out.float().sum().backward()
        if not backward_inside:
            out.float().sum().backward()
        return [out.detach(), x.grad, linear.weight.grad, linear.bias.grad]

    for backward_inside in (True, False):
        plain, ours = once(lambda fn: fn, backward_inside), once(reactivate.checkpoint, backward_inside)
        for one, other in zip(plain, ours):
            assert_bitwise(one, other, "autocast")


def test_a_stale_cast_weight_is_not_used() -> None:
    """Cast without a graph between forward and backward, in the same autocast context."""

    def once(wrap: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        linear, x = nn.Linear(16, 16), leaf(8, 16)
        with torch.autocast("cpu", torch.bfloat16):
            out = wrap(lambda x: linear(x.sin()).exp())(x)
            torch.clear_autocast_cache()
            with torch.no_grad():
                linear(x)
            out.float().sum().backward()
        return [x.grad, linear.weight.grad]

    for one, other in zip(once(lambda fn: fn), once(reactivate.checkpoint)):
        assert_bitwise(one, other, "autocast")


def test_every_flag_is_restored_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag changed between forward and backward: the recomputation sees the old value, then the new one is back."""
    monkeypatch.setattr(flags_room, "_set_attention_order", lambda: True)  # as on a device that is initialized
    for flag in FLAGS:
        before = flag.read()
        other = _another(flag.name, before)
        seen = Journal()
        x = leaf(4)
        out = reactivate.checkpoint(lambda x: (seen.append(flag.read()), x.sin().exp())[1])(x)
        try:
            flag.write(other)
            out.sum().backward()
            assert flag.read() == other, flag.name
        finally:
            flag.write(before)
        assert seen == [before, before], flag.name


def _another(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return {"highest": "high"}.get(value, "ieee" if value != "ieee" else "tf32")
    if isinstance(value, tuple):
        return tuple(not item for item in value)
    if isinstance(value, list):
        return value[::-1]
    return next(other for other in type(value).__members__.values() if other != value)


def test_grad_mode_inside_is_the_functions_own() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.exp().sum()
        return (x.sin() * scale).exp().tanh()

    x = leaf(4)
    (grad,) = torch.autograd.grad(reactivate.checkpoint(fn)(x).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(fn(x).sum(), x)[0])


def test_current_device_and_stream_are_the_forwards() -> None:
    """Through a fake device module: the recomputation is at the place of the forward pass, the backward at its own again."""

    class Devices:
        place = [0, "stream 0"]

        def is_initialized(self) -> bool:
            return True

        def current_device(self) -> int:
            return self.place[0]

        def current_stream(self) -> str:
            return self.place[1]

        @contextmanager
        def device(self, index: int) -> Any:
            before, self.place[0] = self.place[0], index
            yield
            self.place[0] = before

        @contextmanager
        def stream(self, stream: str) -> Any:
            before, self.place[1] = self.place[1], stream
            yield
            self.place[1] = before

    devices = Devices()
    backend = Backend("fake", devices)
    place = backend.read_place()
    devices.place[:] = [3, "stream 7"]
    with backend.at_place(place):
        assert devices.place == [0, "stream 0"]
    assert devices.place == [3, "stream 7"]


def test_whether_autocast_keeps_casts_is_what_the_forward_made_of_it() -> None:
    """The forward turns it the other way for good; a recomputation, which does so once more, changes nothing."""

    def block(x: Tensor) -> Tensor:
        torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled())
        return x.sin()

    before = torch.is_autocast_cache_enabled()
    try:
        for _ in range(2):
            reactivate.checkpoint(block, check="every")(leaf(4, 4)).sum().backward()
            before = not before
            assert torch.is_autocast_cache_enabled() is before
    finally:
        torch.set_autocast_cache_enabled(True)


# -- a recomputation that stops between two lines ---------------------------------------------------------------------


def _default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(False)


def _autocast_by_hand() -> Any:
    context = torch.autocast("cpu", torch.bfloat16)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


def _nested_autocast_by_hand() -> Any:
    leave = [_autocast_by_hand(), _autocast_by_hand()]
    return lambda: [leave.pop()() for _ in range(2)]


def _modes_by_hand() -> Any:
    contexts = [SinIsCos(), ExpIsSquare()]
    for context in contexts:
        context.__enter__()
    return lambda: [context.__exit__(None, None, None) for context in reversed(contexts)]


BY_HAND = [_default_dtype, _deterministic, _autocast_by_hand, _nested_autocast_by_hand, _modes_by_hand]


def _settings() -> list[Any]:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    flags = [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), nesting]
    return [*flags, torch.is_autocast_enabled("cpu"), function_modes(), dispatch_modes(), is_in_torch_dispatch_mode()]


def _sets_and_puts_back(setting: Any, determinism: Any) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(4, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        hidden = (x @ weight).sin()
        restore = setting()
        out = x.exp() @ weight
        restore()
        return hidden + out.float()

    return reactivate.checkpoint(block, check=determinism)


@each("setting", BY_HAND)
@each("determinism", ["first", "metadata"])
def test_flags_are_put_back_when_a_recomputation_stops_before_the_function_does(setting: Any, determinism: Any) -> None:
    before, ran, region = _settings(), Watched(), _sets_and_puts_back(setting, determinism)
    with observed_by(ran):
        for _ in range(3):
            region(torch.randn(4, 4, requires_grad=True)).sum().backward()
            assert _settings() == before
    assert ran.recomputations == 3


@pytest.mark.unfenced(reason="the graph has the fence in between")
@pytest.mark.parametrize("around", [nullcontext, SinIsCos, ExpIsSquare])
@pytest.mark.parametrize("setting", BY_HAND)
def test_all_settings_are_put_back_where_no_backward_does_it(setting: Any, around: Any) -> None:
    """A program reads a tensor that the region's graph has saved; autograd restores modes after each node alone."""
    ran, region = Watched(), _sets_and_puts_back(setting, "metadata")
    with observed_by(ran), around():
        before = _settings()
        out = region(torch.randn(4, 4, requires_grad=True))
        (node, _), *_ = out.grad_fn.next_functions
        assert node._saved_self.shape == (4, 4)
        assert _settings() == before
    assert ran.recomputations == 1


def test_the_order_of_attention_before_torch_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device torch sets it in the first attention of the process: an order from before is none to go back to."""
    is_set = iter((False, False, True))
    monkeypatch.setattr(flags_room, "_set_attention_order", lambda: next(is_set))
    flag, order = flags_room._attention_order(), torch._C._get_sdp_priority_order()
    other = order[::-1]
    try:
        before = flag.read()
        torch._C._set_sdp_priority_order(other)
        assert before is None is flag.read()
        flag.write(before)
        assert flag.read() == flag.read() == other
        flag.write(order)
        assert torch._C._get_sdp_priority_order() == order
    finally:
        torch._C._set_sdp_priority_order(order)


# -- the casts that autocast keeps ------------------------------------------------------------------------------------


def test_a_recomputation_that_another_waits_for_has_a_cache_of_casts_as_the_forward_had() -> None:
    """The inner region's argument comes from the outer one. A saved call keeps the cast of a weight unless it is cached."""

    class Second:
        def __call__(self, site: reactivate.Site) -> reactivate.Save | None:
            return reactivate.Save() if (site.name, site.index) == ("linear", 1) else None

    def step(wrap: Callable[..., Any]) -> Tensor:
        torch.manual_seed(0)
        linear = nn.Linear(4, 4)
        call = reactivate.site(linear, name="linear")
        inner = wrap(lambda x: call(call(x)))

        def outer(x: Tensor) -> Tensor:
            out = inner(x)
            out.sin().mul_(2)
            return out

        with torch.autocast("cpu", torch.bfloat16):
            out = wrap(outer)(torch.randn(4, 4))
        out.float().sum().backward()
        return linear.weight.grad

    ours = step(lambda fn: reactivate.checkpoint(fn, policy=Second(), early_stop=False))
    assert torch.equal(step(lambda fn: fn), ours)
